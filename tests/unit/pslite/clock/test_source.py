"""Whom a node asks for the time."""

from __future__ import annotations

from netstorm.pslite.clock.source import ClockSource

SCHEDULER, PARENT, OTHER = ("s", 1), ("p", 2), ("o", 3)


def test_without_a_parent_the_scheduler_is_asked():
    source = ClockSource(SCHEDULER)
    assert [source.ask(float(second)) for second in range(9)] == [SCHEDULER] * 9


def test_a_parent_that_answers_is_asked_for_ever():
    source = ClockSource(SCHEDULER)
    source.follow(PARENT)
    for second in range(99):
        assert source.ask(float(second)) == PARENT
        if second % 3 == 2:  # two of three are lost
            source.answered()


def test_a_parent_that_does_not_answer_is_tried_again_later_and_the_scheduler_asked_meanwhile():
    source = ClockSource(SCHEDULER)
    source.follow(PARENT)
    assert [source.ask(float(second)) for second in range(5)] == [PARENT] * 3 + [SCHEDULER] * 2
    source.answered()  # by the scheduler
    assert source.ask(122.0) == SCHEDULER
    assert source.ask(124.0) == PARENT


def test_another_parent_is_asked_at_once():
    source = ClockSource(SCHEDULER)
    source.follow(PARENT)
    for second in range(5):
        source.ask(float(second))
    source.follow(PARENT)
    assert source.ask(5.0) == SCHEDULER
    source.follow(OTHER)
    assert source.ask(5.0) == OTHER
    source.follow(None)
    assert source.ask(6.0) == SCHEDULER
