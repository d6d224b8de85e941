"""HFA and ESync in real processes: what is averaged when, and over whom."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import local_averages


def test_hfa_averages_the_site_and_every_k2_th_time_all(ranks):
    sites = ["a", "b", "a", "b"]
    ranks.start(local_averages.hfa, 4, sites=sites)
    for rank, answer in enumerate(ranks.answers()):
        mine, site = 4.0 * (rank + 1), {"a": 8.0, "b": 12.0}[sites[rank]]
        first = [mine, 2 * site, 2 * site + mine, 40.0]
        assert answer["values"] == [*first, *(40 + value for value in first)]
        assert answer["same"] is True
        assert answer["refused"].startswith("UsageError: k1=0, k2=1")


def test_esync_takes_as_many_steps_as_the_state_server_says_and_all_get_the_same_average(ranks):
    ranks.start(local_averages.esync, 3)
    answers = ranks.answers()
    assert all(answer["same"] and answer["averages"] == 5 for answer in answers)
    expected = 0.0
    for round in range(5):
        steps = [answer["taken"][round] for answer in answers]
        assert all(2 <= count <= (6 if round else 2) for count in steps)
        expected += sum(steps) / 3
        assert [answer["values"][round] for answer in answers] == [pytest.approx(expected)] * 3
