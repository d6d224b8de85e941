from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.lab.simulation.network import SharedCapacity
from netstorm.pslite.memory_network import Timeline


class Log:
    """Flows over shared capacities, and when their messages were through."""

    def __init__(self, *capacities):
        self.timeline = Timeline()
        self.shared = SharedCapacity(self.timeline, capacities)
        self.done = {}

    def send(self, flow, bits, name):
        self.shared.send(flow, bits, lambda: self.done.setdefault(name, pytest.approx(self.timeline.now)))

    def run(self):
        while self.timeline.step(1e9):
            pass
        return self.done


def test_one_message_takes_its_size_over_the_capacity():
    log = Log(100.0)
    log.send(log.shared.open([0]), 250.0, "a")
    assert log.run() == {"a": 2.5}
    assert log.shared.bits == [250.0]


def test_two_flows_share_and_the_short_one_leaves_first():
    log = Log(100.0)
    log.send(log.shared.open([0]), 100.0, "long")
    log.send(log.shared.open([0]), 50.0, "short")
    assert log.run() == {"short": 1.0, "long": 1.5}


def test_a_flow_gets_one_share_however_much_it_has_queued():
    log = Log(100.0)
    flow = log.shared.open([0])
    for n in range(3):
        log.send(flow, 50.0, n)
    log.send(log.shared.open([0]), 50.0, "other")
    assert log.run() == {0: 1.0, "other": 1.0, 1: 1.5, 2: 2.0}


def test_a_flow_takes_the_least_that_its_resources_give_and_leaves_the_rest():
    log = Log(20.0, 100.0)
    log.send(log.shared.open([0, 1]), 20.0, "slow")
    log.send(log.shared.open([1]), 80.0, "fast")
    assert log.run() == {"slow": 1.0, "fast": 1.0}
    assert log.shared.bits == [20.0, 100.0]


def test_a_changed_capacity_counts_for_what_is_being_served():
    log = Log(100.0)
    log.send(log.shared.open([0]), 100.0, "a")
    log.timeline.at(0.5, lambda: log.shared.set_capacity(0, 0.0))
    log.timeline.at(2.0, lambda: log.shared.set_capacity(0, 10.0))
    assert log.run() == {"a": 7.0}


def test_a_flow_keeps_to_its_limit_which_may_change():
    log = Log(100.0)
    limited = log.shared.open([0], limit=10.0)
    log.send(limited, 60.0, "limited")
    log.send(log.shared.open([0]), 90.0, "other")
    log.timeline.at(1.0, lambda: log.shared.set_limit(limited, 50.0))
    assert log.run() == {"other": 1.0, "limited": 2.0}


def test_what_is_closed_gives_its_share_back():
    log = Log(100.0)
    closed = log.shared.open([0])
    log.send(closed, 100.0, "a")
    log.send(closed, 100.0, "a too")
    log.send(log.shared.open([0]), 100.0, "b")
    log.timeline.at(1.0, lambda: log.shared.close(closed))
    log.timeline.at(1.1, lambda: log.shared.close(closed))
    assert log.run() == {"b": 1.5}


jobs = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 1000), st.integers(0, 50)), min_size=1, max_size=30
)


@given(jobs)
def test_messages_finish_as_when_worked_out_between_all_events(jobs):
    log = Log(100.0)
    flows = [log.shared.open([0]) for _ in range(5)]
    for number, (flow, bits, start) in enumerate(jobs):
        log.timeline.at(float(start), functools.partial(log.send, flows[flow], float(bits), number))
    expected = _by_events([(flow, float(bits), float(start)) for flow, bits, start in jobs], 100.0)
    done = log.run()
    assert {number: time.expected for number, time in done.items()} == pytest.approx(expected, abs=1e-6)
    assert log.shared.bits == [pytest.approx(sum(bits for _, bits, _ in jobs))]


def _by_events(jobs, capacity):
    """Processor sharing, said plainly: between two events, everyone in service gets the same."""
    waiting = sorted(range(len(jobs)), key=lambda n: jobs[n][2])
    queues: dict[int, list[int]] = {}
    left: dict[int, float] = {}
    done, now = {}, 0.0
    while waiting or queues:
        heads = [queue[0] for queue in queues.values()]
        share = capacity / len(heads) if heads else 0.0
        finish = min((now + left[n] / share for n in heads), default=float("inf"))
        start = jobs[waiting[0]][2] if waiting else float("inf")
        time = min(finish, start)
        for n in heads:
            left[n] -= share * (time - now)
        now = time
        for n in heads:
            if left[n] <= 1e-9:
                done[n] = now
                queue = queues[jobs[n][0]]
                queue.pop(0)
                if not queue:
                    del queues[jobs[n][0]]
        while waiting and jobs[waiting[0]][2] <= now:
            n = waiting.pop(0)
            left[n] = jobs[n][1]
            queues.setdefault(jobs[n][0], []).append(n)
    return done
