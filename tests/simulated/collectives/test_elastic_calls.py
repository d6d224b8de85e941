"""Collective calls while ranks die and join, on the real nodes and the real scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from netstorm.kvstore.calls import GroupCalls, Position
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending, SimulatedNode
from netstorm.protocol.codecs import Element, Reduction
from netstorm.protocol.frames import checksum
from tests.simulated.collectives.exchanges import all_gather, all_reduce

MEMBERS = (0, 1, 2, 3)
Groups = dict[int, GroupCalls]


def values_of(rank: int) -> np.ndarray[Any, Any]:
    return np.full(300, 10.0**rank)


def reduced(cluster: SimulatedCluster, groups: Groups, reduction: Reduction) -> dict[int, Pending]:
    """Begin an all-reduce at all ranks that have a group."""
    return {
        rank: cluster.started(rank).call(group, all_reduce(values_of(rank), Element.FLOAT64, reduction))
        for rank, group in groups.items()
    }


def wait(cluster: SimulatedCluster, calls: dict[int, Pending]) -> list[Any]:
    """Return the first element of each result."""
    cluster.run_until_ended(list(calls.values()), 60.0)
    return [call.result()[0] for call in calls.values()]


def without_rank_2() -> tuple[SimulatedCluster, Groups]:
    """Return a job of three ranks of four, one of which has died."""
    cluster = SimulatedCluster(3, elastic="1:4", chunk_size=50, link_timeout_s=2.0).join()
    groups = {rank: cluster.nodes[rank].group("g", MEMBERS) for rank in range(3)}
    assert wait(cluster, reduced(cluster, groups, Reduction.SUM)) == [111.0] * 3
    cluster.faults.crash(2)
    del groups[2]
    return cluster, groups


def test_a_reduction_is_one_over_the_ranks_that_are_there() -> None:
    cluster, groups = without_rank_2()
    assert wait(cluster, reduced(cluster, groups, Reduction.SUM)) == [11.0] * 2
    assert wait(cluster, reduced(cluster, groups, Reduction.AVERAGE)) == [5.5] * 2
    assert wait(cluster, reduced(cluster, groups, Reduction.MAXIMUM)) == [10.0] * 2


def test_the_places_of_ranks_that_are_not_there_are_zero() -> None:
    cluster, groups = without_rank_2()
    calls = {
        rank: cluster.nodes[rank].call(group, all_gather(rank, np.full(20, rank + 1.0), 4))
        for rank, group in groups.items()
    }
    cluster.run_until_ended(list(calls.values()), 60.0)
    for call in calls.values():
        assert np.array_equal(call.result().view(np.float64), np.repeat([1.0, 2.0, 0.0, 0.0], 20))


def offer(node: SimulatedNode, group: GroupCalls) -> None:
    """Offer where a rank is."""
    content = msgspec.msgpack.encode(group.position())
    snapshot = StateSnapshot(
        step=0,
        content=content,
        crc=checksum(content),
        rounds=group.next_rounds(),
        requests=node.machine.live.state_requests,
    )
    node.process.call(lambda now: node.machine.offer_state(snapshot, now))


def join(cluster: SimulatedCluster, groups: Groups, rank: int) -> None:
    """Let a process join as a rank: the others offer where they are, it fetches that, and goes on there."""
    cluster.start(rank)
    node = cluster.started(rank)
    cluster.run_until_ended([node.joined], 60.0)
    assert node.machine.needs_state
    given: list[StateSnapshot] = []
    done: list[Exception | None] = []
    node.process.call(lambda now: node.machine.fetch_state(given.append, done.append, now))
    others: list[SimulatedNode] = [cluster.started(other) for other in groups]
    cluster.run_until(lambda: all(one.machine.live.has_newcomers for one in others), 60.0, "it asks")
    for other, group in groups.items():
        offer(cluster.started(other), group)
    cluster.run_until(lambda: bool(done), 60.0, "the state")
    assert done == [None]
    mine = node.group("g", MEMBERS)
    mine.go_on_at(msgspec.msgpack.decode(bytes(given[0].content), type=Position))
    groups[rank] = mine


def test_ranks_that_join_make_the_next_calls_of_a_group_and_count_soon() -> None:
    cluster, groups = without_rank_2()
    for rank in (2, 3):
        assert len(set(wait(cluster, reduced(cluster, groups, Reduction.SUM)))) == 1
        join(cluster, groups, rank)
        wanted = sum(10.0**one for one in groups)
        sums = [wait(cluster, reduced(cluster, groups, Reduction.SUM)) for _ in range(40)]
        assert all(len(set(one)) == 1 for one in sums)
        assert sums[-1][0] == wanted, f"rank {rank} never contributes: {sums}"
    assert {group.called for group in groups.values()} == {groups[0].called}
