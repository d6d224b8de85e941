"""Calls that wait at ranks are compared, and those who have not made one are named."""

from __future__ import annotations

import pytest

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import CallTimedOut, WaitingCall
from netstorm.scheduler.rounds import CallOrder


def call(text: str, number: int = 4, group: str = "g") -> WaitingCall:
    return WaitingCall(group=group, number=number, text=text)


def test_equal_calls_are_no_conflict_nor_are_other_places_or_groups() -> None:
    order = CallOrder()
    assert order.record(0, call("barrier()")) is None
    assert order.record(1, call("barrier()")) is None
    assert order.record(1, call("all_reduce", number=5)) is None
    assert order.record(2, call("broadcast", group="h")) is None


def test_a_conflict_names_both_ranks_and_both_calls() -> None:
    order = CallOrder()
    order.record(2, call("barrier()"))
    text = str(order.record(0, call("all_reduce(SUM) of float32 (3,)")))
    assert text.startswith(
        "call 4 of group 'g' is barrier() at rank 2 and all_reduce(SUM) of float32 (3,) at rank 0"
    )


def test_what_a_rank_has_reported_that_has_left_is_no_conflict_and_takes_no_memory() -> None:
    order = CallOrder()
    order.record(0, call("average"))
    order.record(0, call("barrier()", number=5))
    order.record(2, call("barrier()", number=5))
    order.without(0)
    assert order.record(1, call("values")) is None
    assert "barrier() at rank 2" in str(order.record(1, call("average", number=5)))
    for rank in (1, 2):
        order.without(rank)
    assert order._seen == {}
    assert order._characters == 0


def test_a_time_out_names_the_members_that_have_not_reported_the_call() -> None:
    order = CallOrder()
    order.record(0, call("barrier()"))
    order.record(5, call("barrier()"))
    message = CallTimedOut(call=call("barrier()"), members=(0, 2, 3, 5), seconds=7.5)
    text = order.timeout_text(0, message)
    assert text.endswith("within its timeout of 7.5 s at rank 0: ranks 2, 3 have not made it")
    order.record(2, call("barrier()"))
    assert order.timeout_text(0, message).endswith("rank 3 has not made it")
    order.record(3, call("barrier()"))
    assert "every member has made it" in order.timeout_text(0, message)


def test_a_call_with_a_text_that_no_call_has_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="describes a call in 1000001 characters"):
        CallOrder().record(0, call("x" * 1_000_000))


def test_long_texts_of_calls_are_forgotten_before_they_take_much_memory() -> None:
    order = CallOrder()
    first = "a" * 200_000
    order.record(0, call(first, number=0))
    assert order.record(1, call("b", number=0)) is not None
    for number in range(1, 100):
        order.record(0, call("x" * 200_000, number=number))
    assert order.record(1, call("b", number=0)) is None


@pytest.mark.parametrize("members", [(-1, 2), (2, 0), (0, 0)])
def test_a_time_out_of_members_that_no_group_has_is_refused(members: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation, match="expected ranks from 0 up, in order"):
        CallOrder().timed_out(0, CallTimedOut(call=call("x"), members=members, seconds=1.0), 0.0)


def test_a_time_out_of_ranks_beyond_any_job_costs_nothing() -> None:
    order = CallOrder()
    message = CallTimedOut(call=call("x"), members=(1, 2**62), seconds=1.0)
    order.timed_out(0, message, 0.0)
    assert str(order.decision(10.0)).endswith(f"ranks 1, {2**62} have not made it")
