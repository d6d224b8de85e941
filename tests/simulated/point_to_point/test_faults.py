"""Messages between ranks arrive exactly once, whatever happens to connections and links."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.kvstore.messages import WAITING_BYTES
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Breaks, Cut, Reset, random_plan
from tests.simulated.failures.failing_links import FAST_TIMEOUTS
from tests.simulated.jobs import random_policy

SIZES = (0, 1, 10, 5000, 65_536, 65_537, 200_000)
"""Elements of float32: up to four pieces."""


@dataclass(frozen=True)
class Program:
    """Sends of random sizes between random ranks, and their receives, at random times."""

    nodes: int
    seed: int
    messages: int
    spread_s: float
    shuffled: bool
    """Receives are not submitted in the order of sends (but each tag's are)."""

    def run(self, cluster, limit_s=300.0, without=-1):
        """Run it among all ranks but one, and check every value."""
        chance = random.Random(f"program {self.seed}")
        ranks = [rank for rank in range(self.nodes) if rank != without]
        plan = [
            (
                chance.choice(ranks),
                chance.choice(ranks),
                chance.randrange(3),
                chance.choice(SIZES),
            )
            for _ in range(self.messages)
        ]
        sends, receives = [], []

        def send(number):
            source, target, tag, size = plan[number]
            sends.append(cluster.nodes[source].send(target, np.full(size, number, "float32"), tag=tag))

        def receive(number):
            source, target, tag, size = plan[number]
            receives.append((number, cluster.nodes[target].receive(source, (size,), tag=tag)))

        streams: dict[tuple[int, int, int], list[int]] = {}
        for number, (source, target, tag, _) in enumerate(plan):
            streams.setdefault((source, target, tag), []).append(number)
        begin = cluster.now
        for act in (send, receive):
            numbers = list(range(self.messages))
            if self.shuffled and act is receive:
                numbers = in_order_of_streams(chance, streams)
            times = sorted(chance.random() * self.spread_s for _ in numbers)
            for time, number in zip(times, numbers, strict=True):
                cluster.at(begin + time, lambda act=act, number=number: act(number))
        cluster.run_until(
            lambda: len(sends) == len(receives) == self.messages, self.spread_s + 1, "all of the program"
        )
        cluster.run_until_ended([*sends, *(one for _, one in receives)], limit_s)
        for one in sends:
            assert one.error is None, one.error
        for number, one in receives:
            got = one.result()
            assert got.size == plan[number][3]
            assert (got == number).all(), f"message {number}"


def in_order_of_streams(chance, streams):
    """Return all numbers in random order, but those of each stream in theirs."""
    names = [name for name, numbers in streams.items() for _ in numbers]
    chance.shuffle(names)
    left = {name: list(numbers) for name, numbers in streams.items()}
    return [left[name].pop(0) for name in names]


programs = st.builds(
    Program,
    nodes=st.integers(2, 5),
    seed=st.integers(0, 2**32),
    messages=st.integers(1, 40),
    spread_s=st.sampled_from([0.0, 0.01, 0.5]),
    shuffled=st.booleans(),
)


def most_stored(cluster):
    """Return the most bytes of one sender's messages that any node stores for its program."""
    ranks = range(cluster.size)
    nodes = [node.machine.require_joined().point_to_point for node in cluster.nodes]
    return max(node.stored_bytes(sender) for node in nodes for sender in ranks)


@given(programs, st.sampled_from([0.0, 0.003, 0.1]))
def test_any_program_ends_with_the_right_values_and_no_node_stores_more_than_was_agreed(program, jitter_s):
    policy = random_policy(random.Random(f"policy {program.seed}"), program.nodes)
    cluster = SimulatedCluster(program.nodes, seed=program.seed, policy=policy, jitter_s=jitter_s).join()
    most = 0

    def look():
        nonlocal most
        most = max(most, most_stored(cluster))
        cluster.at(cluster.now + 0.002, look)

    cluster.at(cluster.now, look)
    program.run(cluster)
    assert most <= WAITING_BYTES
    assert most_stored(cluster) == 0
    cluster.finish()


@given(programs)
def test_broken_connections_lose_and_double_nothing(program):
    plan = random_plan(program.nodes, program.seed, duration_s=0.5, longest_cut_s=2.0)
    policy = random_policy(random.Random(f"policy {program.seed}"), program.nodes)
    cluster = SimulatedCluster(
        program.nodes,
        seed=program.seed,
        policy=policy,
        jitter_s=0.003,
        faults=(*plan, Breaks(probability=0.01)),
    ).join()
    program.run(cluster)


def test_a_reset_amid_a_large_message_sends_only_what_is_missing():
    values = np.arange(2**20, dtype="float32")
    faults = [Reset(at=at, source=0, target=1) for at in (1.001, 1.01, 1.02)]
    cluster = SimulatedCluster(2, faults=faults, delay_s=0.005).join()
    cluster.run_for(1.0 - cluster.now)
    send, receive = cluster.nodes[0].send(1, values), cluster.nodes[1].receive(0, values.shape)
    cluster.run_until_ended([send, receive])
    assert send.ended_well
    assert receive.result().tobytes() == values.tobytes()
    assert cluster.nodes[1].machine.counters.get("receives") == 1


@given(programs.filter(lambda program: program.nodes > 2))
def test_messages_go_around_links_that_fail_for_good(program):
    chance = random.Random(f"cuts {program.seed}")
    source, target = chance.sample(range(program.nodes), 2)
    cut = Cut(at=chance.random() * 0.5, source=source, target=target, one_way=chance.random() < 0.5)
    policy = random_policy(chance, program.nodes)
    cluster = SimulatedCluster(
        program.nodes, seed=program.seed, policy=policy, jitter_s=0.003, faults=[cut], **FAST_TIMEOUTS
    ).join()
    program.run(cluster)


def test_messages_change_to_a_new_policy_amid_their_pieces():
    chance = random.Random(1)
    cluster = SimulatedCluster(5, policy=random_policy(chance, 5), jitter_s=0.01).join()
    for version in range(1, 5):
        policy = random_policy(chance, 5, version)
        cluster.at(cluster.now + 0.02 * version, partial(cluster.install_policy, policy))
    Program(nodes=5, seed=3, messages=60, spread_s=0.1, shuffled=True).run(cluster)
    cluster.finish()


@given(
    st.integers(3, 6), st.integers(0, 2**32), st.sampled_from([1, 5, 40]), st.sampled_from([0.0, 0.3, 3.0])
)
@settings(max_examples=20, deadline=None)
def test_a_rank_that_dies_takes_no_messages_of_others_with_it(nodes, seed, messages, spread_s):
    """Trees lead many messages through other ranks."""
    chance = random.Random(seed)
    cluster = SimulatedCluster(
        nodes,
        seed=seed,
        elastic=f"1:{nodes}",
        policy=random_policy(chance, nodes),
        jitter_s=chance.choice((0.0, 0.05)),
        detect_s=1.0,
        heartbeat_interval_s=0.5,
        heartbeat_timeout_s=3.0,
        link_timeout_s=2.0,
    ).join()
    victim = chance.randrange(nodes)
    dies = cluster.now + chance.random() * (spread_s + 0.2)
    cluster.at(dies, lambda: cluster.faults.crash(victim, silent=chance.random() < 0.3))
    program = Program(nodes, seed, messages, spread_s, shuffled=chance.random() < 0.5)
    program.run(cluster, without=victim)
