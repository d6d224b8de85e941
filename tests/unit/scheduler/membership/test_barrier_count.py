"""The n-th barrier of every rank is the same one; waiting at it is never silent."""

from __future__ import annotations

import pytest

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.scheduler.members import BarrierCount
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import running


def test_a_barrier_is_reached_when_all_have_come():
    driven = running(3)
    driven.say(0, m.Barrier(number=0))
    driven.say(2, m.Barrier(number=0))
    assert driven.sent == {}
    driven.say(1, m.Barrier(number=0))
    assert [driven.heard(rank) for rank in range(3)] == [[m.BarrierReached(number=0)]] * 3


def test_a_rank_may_be_several_barriers_ahead():
    driven = running(2)
    for number in range(3):
        driven.say(0, m.Barrier(number=number))
    driven.say(1, m.Barrier(number=0))
    driven.say(1, m.Barrier(number=1))
    assert [one.number for one in driven.heard(0)] == [0, 1]


def test_those_who_wait_are_told_for_whom_and_nobody_else_is():
    driven = running(3)
    driven.say(0, m.Barrier(number=0))
    driven.run(10, beating=(0, 1, 2))
    said = driven.heard(0, m.Waiting)
    assert said[0].text == (
        "barrier 0: waiting for 2 of 3 nodes: rank 1 (n1:4000, site1), rank 2 (n2:4000, site2)"
    )
    assert len(said) == 3
    assert driven.heard(1) == driven.heard(2) == []


def test_a_barrier_that_is_reached_soon_makes_no_noise():
    driven = running(2)
    driven.run(2.5, beating=(0, 1))
    driven.say(0, m.Barrier(number=0))
    driven.run(1, beating=(0, 1))
    driven.say(1, m.Barrier(number=0))
    assert driven.heard(0) == [m.BarrierReached(number=0)]


def test_the_wait_timeout_ends_the_job_and_names_the_missing():
    driven = running(2, wait_timeout_s=60.0)
    driven.say(0, m.Barrier(number=0))
    driven.run(59, beating=(0, 1))
    driven.forget()
    driven.run(5, beating=(0, 1))
    for rank in (0, 1):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (-1, "timeout")
        assert gone.reason == (
            "waited 60 s (NETSTORM_WAIT_TIMEOUT) at barrier 0: waiting for 1 of 2 nodes: rank 1 "
            "(n1:4000, site1)"
        )


def test_the_timeout_counts_from_the_first_at_each_barrier():
    driven = running(2, wait_timeout_s=10.0)
    for number in range(5):
        driven.say(0, m.Barrier(number=number))
        driven.run(8, beating=(0, 1))
        driven.say(1, m.Barrier(number=number))
    assert driven.machine.phase is JobPhase.RUNNING


@pytest.mark.parametrize("order", [("barrier", "finish"), ("finish", "barrier")])
def test_a_barrier_that_a_finished_rank_never_came_to_ends_the_job(order):
    driven = running(3)
    for what in order:
        if what == "barrier":
            driven.say(0, m.Barrier(number=0))
        else:
            driven.say(2, m.Finished(last_rounds={}))
    gone = driven.gone(1)
    assert gone.kind == "disagreement"
    assert gone.reason == (
        "rank 0 waits at barrier 0, but rank 2 has finished without coming to it: every rank must come "
        "to every barrier"
    )


def test_a_rank_may_finish_once_it_has_come_to_the_barrier():
    driven = running(2)
    driven.say(0, m.Barrier(number=0))
    driven.say(0, m.Finished(last_rounds={}))
    driven.say(1, m.Barrier(number=0))
    assert driven.machine.phase is JobPhase.RUNNING
    assert driven.heard(0) == [m.BarrierReached(number=0)]


@pytest.mark.parametrize("number", [1, -1, 10**9])
def test_a_barrier_out_of_order_is_a_violation(number):
    driven = running(2)
    with pytest.raises(ProtocolViolation, match=f"rank 1 comes to barrier {number}; its next one is 0"):
        driven.say(1, m.Barrier(number=number))


def test_a_rank_cannot_run_ahead_without_bound():
    driven = running(2)
    for number in range(64):
        driven.say(0, m.Barrier(number=number))
    with pytest.raises(ProtocolViolation, match="at most 64 may be outstanding"):
        driven.say(0, m.Barrier(number=64))


# ---------------------------------------------------------------------------- jobs that nodes leave and join


def test_nobody_waits_for_places_that_no_node_has_nor_for_ranks_that_have_left():
    driven = running(3, elastic=(1, 3))
    driven.say(0, m.Barrier(number=0))
    driven.say(1, m.Barrier(number=0))
    assert driven.heard(0, m.BarrierReached) == []
    driven.say(2, m.Leave())
    assert [one.number for one in driven.heard(0, m.BarrierReached)] == [0]


def count(ranks=3):
    return BarrierCount(ranks)


def test_a_rank_that_is_not_waited_for_begins_with_any_barrier_and_may_be_behind():
    barriers = count()
    barriers.exclude(2)
    for number in range(3):
        barriers.arrive(0, number, 1.0)
        barriers.arrive(1, number, 1.0)
    assert barriers.arrive(2, 1, 2.0) == []
    assert barriers.is_reached(1)
    assert barriers.arrive(2, 2, 2.0) == []
    assert barriers.arrive(2, 3, 2.0) == []
    assert barriers.waiting() == [2]
    barriers.arrive(0, 3, 3.0)
    assert barriers.arrive(1, 3, 3.0) == [3]
    assert barriers.has_arrived(2, 3)


def test_a_rank_that_is_included_is_waited_for_from_the_oldest_barrier_on_and_may_still_be_behind():
    barriers = count()
    barriers.exclude(2)
    for number in range(3):
        barriers.arrive(0, number, 1.0)
        barriers.arrive(1, number, 1.0)
    barriers.include(2)
    assert barriers.arrive(2, 1, 2.0) == []
    barriers.arrive(0, 3, 3.0)
    assert barriers.arrive(1, 3, 3.0) == []
    assert barriers.missing() == [2]
    assert barriers.arrive(2, 3, 4.0) == [3]


def test_another_process_at_the_place_of_one_that_has_left_begins_anew():
    barriers = count()
    barriers.arrive(0, 0, 1.0)
    barriers.arrive(2, 0, 1.0)
    barriers.remove(2)
    assert barriers.arrive(2, 0, 2.0) == []
    assert barriers.arrive(1, 0, 2.0) == [0]
