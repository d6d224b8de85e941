"""A member that sends what no correct one would: the others sum right, or are told who it was, and soon."""

from __future__ import annotations

import gc
import logging
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from netstorm.errors import NetStormError
from netstorm.kvstore.operations import Outbox
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import SimulatedNode
from netstorm.lab.testing.hostile_member import HostileMember
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Connect, ForwardedBytes, Send
from tests.simulated.failures.workload import FAST_TIMEOUTS

NODES = 4
WAIT_S = 20.0
ROUNDS = 25


def hostile_job(
    seed: int, *, forges_parts: bool = False, impersonates: bool = False, **settings: Any
) -> tuple[SimulatedCluster, HostileMember]:
    cluster = SimulatedCluster(
        NODES,
        seed=seed,
        topology=("fapt", "packing")[seed % 2],
        wait_timeout_s=WAIT_S,
        chunk_size=64,
        **settings,
    )
    cluster.network.keyed = True
    cluster.join()
    member = HostileMember(
        cluster,
        seed % NODES,
        seed=seed,
        forges_parts=forges_parts,
        impersonates=impersonates,
        most=400,
        spares=ENDING if impersonates else (),
    )
    return cluster, member


def run_rounds(cluster: SimulatedCluster, hostile: int, rounds: int) -> tuple[list[NetStormError], bool]:
    """Let all nodes sum; return the errors of the correct ones, and whether all their sums were right."""
    correct = [node for node in cluster.nodes if node.rank != hostile]
    right = True
    for number in range(rounds):
        values = [np.full(300, 10.0 * number + rank, np.float32) for rank in range(NODES)]
        pending = {node.rank: node.push(f"w{number % 3}", values[node.rank]) for node in cluster.nodes}
        cluster.run_until_ended([pending[node.rank] for node in correct], WAIT_S + 10.0)
        errors: list[NetStormError] = []
        for node in correct:
            try:
                right &= bool((pending[node.rank].result() == sum(values)).all())
            except NetStormError as error:
                errors.append(error)
        if errors:
            return errors, right
    return [], right


def assert_named(errors: list[NetStormError], hostile: int) -> None:
    for error in errors:
        assert re.search(rf"\branks? [^:]*\b{hostile}\b|\branks \[.*\b{hostile}\b", str(error)), error


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
WAYS: tuple[dict[str, bool], ...] = ({}, {"forges_parts": True}, {"impersonates": True})
"""What it does: lies beside its parts, makes parts up, speaks in the name of others."""


ENDING = (m.Failed, m.Leave, m.Finished, m.Suspect, m.RegisterKeys, m.TopologyRequest, m.CallsWaiting)
"""Kinds of messages that end a job, most of them because they contradict what others say."""


def check(seed: int, *, forges_parts: bool = False, impersonates: bool = False) -> None:
    cluster, member = hostile_job(
        seed, forges_parts=forges_parts, impersonates=impersonates, awareness=seed % 2 == 0, update_time_s=1.0
    )
    errors, right = run_rounds(cluster, seed % NODES, ROUNDS)
    assert right or forges_parts, "a sum of what correct nodes have sent, and it has repeated, is wrong"
    assert_named(errors, seed % NODES)
    assert member.sent


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_others_sum_right_or_are_told_who_it_was(seed: int, way: dict[str, bool]) -> None:
    check(seed, **way)


ELASTIC: dict[str, Any] = {
    "elastic": f"1:{NODES}",
    "heartbeat_interval_s": 0.5,
    "heartbeat_timeout_s": 3.0,
    "link_timeout_s": 2.0,
    "detect_s": 1.0,
}
STEPS = 15


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_so_they_do_while_another_member_of_an_elastic_job_dies(seed: int, way: dict[str, bool]) -> None:
    cluster, member = hostile_job(seed, **way, **ELASTIC)
    hostile, dies = seed % NODES, (seed + 1) % NODES
    correct = [node for node in cluster.nodes if node.rank not in (hostile, dies)]
    for number in range(STEPS):
        pending = {
            node.rank: node.push(f"w{number % 3}", np.full(300, (number + 1) * 2.0**node.rank, np.float32))
            for node in cluster.nodes
            if node.alive and node.failure is None
        }
        if number == STEPS // 3:
            cluster.started(dies).process.die()
        cluster.run_until_ended([pending[node.rank] for node in correct], 3 * WAIT_S)
        errors: list[NetStormError] = []
        results = []
        for node in correct:
            try:
                results.append(pending[node.rank].result() / (number + 1))
            except NetStormError as error:
                errors.append(error)
        assert_named(errors, hostile)
        if errors:
            return
        if "forges_parts" not in way:
            assert all((result == results[0]).all() for result in results), "the same at all ranks"
            assert set(results[0].tolist()) <= set(range(1, 2**NODES)), "each contribution at most once"
    assert member.sent


def test_the_same_seed_makes_the_same_messages() -> None:
    digests = set()
    for _ in range(2):
        cluster, member = hostile_job(3, forges_parts=True)
        run_rounds(cluster, 3, 3)
        digests.add((cluster.digest(), tuple(member.sent.items())))
    assert len(digests) == 1


MIB = 2**20


@pytest.mark.parametrize(
    "message",
    [
        m.Part(
            key=0,
            round=9,
            chunk=0,
            phase=m.Phase.REDUCE,
            version=1,
            tree=0,
            contributors=b"\1",
            dtype="float32",
            is_aux=True,
            path=(0, 1, 2),
            hop=1,
        ),
        m.SmallMessage(path=(0, 1, 2), hop=1, number=0, channel="group", tag=1, what="values"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_node_keeps_to_forward_it_is_bounded_and_the_job_goes_on(message: m.Part, caplog: Any) -> None:
    cluster = SimulatedCluster(NODES, topology="star", hub=3, chunk_size=64, **FAST_TIMEOUTS).join()
    hostile, relay = cluster.started(0), cluster.started(1)
    forwarded: Any = ForwardedBytes(8 * MIB)
    kept_by: Any = outbox_of(relay)
    kept_by.forwarded = forwarded
    assert run_rounds(cluster, 0, 2) == ([], True)
    cluster.faults.suspend(2, seconds=3.0)
    host, port = relay.machine.members[1].host, relay.machine.members[1].port
    most = 0
    for _ in range(30):
        send = Send(peer=Peer(1), message=message, payload=bytes(MIB))
        outbox_of(hostile).add(Connect(peer=Peer(1), host=host, port=port), send)
        hostile.process.call(lambda _: None)
        cluster.run_for(0.02)
        most = max(most, forwarded.bytes._total)
    assert 3 * MIB < most <= 4 * MIB
    assert (
        "rank 0: message to forward, and 3148800 bytes from it wait here for links to others" in caplog.text
    )
    cluster.run_for(10.0)
    assert forwarded.bytes._total == 0
    assert run_rounds(cluster, 0, 2) == ([], True)
    assert not any(node.failure for node in cluster.nodes)


def outbox_of(node: SimulatedNode) -> Outbox:
    machine: Any = node.machine
    outbox: Outbox = machine._outbox
    return outbox


@pytest.mark.slow
def test_a_flood_of_messages_leaves_nothing_behind() -> None:
    cluster = SimulatedCluster(NODES, seed=1, wait_timeout_s=WAIT_S, chunk_size=64).join()
    spares = (*ENDING, m.CallTimedOut, m.ReplicaDigest, m.Resume, m.Moved, m.Barrier)
    assert run_rounds(cluster, 2, 3) == ([], True)
    member = HostileMember(cluster, 2, seed=1, forges_parts=False, most=5000, every_s=0.005, spares=spares)

    def kept_after(messages: int) -> int:
        cluster.run_until(lambda: sum(member.sent.values()) >= messages, 60.0, f"{messages} messages")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    logging.disable(logging.CRITICAL)  # pytest keeps what is logged
    tracemalloc.start()
    try:
        before = kept_after(2000)
        after = kept_after(4500)
        assert after < before + 300_000, tracemalloc.take_snapshot().statistics("lineno")[:8]
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    assert run_rounds(cluster, 2, 3) == ([], True)
