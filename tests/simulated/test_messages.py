"""Messages between ranks arrive exactly once, whatever happens to connections and links."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import Closed, NodeFailed, UnevenRounds, WaitTimeout
from netstorm.kvstore.messages import WAITING_BYTES
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Breaks, Cut, Reset, random_plan
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.failures.workload import FAST_TIMEOUTS
from tests.simulated.jobs import examples, random_policy

CHAIN = Policy(
    version=0,
    trees=(Tree(root=Rank(0), reduce_parent=(-1, 0, 1, 2), broadcast_parent=(-1, 0, 1, 2)),),
    weights=(1,),
)
"""Ranks 0 and 3 are linked over 1 and 2."""

LARGE = 5 * 2**18 + 3
"""Elements; 5 MiB of float32, of which the last piece is short."""


def values_of(elements, seed=0, dtype="float32"):
    return np.random.default_rng(seed).integers(0, 100, elements).astype(dtype)


def exchange(cluster, sends, receives, limit_s=60.0):
    """Wait for all of them, and return the received arrays."""
    cluster.run_until_ended([*sends, *receives], limit_s)
    for send in sends:
        assert send.error is None, send.error
    return [receive.result() for receive in receives]


@pytest.mark.parametrize("elements", [1, 65_537, LARGE])
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_of_any_size_arrives_over_nodes_that_forward(elements, posted_first):
    cluster = SimulatedCluster(4, policy=CHAIN).join()
    values = values_of(elements)
    if posted_first:
        receive = cluster.nodes[0].receive(3, (elements,))
        cluster.run_for(1.0)
        send = cluster.nodes[3].send(0, values)
    else:
        send = cluster.nodes[3].send(0, values)
        cluster.run_for(1.0)
        receive = cluster.nodes[0].receive(3, (elements,))
    [got] = exchange(cluster, [send], [receive])
    assert got.tobytes() == values.tobytes()
    cluster.finish()


def test_what_a_finished_rank_has_sent_is_still_delivered_and_what_it_has_not_fails():
    cluster = SimulatedCluster(4, policy=CHAIN).join()
    sender, receiver = cluster.nodes[3], cluster.nodes[0]
    missing = receiver.receive(3, (1,), tag=9)
    sends = [sender.send(0, values_of(size), tag=size) for size in (LARGE, 10)]
    sender.finish()
    cluster.run_for(1.0)
    got = exchange(cluster, sends, [receiver.receive(3, (size,), tag=size) for size in (10, LARGE)])
    assert [array.tobytes() for array in got] == [values_of(10).tobytes(), values_of(LARGE).tobytes()]
    too_late = receiver.receive(3, (2,), tag=LARGE)
    cluster.run_until_ended([missing, too_late])
    assert isinstance(missing.error, UnevenRounds)
    assert "rank 0 waits for a message from rank 3 (tag 9, float32 (1,))" in str(missing.error)
    assert isinstance(too_late.error, UnevenRounds)
    cluster.finish()


def test_a_rank_that_has_finished_sends_and_receives_nothing_more():
    cluster = SimulatedCluster(2).join()
    cluster.nodes[0].finish()
    late = [cluster.nodes[0].send(1, values_of(3)), cluster.nodes[0].receive(1, (3,))]
    cluster.run_until_ended(late)
    assert all(isinstance(one.error, Closed) for one in late)


def test_a_failed_job_fails_every_message():
    cluster = SimulatedCluster(3).join()
    waiting = [cluster.nodes[0].send(1, values_of(LARGE)), cluster.nodes[0].receive(2, (1,))]
    cluster.nodes[2].fail("out of memory")
    cluster.run_until_ended(waiting)
    assert all(isinstance(one.error, NodeFailed) for one in waiting)
    late = cluster.nodes[0].receive(1, (1,))
    cluster.run_until_ended([late])
    assert isinstance(late.error, NodeFailed)


def test_a_receive_that_waits_too_long_ends_the_job_and_says_for_what():
    cluster = SimulatedCluster(4, wait_timeout_s=30.0).join()
    receive = cluster.nodes[0].receive(3, (3, 4), tag=7)
    assert cluster.nodes[0].machine.outstanding() == 1
    cluster.run_until_ended([receive], 100.0)
    assert isinstance(receive.error, WaitTimeout)
    assert "a message from rank 3 (tag 7, float32 (3, 4))" in str(receive.error)


# ----------------------------------------------------------------------------------------------------- faults

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


@examples(15)
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


@examples(12)
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


@examples(12)
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
@examples(7)
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
