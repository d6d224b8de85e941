"""Groups, messages and mismatches of PyTorch's on real ranks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from netstorm.addresses import split_host_port
from netstorm.cli.launch.variables import free_port
from tests.integration.jobs import Job
from tests.integration.torch.test_async_calls import answer

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import groups

BOTH_SIDES = {
    "shape": ("all_reduce(SUM) of float32 (3,)", "all_reduce(SUM) of float32 (2,)"),
    "order": ("barrier()", "all_reduce(SUM) of float32 (2,)"),
    "receiver": ("reduce(SUM) to rank 0 of float32 (2,)", "all_reduce(SUM) of float32 (2,)"),
}
"""The same call of another tensor, a call that has no tensor, another call's sums."""


def test_groups_may_overlap_have_any_order_and_be_used_at_once(ranks):
    ranks.start(groups.subgroups, 4)
    assert ranks.answers() == [[]] * 4


def test_a_group_of_netstorm_works_beside_one_of_gloo(ranks):
    ranks.start(groups.beside_gloo, 3)
    assert ranks.answers() == [[]] * 3


def test_members_with_different_histories_of_groups_find_each_other(ranks):
    members = [[0, 1], [0, 1], [1, 2], [0, 1, 2]]
    ranks.start(groups.after_others, 3, members=members)
    for rank, sums in enumerate(ranks.answers()):
        assert sums == [len(ranks) for ranks in members if rank in ranks]


def test_a_group_of_some_ranks_is_a_job_of_its_own_beside_that_of_the_named_scheduler(ranks, tmp_path):
    (tmp_path / "scheduler").mkdir()
    with Job(tmp_path / "scheduler", 3) as job:
        host, port = split_host_port(job.address)
        named = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": 3}
        ranks.start(groups.after_others, 3, members=[[1, 2], [0, 1, 2]], **named)
        assert ranks.answers() == [[3], [2, 3], [2, 3]]
        assert job.end(-1).code == 0


def test_a_group_that_some_members_cannot_make_is_an_error_at_all_of_them(ranks):
    ranks.start(groups.beside_a_pair, 3)
    for error in ranks.answers():
        assert "ranks [0] are not in the first NetStorm group, of ranks [1, 2]" in error
        assert "create a group of all ranks first" in error


def test_the_address_of_the_store_may_be_one_of_ipv6(ranks):
    ranks.start(groups.same_name_again, 2, STORE="env://", MASTER_ADDR="::1", MASTER_PORT=free_port())
    assert ranks.answers() == [[2.0, 4.0, 6.0]] * 2


def test_messages_barriers_and_groups_of_one_job(ranks):
    """What one job proves, one after the other.

    Messages are matched by rank, tag and order, and may come from anybody. One that does not fit is an error
    that names both sides, and nothing else. A monitored barrier names who is missing, and the next one is
    passed. A group whose name comes back is a new one.
    """
    ranks.start(groups.one_after_the_other, 3)
    first, second, third = ranks.answers()
    for found in (first, second, third):
        assert found["messages"] == []
    assert not any("Traceback" in ranks.said(rank) for rank in range(3))  # what is refused has one, if raised
    error, of_all = second["message_mismatch"]
    assert "rank 0 sends float32 (3,), 12 bytes, to rank 1" in error
    assert "rank 1 expects float32 (2,), 8 bytes" in error
    assert "rank 0 sends float32 (2,), 8 bytes, to rank 1" in of_all
    assert "rank 1 expects float32 (0,), 0 bytes" in of_all
    (said_to_first,), (said_to_second,) = first["monitored_barriers"], second["monitored_barriers"]
    assert "Rank 2 failed to pass monitoredBarrier in 1000 ms" in said_to_first
    assert "Rank 1 successfully reached monitoredBarrier, but received errors" in said_to_second
    assert third["monitored_barriers"] == []
    assert [each["same_name_again"] for each in (first, second, third)] == [[2.0, 4.0, 6.0]] * 2 + [[]]


@pytest.mark.parametrize("kind", list(BOTH_SIDES))
def test_calls_that_do_not_fit_together_fail_at_all_ranks_and_name_both_sides(ranks, kind):
    ranks.start(groups.mismatch, 3, kind=kind)
    for rank in range(3):
        ended = ranks.end(rank)
        found = answer(ranks, rank)
        assert all(side in found for side in BOTH_SIDES[kind]), (found, ended.text)
        assert "rank 1" in found


@pytest.mark.parametrize(
    ("kind", "empty"),
    [("all_reduce", 0), ("broadcast", 0), ("scatter", 1)],
)
def test_an_empty_tensor_at_one_rank_is_an_error_at_all_ranks_in_that_call(ranks, kind, empty):
    ranks.start(groups.empty_at_one_rank, 2, kind=kind, empty=empty)
    for rank in range(2):
        ended = ranks.end(rank)
        found = answer(ranks, rank)
        assert found.startswith("Disagreement: "), (found, ended.text)
        assert "float32 (0,)" in found
        assert "float32 (3,)" in found
