"""Networks with bbr's dips: what a link carries, and when; and how soon policies suit new rates."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from netstorm.topology.files import parse_network
from netstorm.topology.form import form_with_options
from netstorm.topology.network import Change, Rank, generate
from netstorm.topology.policy import Options

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


@pytest.mark.parametrize(("seed", "nodes"), [(0, 9), (1, 6), (2, 6)])
def test_all_links_of_a_drawn_network_change_three_times(monkeypatch, seed, nodes):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    changing = importlib.import_module("changing")
    network = changing.drawn(seed)
    assert network == changing.drawn(seed) != changing.drawn(seed + 3)
    assert network.size == nodes
    rates = [{link.rate for link in network.at(at).links} for at in (0.0, 20.0, 40.0, 60.0)]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(rates, 2))


def test_a_policy_is_good_from_when_it_is_in_force_after_the_change_that_it_suits(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    changing = importlib.import_module("changing")
    network = replace(
        generate("mesh", 4, seed=1),
        changes=tuple(
            Change(at=at, source=Rank(one), target=Rank(other), rate=rate)
            for at, rate in ((40.0, 1e6), (60.0, 100e6))
            for one, other in ((0, 1), (1, 0), (1, 2), (2, 1))
        ),
    )
    options = Options(chunk_bytes=65_536, tensors=(4_000_000,))
    first, slow, last = (
        form_with_options(phase, "packing", options)
        for phase in (network.at(0.0), network.at(40.0), network.at(60.0))
    )
    cluster = SimpleNamespace(now=0.0, scheduler=SimpleNamespace(machine=SimpleNamespace(policy=first)))
    looks = []
    cluster.at = lambda at, look: looks.append((at, look))
    watch = changing.PolicyWatch(cluster)
    for cluster.now, policy in ((43.0, slow), (59.0, last)):
        cluster.scheduler.machine.policy = policy
        looks.pop()[1]()
    # The policy of 43 s is the first that suits the rates from 40 s on, and that of 59 s those from 60 s on.
    assert watch.good_after(network, "packing", options) == [3.0, 0.0]
    del watch._found[1:]
    assert watch.good_after(network, "packing", options)[0] == 20.0
