"""Networks with bbr's dips: what a link carries, and when."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from netstorm.topology.files import parse_network

NETWORK = """
nodes: {0: {site: a}, 1: {site: b}}
links:
  - {between: [0, 1], rate: 20Mbit, latency: 30ms}
changes:
  - {at: 15s, from: 0, to: 1, rate: 5Mbit}
  - {at: 16s, from: 1, to: 0, latency: 40ms}
"""


@pytest.mark.parametrize("seed", range(5))
def test_dips_leave_the_rest_of_the_course_as_it_is(monkeypatch, seed):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    changing = importlib.import_module("changing")
    plain = parse_network(NETWORK, "test")
    dipping = changing.with_dips(plain, 0.25, 60.0, seed)
    low_s = 0.0
    for at in (number / 100 for number in range(6000)):
        for link, was in zip(dipping.at(at).links, plain.at(at).links, strict=True):
            assert link.latency == was.latency
            if link.rate == changing.DIP_RATE:
                low_s += 0.01
            else:
                assert link.rate == was.rate
    assert low_s == pytest.approx(2 * 6 * 0.25, rel=0.15)  # six dips of each direction in a minute
