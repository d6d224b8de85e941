"""Whom a node asks for the time."""

from __future__ import annotations

from netstorm.pslite.sntp import ClockSource

SCHEDULER, PARENT, OTHER = ("s", 1), ("p", 2), ("o", 3)


def test_without_a_parent_the_scheduler_is_asked():
    source = ClockSource(SCHEDULER)
    assert [source.next_server(float(second)) for second in range(9)] == [SCHEDULER] * 9


def test_a_parent_that_answers_is_asked_for_ever():
    source = ClockSource(SCHEDULER)
    source.set_parent(PARENT)
    for second in range(99):
        assert source.next_server(float(second)) == PARENT
        if second % 3 == 2:  # two of three are lost
            source.answered()


def test_a_parent_that_does_not_answer_is_tried_again_later_and_the_scheduler_asked_meanwhile():
    source = ClockSource(SCHEDULER)
    source.set_parent(PARENT)
    assert [source.next_server(float(second)) for second in range(5)] == [PARENT] * 3 + [SCHEDULER] * 2
    source.answered()  # by the scheduler
    assert source.next_server(122.0) == SCHEDULER
    assert source.next_server(124.0) == PARENT


def test_another_parent_is_asked_at_once():
    source = ClockSource(SCHEDULER)
    source.set_parent(PARENT)
    for second in range(5):
        source.next_server(float(second))
    source.set_parent(PARENT)
    assert source.next_server(5.0) == SCHEDULER
    source.set_parent(OTHER)
    assert source.next_server(5.0) == OTHER
    source.set_parent(None)
    assert source.next_server(6.0) == SCHEDULER
