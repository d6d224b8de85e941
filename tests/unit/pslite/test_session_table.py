"""Timers, the watch over a silent connection, and those who wait to be let in."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import Hello
from netstorm.pslite.endpoint import Timers
from netstorm.pslite.sending import NOWHERE, Mark, SendQueueItem, Window
from netstorm.pslite.session import Limits, QueryTimer
from netstorm.pslite.session_table import NewSessions, PendingHellos, RecentSet
from netstorm.pslite.van import Connection

# ------------------------------------------------------------------------------------------------------
# timers

settings_and_takes = st.lists(
    st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20))
    | st.tuples(st.just("take"), st.integers(0, 20))
)


@given(settings_and_takes)
def test_an_item_is_taken_once_at_the_earliest_time_set_for_it(actions):
    timers: Timers[int] = Timers()
    timers.set(99, math.inf)  # never comes, and is not kept
    oracle: dict[int, int] = {}
    for action in actions:
        if action[0] == "set":
            _, item, due = action
            timers.set(item, due)
            oracle[item] = min(oracle.get(item, due), due)
        else:
            now = action[1]
            taken = set()
            while (item := timers.take(now)) is not None:
                assert oracle.pop(item) <= now
                taken.add(item)
            assert all(due > now for due in oracle.values())
        assert timers.next() <= min(oracle.values(), default=math.inf)


# -----------------------------------------------------------------------------------------------------
# queries


@pytest.fixture
def window():
    return Window(fixed_bytes=10**9)


def timer_for(window):
    timer = QueryTimer(Limits(query_after_s=2.0, slowest_link=1000.0), window, 10.0)
    timer.progress(0.0, expecting=True)
    return timer


def test_progress_puts_the_question_off_and_nobody_is_asked_while_nothing_is_due(window):
    timer = timer_for(window)
    assert timer.query_due(2.0)
    timer.progress(1.5, expecting=True)
    assert not timer.query_due(3.4)
    assert timer.query_due(3.5)
    assert timer.due() == 3.5
    timer.progress(4.0, expecting=False)
    assert timer.due() == math.inf
    assert not timer.query_due(1e9)


def test_a_long_way_is_asked_about_later(window):
    message = SendQueueItem(b"x")
    message.transmissions = 1
    window.sent(message, 0.0)
    window.acknowledged(message, 3.0)
    assert not timer_for(window).query_due(11.9)
    assert timer_for(window).query_due(12.0)


def test_silence_counts_from_the_first_question_since_anything_was_heard(window):
    timer = timer_for(window)
    timer.query_sent(Mark(0, 1), now=2.0)
    timer.query_sent(Mark(0, 2), now=4.0)
    assert timer.silence(heard_at=1.0, now=11.9) == 0
    assert timer.silence(heard_at=1.0, now=12.0) == 10.0
    assert timer.silence(heard_at=5.0, now=50.0) == 0
    timer.query_sent(Mark(0, 3), now=51.0)
    assert timer.silence(heard_at=5.0, now=60.9) == 0
    assert timer.silence(heard_at=5.0, now=61.0) == 10.0
    window.sent(SendQueueItem(bytes(5000)), 0.0)  # 5 s on the slowest link
    timer = timer_for(window)
    timer.query_sent(Mark(0, 1), now=2.0)
    assert timer.silence(heard_at=0.0, now=16.9) == 0
    assert timer.silence(heard_at=0.0, now=17.0) == 15.0


def test_only_the_answer_to_the_last_question_tells_what_is_lost(window):
    timer = timer_for(window)
    timer.query_sent(Mark(0, 7), now=2.0)
    timer.query_sent(Mark(0, 9), now=4.0)
    assert timer.mark_of(0) == NOWHERE
    assert timer.mark_of(1) == NOWHERE
    assert timer.mark_of(2) == Mark(0, 9)
    with pytest.raises(ProtocolViolation, match="query 3, and 2 were sent"):
        timer.mark_of(3)
    timer.stop()
    with pytest.raises(ProtocolViolation):
        timer.mark_of(1)


# ------------------------------------------------------------------------------------------------ waiting
# room


def hello(number):
    return Hello(job="job", sender=number, incarnation=number, receiver=1, session=number, received=0)


def waiting(pending):
    return [(connection, hello.sender) for connection, hello, _ in pending.take_all()]


def test_those_who_wait_are_called_in_order_after_a_moment_each_over_its_newest_connection():
    pending = PendingHellos(10)
    assert pending.retry_at == math.inf
    for number in (0, 1, 2, 1):
        pending.add(Connection(-1 - len(pending)), hello(number), now=1.0)
    assert 1.0 < pending.retry_at < 2.0
    assert waiting(pending) == [(-1, 0), (-3, 2), (-4, 1)]
    assert len(pending) == 0
    assert pending.retry_at == math.inf


@pytest.mark.parametrize(("capacity", "job"), [(2, "job"), (10, "x" * 40_000)])
def test_the_oldest_leaves_when_the_room_is_full_and_of_long_names_of_jobs_few_wait(capacity, job):
    pending = PendingHellos(capacity)
    for number in range(5):
        pending.add(Connection(-1 - number), msgspec.structs.replace(hello(number), job=job), now=0.0)
    assert waiting(pending) == [(-4, 3), (-5, 4)]


@given(st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_the_recent_are_the_last_that_were_added(members, size):
    recent: RecentSet[int] = RecentSet(size)
    for member in members:
        recent.add(member)
    last = list(dict.fromkeys(reversed(members)))[:size]
    assert [member for member in range(10) if member in recent] == sorted(last)


def test_sessions_begin_all_at_once_for_a_large_job_and_then_some_in_each_second():
    new = NewSessions()
    assert all(new.take(10.0) for _ in range(1024))
    assert not new.take(10.0)
    assert sum(new.take(11.0) for _ in range(1000)) == 256
    assert sum(new.take(1000.0) for _ in range(3000)) == 1024
