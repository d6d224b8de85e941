"""The virtual network: what links and nodes share."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import Unreachable
from netstorm.lab.simulation.memory_network import Timeline
from netstorm.lab.simulation.network import SharedCapacity, VirtualNetwork
from netstorm.topology.network import Change, Link, Network, Node, Rank, Routing

# ------------------------------------------------------------------------------------------- virtual network


MBIT = 1e6


def both_ways(pairs, **values):
    return tuple(Link(source=a, target=b, **values) for x, y in pairs for a, b in ((x, y), (y, x)))


def network(size, pairs, *, nodes=(), routing=Routing.OVERLAY, changes=(), **values):
    return Network(
        nodes=tuple(nodes) or tuple(Node(rank=Rank(rank)) for rank in range(size)),
        links=both_ways(pairs, **values),
        routing=routing,
        changes=changes,
    )


class Run:
    """Sends messages and notes when they arrive."""

    def __init__(self, network, **options):
        self.timeline = Timeline()
        ranks = {f"n{rank}": rank for rank in network.ranks}
        self.model = VirtualNetwork(self.timeline, network, ranks, **options)
        self.arrivals = {}
        self.flows = {}

    def send(self, name, source, target, megabit, *, flow=None, at=0.0):
        flow = self.flows.setdefault((source, target), 2 * len(self.flows)) if flow is None else flow
        size = int(megabit * MBIT / 8)
        self.timeline.at(
            at,
            lambda: self.model.carry(
                flow,
                source,
                target,
                size,
                lambda: self.arrivals.setdefault(name, pytest.approx(self.timeline.now)),
            ),
        )

    def finish(self):
        while self.timeline.step():
            pass
        return self.arrivals


def test_a_message_takes_its_serialisation_and_the_latency():
    run = Run(network(2, [(0, 1)], rate=10 * MBIT, latency=0.03))
    run.send("a", "n0", "n1", 20)
    assert run.finish() == {"a": 2.03}
    assert run.model.bits(Rank(0), Rank(1)) == 20 * MBIT


def test_the_two_directions_of_a_link_do_not_share():
    run = Run(network(2, [(0, 1)], rate=10 * MBIT))
    run.send("there", "n0", "n1", 10)
    run.send("back", "n1", "n0", 10)
    assert run.finish() == {"there": 1.0, "back": 1.0}


def test_an_egress_cap_is_shared_by_all_links_of_a_node():
    nodes = [Node(rank=Rank(0), egress=10 * MBIT), Node(rank=Rank(1)), Node(rank=Rank(2))]
    run = Run(network(3, [(0, 1), (0, 2)], nodes=nodes, rate=10 * MBIT))
    run.send("to 1", "n0", "n1", 10)
    run.send("to 2", "n0", "n2", 10)
    assert run.finish() == {"to 1": 2.0, "to 2": 2.0}


def test_an_ingress_cap_is_shared_by_all_links_to_a_node():
    nodes = [Node(rank=Rank(0), ingress=15 * MBIT), Node(rank=Rank(1)), Node(rank=Rank(2))]
    run = Run(network(3, [(0, 1), (0, 2)], nodes=nodes, rate=10 * MBIT))
    for n in range(3):
        run.send(("1", n), "n1", "n0", 10)
        run.send(("2", n), "n2", "n0", 10)
    assert max(run.finish().values(), key=lambda time: time.expected) == 4.0


def test_underlay_routes_share_the_links_under_them():
    line = network(3, [(0, 1), (1, 2)], routing=Routing.UNDERLAY, rate=10 * MBIT, latency=0.01)
    run = Run(line)
    run.send("0 to 2", "n0", "n2", 10)
    run.send("1 to 2", "n1", "n2", 10)
    assert run.finish() == {"0 to 2": 2.02, "1 to 2": 2.01}


def test_what_is_slow_elsewhere_leaves_its_part_of_a_shared_link_to_others():
    links = (*both_ways([(0, 1)], rate=2 * MBIT), *both_ways([(1, 2)], rate=10 * MBIT))
    run = Run(
        Network(
            nodes=tuple(Node(rank=Rank(rank)) for rank in range(3)), links=links, routing=Routing.UNDERLAY
        )
    )
    run.send("0 to 2", "n0", "n2", 2)
    run.send("1 to 2", "n1", "n2", 8)
    assert run.finish() == {"0 to 2": 1.0, "1 to 2": 1.0}


def test_an_overlay_has_no_way_between_unlinked_nodes():
    run = Run(network(3, [(0, 1), (1, 2)], rate=10 * MBIT))
    run.send("a", "n0", "n2", 1)
    with pytest.raises(Unreachable, match="rank 0 has no link to rank 2"):
        run.finish()


def test_answers_come_back_over_a_link_that_leads_one_way_only():
    one_way = Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(2)),
        links=(Link(source=Rank(0), target=Rank(1), rate=10 * MBIT, latency=0.1),),
    )
    run = Run(one_way)
    run.send("there", "n0", "n1", 10, flow=2)
    run.send("back", "n1", "n0", 10, flow=3)
    assert run.finish() == {"there": 1.1, "back": 0.1}
    run.send("a connection that way", "n1", "n0", 10, flow=4)
    with pytest.raises(Unreachable):
        run.finish()


def test_a_change_of_rate_counts_for_what_is_under_way():
    change = Change(at=1.0, source=Rank(0), target=Rank(1), rate=5 * MBIT)
    run = Run(network(2, [(0, 1)], rate=10 * MBIT, changes=(change,)))
    run.send("a", "n0", "n1", 20)
    assert run.finish() == {"a": 3.0}


def test_a_change_of_latency_counts_from_its_time_on():
    change = Change(at=1.0, source=Rank(0), target=Rank(1), latency=0.5)
    run = Run(network(2, [(0, 1)], rate=10 * MBIT, latency=0.1, changes=(change,)))
    run.send("before", "n0", "n1", 1)
    run.send("after", "n0", "n1", 1, at=1.0)
    assert run.finish() == {"before": 0.2, "after": 1.6}


def test_loss_takes_its_share_of_the_goodput():
    run = Run(network(2, [(0, 1)], rate=10 * MBIT, loss=0.5))
    run.send("a", "n0", "n1", 10)
    assert run.finish() == {"a": 2.0}


def test_reno_is_slowed_down_by_loss_and_round_trip_time_but_two_connections_are_faster_than_one():
    lossy = network(2, [(0, 1)], rate=1000 * MBIT, loss=0.0006, latency=0.05)
    rate = 1448 * 8 / 0.1 * 50  # sqrt(1.5 / 0.0006) is 50
    one, two = Run(lossy, tcp="reno"), Run(lossy, tcp="reno")
    one.send("a", "n0", "n1", 10, flow=10)
    one.send("b", "n0", "n1", 10, flow=10)
    two.send("a", "n0", "n1", 10, flow=10)
    two.send("b", "n0", "n1", 10, flow=12)
    assert one.finish()["b"] == 0.05 + 20 * MBIT / rate
    assert two.finish()["b"] == 0.05 + 10 * MBIT / rate


def test_hosts_without_a_rank_are_reached_in_a_fixed_time():
    run = Run(network(2, [(0, 1)], rate=1 * MBIT), outside_latency_s=0.25)
    run.send("a", "n0", "scheduler", 1000)
    run.send("b", "scheduler", "n1", 1000)
    assert run.finish() == {"a": 0.25, "b": 0.25}


def test_a_forgotten_flow_leaves_its_links():
    run = Run(network(2, [(0, 1)], rate=10 * MBIT))
    run.send("a", "n0", "n1", 10, flow=10)
    run.send("b", "n0", "n1", 10, flow=20)
    run.timeline.at(1.0, lambda: run.model.forget(10))
    assert run.finish() == {"b": 1.5}


sends = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0.1, 5), st.floats(0, 3)).filter(
        lambda send: send[0] != send[1]
    ),
    min_size=1,
    max_size=25,
)


@given(sends, st.sampled_from(list(Routing)), st.floats(1, 30))
def test_nothing_is_faster_than_the_busiest_resource_allows(sends, routing, cap):
    """Every resource needs at least its load over its capacity, and a lone message exactly its bottleneck."""
    nodes = [Node(rank=Rank(rank), egress=cap * MBIT, ingress=cap * MBIT) for rank in range(4)]
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)] if routing is Routing.UNDERLAY else None
    pairs = pairs or [(x, y) for x in range(4) for y in range(x)]
    ring = network(4, pairs, nodes=nodes, routing=routing, rate=10 * MBIT)
    run = Run(ring)
    load: dict[object, float] = {}
    for n, (source, target, megabit, at) in enumerate(sends):
        run.send(n, f"n{source}", f"n{target}", megabit, at=at)
        load["out", source] = load.get(("out", source), 0) + megabit / cap
        load["in", target] = load.get(("in", target), 0) + megabit / cap
        for link in ring.route(Rank(source), Rank(target)):
            load[str(link)] = load.get(str(link), 0) + megabit / 10
    arrivals = run.finish()
    end = max(time.expected for time in arrivals.values())
    assert len(arrivals) == len(sends)
    assert end >= max(load.values()) * (1 - 1e-3)
    assert end <= 3 + sum(megabit / min(cap, 10) for _, _, megabit, _ in sends) * (1 + 1e-3)


# ------------------------------------------------------------------------------------------- shared capacity


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
