"""MixedSync in real processes: what a site pushes, and that no site waits for another one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.integration.torch.elastic_ranks import ElasticRanks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import mixed_sync


def test_a_site_pushes_its_average_and_goes_on_while_the_other_takes_no_step(ranks):
    ranks.start(mixed_sync.sites_in_turn, 4, sites=["a", "b", "a", "b"])
    answers = ranks.answers()
    # Site a has the gradients 1 and 3, site b 2 and 4; the parameters begin with rank 0's, which are 1.
    of_site = {0: [-1.0, -3.0, -5.0], 1: [-8.0]}
    for rank, answer in enumerate(answers):
        assert answer["values"] == of_site[rank % 2]
        assert answer["same"] is True
        assert answer["end"] == -8.0
        assert answer["leads"] is (rank < 2)
        assert answer["steps"] == len(of_site[rank % 2])


def test_a_site_is_ahead_of_the_slowest_by_no_more_than_the_bound(ranks):
    sites = ["a", "b", "a", "b"]
    ranks.start(mixed_sync.bounded, 4, sites=sites, steps=4, staleness=1, NETSTORM_STALENESS=1)
    for rank, answer in enumerate(ranks.answers()):
        assert len(answer) == (4 if sites[rank] == "b" else 0), answer
        assert all(steps <= 1 for steps in answer)


@pytest.mark.slow
def test_digits_are_learnt_as_in_step_while_a_site_takes_a_quarter_of_the_others_steps(ranks):
    sites = ["a", "a", "b"]
    ranks.start(mixed_sync.digits, 3, sites=sites, slow="b", factor=4, epochs=4)
    answers = ranks.answers()
    assert len({answer["mixed"] for answer in answers}) == 1
    fast, slow = answers[0]["steps"], answers[2]["steps"]
    assert answers[1]["steps"] == fast
    assert slow == fast // 4
    assert answers[0]["in step"] > 0.85
    assert answers[0]["mixed"] > answers[0]["in step"] - 0.04


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [-1, 2])
def test_a_site_goes_on_without_its_leader_which_comes_back_as_a_site_of_its_own(forker, tmp_path, staleness):
    with ElasticRanks(forker, tmp_path, begin=4, elastic="1:4", NETSTORM_STALENESS=staleness) as job:
        for rank, site in enumerate("aabb"):
            job.start(str(rank), rank, mixed_sync.elastic_sites, number=rank, site=site)
        job.wait_until_said("1", "site of [0, 1], leads: False")
        job.wait_until_said("3", "site of [2, 3], leads: False")
        job.kill("0")
        job.wait_until_said("1", "site of [1], leads: True")
        job.start("back", 0, mixed_sync.elastic_sites, number=4, site="a")
        job.wait_until_said("back", "site of [0], leads: True")
        job.kill("2")
        job.wait_until_said("3", "site of [3], leads: True")
        (tmp_path / "end").touch()
        for number in (1, 3, 4):
            job.wait_until_there(f"ended {number}")
        (tmp_path / "all ended").touch()
        answers = {number: job.answer(name) for number, name in ((1, "1"), (3, "3"), (4, "back"))}
        job.end()
    values = answers[1]["values"]
    assert all(answer["values"] == values for answer in answers.values())
    # Of the step in which a leader has died the push may be lost.
    assert values[0] + values[1] in (answers[1]["steps"] - 1, answers[1]["steps"])
    assert values[2] + values[3] in (answers[3]["steps"] - 1, answers[3]["steps"])
    assert values[4] == answers[4]["steps"]
    assert values[0] > 0
    assert values[2] > 0


def test_a_group_is_refused_in_an_elastic_job(forker, tmp_path):
    with ElasticRanks(forker, tmp_path, begin=1, elastic="1:2") as job:
        job.start("only", 0, mixed_sync.group_in_an_elastic_job)
        assert "site_group= in an elastic job (NETSTORM_ELASTIC): leave it out" in job.answer("only")
        job.end()
