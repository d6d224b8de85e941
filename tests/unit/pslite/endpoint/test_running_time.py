"""The time of a process stands still while the process does not run."""

from __future__ import annotations

import logging

import pytest

from netstorm.pslite.endpoint import Stack


class Machine:
    """Ticks whenever it can."""

    def __init__(self):
        self.ticks = []

    def next_tick(self):
        return 0.0

    def tick(self, now):
        self.ticks.append(now)


class Endpoint:
    """Has nothing to do."""

    def __init__(self):
        self.resumed_after = []

    def resumed(self, now, missed_s):
        self.resumed_after.append(missed_s)

    def next_tick(self):
        return 0.0

    def tick(self, now):
        pass


def made():
    machine, endpoint = Machine(), Endpoint()
    return Stack(machine, endpoint), machine, endpoint  # type: ignore[type-var, arg-type]


def test_it_counts_what_a_process_waits_for_and_small_delays():
    stack, _, endpoint = made()
    assert stack.running_time(10.0, 10.0) == 10.0
    assert stack.running_time(11.0, 11.0) == 11.0
    assert stack.running_time(11.4, 11.0) == 11.4
    assert endpoint.resumed_after == []


def test_it_does_not_count_what_comes_on_top(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "netstorm")
    stack, _, endpoint = made()
    assert stack.running_time(3611.0, 11.0) == 11.0
    assert stack.running_time(3612.0, 3612.0) == 12.0
    assert stack.missed_s == 3600.0
    assert endpoint.resumed_after == [3600.0]
    assert stack.running_time(3614.0, 3613.0) == 13.0
    (line,) = caplog.messages
    assert line.startswith("this process did not run for 3600.0 s: ")


def test_what_has_come_is_read_before_anybody_is_judged():
    stack, machine, _ = made()
    stack.tick(stack.running_time(10.0, 10.0))
    now = stack.running_time(60.0, 11.0)
    stack.tick(now)
    assert machine.ticks == [10.0]
    assert now < stack.next_tick() < now + 1.0
    stack.tick(stack.next_tick())
    assert len(machine.ticks) == 2
