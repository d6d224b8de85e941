from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.pslite.virtual_time import Timeline
from netstorm.simulation.shared_resource import SharedResource
from netstorm.simulation.transit import Hop, Passage


class Log:
    def __init__(self):
        self.timeline = Timeline()
        self.done = {}

    def enter(self, resource, flow, bits, name):
        resource.enter(flow, bits, lambda: None, lambda: self.done.setdefault(name, self.timeline.now))

    def run(self):
        while self.timeline.step(1e9):
            pass
        return self.done


def test_one_message_takes_its_size_over_the_capacity():
    log = Log()
    resource = SharedResource(log.timeline, 100.0)
    log.enter(resource, 1, 250.0, "a")
    assert log.run() == {"a": 2.5}


def test_two_flows_share_and_the_short_one_leaves_first():
    log = Log()
    resource = SharedResource(log.timeline, 100.0)
    log.enter(resource, 1, 100.0, "long")
    log.enter(resource, 2, 50.0, "short")
    assert log.run() == {"short": 1.0, "long": 1.5}


def test_a_flow_gets_one_share_however_much_it_has_queued():
    log = Log()
    resource = SharedResource(log.timeline, 100.0)
    for n in range(3):
        log.enter(resource, 1, 50.0, n)
    log.enter(resource, 2, 50.0, "other")
    assert log.run() == {0: 1.0, "other": 1.0, 1: 1.5, 2: 2.0}


def test_a_changed_capacity_counts_for_what_is_being_served():
    log = Log()
    resource = SharedResource(log.timeline, 100.0)
    log.enter(resource, 1, 100.0, "a")
    log.timeline.at(0.5, lambda: resource.set_capacity(0.0))
    log.timeline.at(2.0, lambda: resource.set_capacity(10.0))
    assert log.run() == {"a": pytest.approx(7.0)}


def test_what_is_forgotten_gives_its_share_back():
    log = Log()
    resource = SharedResource(log.timeline, 100.0)
    log.enter(resource, 1, 100.0, "a")
    log.enter(resource, 2, 100.0, "b")
    log.timeline.at(1.0, lambda: resource.forget(1))
    assert log.run() == {"b": pytest.approx(1.5)}


jobs = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 1000), st.integers(0, 50)), min_size=1, max_size=30
)


@given(jobs)
def test_messages_finish_as_in_a_simulation_of_small_steps(jobs):
    log = Log()
    resource = SharedResource(log.timeline, 100.0)
    for number, (flow, bits, start) in enumerate(jobs):
        log.timeline.at(float(start), functools.partial(log.enter, resource, flow, float(bits), number))
    expected = _by_events([(flow, float(bits), float(start)) for flow, bits, start in jobs], 100.0)
    done = log.run()
    assert done == {number: pytest.approx(time, abs=1e-6) for number, time in expected.items()}
    assert resource.bits == pytest.approx(sum(bits for _, bits, _ in jobs))


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


def cross(capacities, latencies, messages, bits):
    """Return when `messages` messages of `bits` each are through a chain of resources."""
    timeline = Timeline()
    hops = tuple(
        Hop(SharedResource(timeline, capacity), latency)
        for capacity, latency in zip(capacities, latencies, strict=True)
    )
    passage = Passage(timeline, 1, hops)
    times = []
    for _ in range(messages):
        passage.send(bits, lambda: times.append(timeline.now))
    while timeline.step():
        pass
    return times


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1)), min_size=1, max_size=5), st.integers(1, 20))
def test_a_chain_costs_its_bottleneck_and_all_latencies(hops, messages):
    capacities, latencies = zip(*hops, strict=True)
    times = cross(capacities, latencies, messages, 1000.0)
    expected = [sum(latencies) + (n + 1) * 1000.0 / min(capacities) for n in range(messages)]
    assert times == pytest.approx(expected)


def test_an_empty_chain_takes_no_time():
    assert cross([], [], 2, 8.0) == [0.0, 0.0]


def test_a_closed_passage_delivers_nothing_and_frees_its_resources():
    timeline = Timeline()
    slow, fast = SharedResource(timeline, 10.0), SharedResource(timeline, 100.0)
    arrived = []
    one = Passage(timeline, 1, (Hop(slow, 0.1), Hop(fast, 0.1)))
    two = Passage(timeline, 2, (Hop(slow, 0.1), Hop(fast, 0.1)))
    one.send(10.0, lambda: arrived.append((1, timeline.now)))
    two.send(10.0, lambda: arrived.append((2, timeline.now)))
    timeline.at(1.0, one.close)
    while timeline.step():
        pass
    assert arrived == [(2, pytest.approx(1.7))]
