""""""

from __future__ import annotations

import sys

import psutil
import pytest

from netstorm import clock
from netstorm.pslite import system
from netstorm.pslite.system import SHORT_CALL, active_calls, switch_intervals, yield_to_call

WANTED_S = 0.0001


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """Virtual time, and an I/O thread's wish."""

    class Time:
        seconds = 100.0
        slept_s = 0.0

        def sleep(self, seconds):
            self.slept_s += seconds

    time = Time()
    monkeypatch.setattr(clock, "monotonic", lambda: time.seconds)
    monkeypatch.setattr(clock, "sleep", time.sleep)
    before = sys.getswitchinterval()
    switch_intervals.add(time, WANTED_S)
    yield time
    switch_intervals.remove(time)
    assert sys.getswitchinterval() == before
    assert active_calls == []


def test_a_burst_of_calls_has_a_long_interval_and_ends_when_no_more_follow(now):
    for _ in range(3):
        with SHORT_CALL:
            pass
        now.seconds += 0.001
        assert switch_intervals.update(now.seconds) < 0.01
        assert sys.getswitchinterval() > 10 * WANTED_S
    now.seconds += 0.002
    switch_intervals.update(now.seconds)
    assert sys.getswitchinterval() == pytest.approx(WANTED_S)


@pytest.mark.parametrize(("taken_s", "interval_s"), [(0.001, 0.005), (0.008, 0.012), (1.0, 0.02)])
def test_a_burst_s_interval_is_half_as_long_again_as_the_last_burst_took(now, taken_s, interval_s):
    seen = 0.0
    for _ in range(2):
        began = now.seconds
        for millisecond in range(round(taken_s * 1000) + 1):
            now.seconds = began + millisecond / 1000
            with SHORT_CALL:
                seen = sys.getswitchinterval()
        now.seconds += 0.003
        switch_intervals.update(now.seconds)
    assert seen == pytest.approx(interval_s, abs=2e-6)  # Python counts whole microseconds


def test_a_burst_does_not_end_in_the_middle_of_a_call(now):
    with SHORT_CALL:
        now.seconds += 0.005
        switch_intervals.update(now.seconds)
        assert sys.getswitchinterval() > 10 * WANTED_S


def test_a_call_that_waits_for_something_is_no_short_one(now):
    with SHORT_CALL:
        now.seconds += 1
        yield_to_call()
        switch_intervals.update(now.seconds)
        assert sys.getswitchinterval() == pytest.approx(WANTED_S)
    assert now.slept_s == 0


def test_threads_give_way_to_a_call_and_to_nothing_else(now):
    yield_to_call()
    assert now.slept_s == 0
    with SHORT_CALL:
        yield_to_call()
        assert 0 < now.slept_s < 0.001
    yield_to_call()
    assert now.slept_s < 0.001


def test_a_call_that_fails_is_over():
    with pytest.raises(ZeroDivisionError), SHORT_CALL:
        raise ZeroDivisionError
    assert active_calls == []


def test_a_child_that_was_forked_in_a_call_is_in_none_and_leaves_it(now):
    with SHORT_CALL:
        switch_intervals.reset_after_fork()
        assert active_calls == []
        yield_to_call()
    yield_to_call()
    assert now.slept_s == 0


def test_a_process_has_the_memory_of_its_machine_or_of_its_container(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(system, "_CGROUP", limit)
    machine = psutil.virtual_memory().total
    assert system.memory_bytes() == pytest.approx(machine, rel=0.01)
    limit.write_text("max\n")
    assert system.memory_bytes() == pytest.approx(machine, rel=0.01)
    limit.write_text("1048576\n")
    assert system.memory_bytes() == 1 << 20
