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
    "dtype": ("all_reduce(SUM) of float64 (2,)", "all_reduce(SUM) of float32 (2,)"),
    "op": ("all_reduce(MAX) of float32 (2,)", "all_reduce(SUM) of float32 (2,)"),
    "order": ("barrier()", "all_reduce(SUM) of float32 (2,)"),
    "root": ("broadcast from rank 1 of float32 (2,)", "broadcast from rank 0 of float32 (2,)"),
    "receiver": ("reduce(SUM) to rank 0 of float32 (2,)", "all_reduce(SUM) of float32 (2,)"),
    "collective": ("broadcast from rank 0 of float32 (2,)", "all_reduce(SUM) of float32 (2,)"),
}


def test_groups_may_overlap_have_any_order_and_be_used_at_once(ranks):
    ranks.start(groups.subgroups, 4)
    assert ranks.answers() == [[]] * 4


def test_a_group_of_netstorm_works_beside_one_of_gloo(ranks):
    ranks.start(groups.beside_gloo, 3)
    assert ranks.answers() == [[]] * 3


def test_members_with_different_histories_of_groups_find_each_other(ranks):
    members = [[0, 1], [0, 1], [1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]
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


def test_a_group_whose_name_comes_back_in_a_job_is_a_new_one(ranks):
    ranks.start(groups.same_name_again, 3)
    assert ranks.answers() == [[2.0, 4.0, 6.0], [2.0, 4.0, 6.0], []]


def test_the_address_of_the_store_may_be_one_of_ipv6(ranks):
    ranks.start(groups.same_name_again, 2, STORE="env://", MASTER_ADDR="::1", MASTER_PORT=free_port())
    assert ranks.answers() == [[2.0, 4.0, 6.0]] * 2


def test_messages_are_matched_by_rank_tag_and_order_and_may_come_from_anybody(ranks):
    ranks.start(groups.messages, 3)
    assert ranks.answers() == [[]] * 3
    assert not any("Traceback" in ranks.said(rank) for rank in range(3))  # what is refused has one, if raised


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
    [
        ("all_reduce", 0), ("all_gather", 1), ("broadcast", 0), ("broadcast", 1), ("scatter", 1)
    ],
)  # fmt: skip
def test_an_empty_tensor_at_one_rank_is_an_error_at_all_ranks_in_that_call(ranks, kind, empty):
    ranks.start(groups.empty_at_one_rank, 2, kind=kind, empty=empty)
    for rank in range(2):
        ended = ranks.end(rank)
        found = answer(ranks, rank)
        assert found.startswith("Disagreement: "), (found, ended.text)
        assert "float32 (0,)" in found
        assert "float32 (3,)" in found


def test_a_message_that_does_not_fit_is_an_error_that_names_both_sides_and_nothing_else(ranks):
    ranks.start(groups.message_mismatch, 3)
    _, (found, of_all), _ = ranks.answers()
    assert "rank 0 sends float32 (3,), 12 bytes, to rank 1" in found
    assert "rank 1 expects float32 (2,), 8 bytes" in found
    assert "rank 0 sends float32 (2,), 8 bytes, to rank 1" in of_all
    assert "rank 1 expects float32 (0,), 0 bytes" in of_all


def test_a_monitored_barrier_names_who_is_missing_and_the_next_one_is_passed(ranks):
    ranks.start(groups.monitored_barriers, 3)
    first, second, third = ranks.answers()
    assert "Rank 2 failed to pass monitoredBarrier in 1000 ms" in first[0]
    assert "Rank 1 successfully reached monitoredBarrier, but received errors" in second[0]
    assert third == []


def test_one_process_may_be_in_one_job_after_another(ranks):
    ranks.start(groups.begin_again, 3)
    assert ranks.answers() == [[3.0, 6.0, 9.0]] * 3
