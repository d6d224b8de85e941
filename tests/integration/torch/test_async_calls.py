"""Asynchronous calls of PyTorch's on real ranks: futures, errors in them, time-outs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integration.torch.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import asynchronous, late


def test_works_and_futures_of_many_calls_end_in_any_order(ranks):
    ranks.start(asynchronous.futures, 3)
    assert ranks.answers() == [[]] * 3


def test_a_wait_that_is_given_up_leaves_its_call_under_way(ranks):
    ranks.start(asynchronous.waits, 3)
    first, *others = ranks.answers()
    assert "all_reduce(SUM) of float32 (2,) has not completed within" in first[0]
    assert others == [[], []]


def test_the_time_out_of_a_group_ends_the_job_and_names_who_is_missing(ranks):
    ranks.start(asynchronous.group_timeout, 3)
    ended = [ranks.end(rank) for rank in range(3)]
    answers = [answer(ranks, rank) for rank in range(3)]
    for rank in (0, 2):
        assert "all_reduce(SUM) of float32 (2,)" in answers[rank][0], ended[rank].text
        assert answers[rank][0].endswith("rank 1 has not made it")
    assert "not made it" in answers[1][0]


def test_an_error_of_another_rank_comes_out_of_ddps_backward_pass(ranks):
    ranks.start(asynchronous.error_through_ddp, 3)
    assert "ValueError: rank 1 has run out of data" in ranks.end(1).err
    for rank in (0, 2):
        ranks.end(rank)
        assert answer(ranks, rank).startswith("NodeFailed: rank 1")  # no RuntimeError with PyTorch's stack
        assert answer(ranks, rank).endswith("ValueError: rank 1 has run out of data")


def test_an_error_of_another_rank_is_in_all_futures(ranks):
    ranks.start(asynchronous.error_in_future, 3)
    for rank in (0, 2):
        ranks.end(rank)
        found = answer(ranks, rank)
        assert len(found) == 3
        assert all("ValueError: rank 1 fails" in error for error in found)


def answer(ranks: Ranks, rank: int) -> Any:
    """Return what the program returned, though the process has ended with an error: the job's."""
    return json.loads((ranks.folder / f"answer{rank}").read_text())


def test_ddp_goes_on_without_gradients_that_come_too_late_and_counts_them_in_the_next_step(ranks):
    ranks.start(late.steps, 3, NETSTORM_LOSS_BOUND=0.7, NETSTORM_DEADLINE=0.2)
    expected = [[111.0], [111.0], [11.0], [211.0], [111.0]]
    assert ranks.answers() == [{"gradients": expected, "left": 0.0}] * 3
