"""Collective calls of process groups, on the real nodes and the real scheduler, against NumPy."""

from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from netstorm.errors import Disagreement, UnevenRounds, WaitTimeout
from netstorm.kvstore.calls import GroupCalls, Position
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending, SimulatedNode
from netstorm.lab.testing.faults import Corrupt, Reset
from netstorm.protocol.codecs import Element, Reduction
from netstorm.protocol.frames import SCHEDULER, checksum
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.collectives.exchanges import all_gather, all_reduce, groups_of, make_calls
from tests.simulated.jobs import examples

DTYPES = {
    Element.FLOAT32: np.float32,
    Element.FLOAT64: np.float64,
    Element.INT8: np.int8,
    Element.INT64: np.int64,
    Element.UINT8: np.uint8,
}

ORACLE: dict[Reduction, Any] = {
    Reduction.SUM: lambda rows: reduce(np.add, rows),
    Reduction.PRODUCT: lambda rows: reduce(np.multiply, rows),
    Reduction.MINIMUM: lambda rows: np.min(rows, axis=0),
    Reduction.MAXIMUM: lambda rows: np.max(rows, axis=0),
    Reduction.AND: lambda rows: reduce(np.bitwise_and, rows),
    Reduction.OR: lambda rows: reduce(np.bitwise_or, rows),
    Reduction.XOR: lambda rows: reduce(np.bitwise_xor, rows),
}


@examples(15)
@given(st.data())
def test_every_reduction_of_every_member_set_equals_numpy(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 6))
    members = tuple(sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1))))
    cluster = SimulatedCluster(
        nodes, seed=data.draw(st.integers(0, 99)), chunk_size=50, jitter_s=0.001
    ).join()
    groups = groups_of(cluster, "some", members)
    rng = np.random.default_rng(nodes)
    for _ in range(data.draw(st.integers(1, 4))):
        reduction = data.draw(st.sampled_from(sorted(ORACLE)))
        whole = [Element.INT8, Element.INT64, Element.UINT8]
        element = data.draw(st.sampled_from(whole if reduction >= Reduction.AND else sorted(DTYPES)))
        shape = data.draw(st.sampled_from([0, 1, 7, 300]))
        values = {rank: rng.integers(0, 3, shape).astype(DTYPES[element]) for rank in members}
        calls = make_calls(
            cluster, groups, {rank: all_reduce(values[rank], element, reduction) for rank in members}
        )
        cluster.run_until_ended(list(calls.values()), 60.0)
        expected = ORACLE[reduction](list(values.values()))
        for rank in members:
            assert np.array_equal(calls[rank].result(), expected)


def test_an_all_gather_gives_every_member_every_members_bytes() -> None:
    cluster = SimulatedCluster(5, chunk_size=40).join()
    members = (0, 2, 3)
    groups = groups_of(cluster, "g", members)
    mine = {rank: np.arange(101, dtype=np.int64) * (rank + 1) for rank in members}
    exchanges = {rank: all_gather(index, mine[rank], 3) for index, rank in enumerate(members)}
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_until_ended(list(calls.values()), 60.0)
    for rank in members:
        assert np.array_equal(calls[rank].result().view(np.int64), np.concatenate(list(mine.values())))


def test_only_receivers_get_the_payload_of_a_result() -> None:
    cluster = SimulatedCluster(4, chunk_size=1000, topology="star", hub=0).join()
    groups = groups_of(cluster, "g", (0, 1, 2, 3))
    before = {rank: cluster.traffic(0, rank) for rank in (1, 2, 3)}
    values = np.ones(20_000, np.float32)
    exchanges = {rank: all_reduce(values, Element.FLOAT32, receivers=(1 << 2,)) for rank in range(4)}
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_until_ended(list(calls.values()), 60.0)
    assert (calls[2].result() == 4).all()
    got = {rank: cluster.traffic(0, rank) - before[rank] for rank in (1, 2, 3)}
    assert got[2] > values.nbytes
    assert max(got[1], got[3]) < values.nbytes / 4


def test_many_small_calls_are_under_way_at_once() -> None:
    cluster = SimulatedCluster(3, delay_s=0.1).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    one = np.ones(4, np.float32)
    first = make_calls(cluster, groups, {rank: all_reduce(one, Element.FLOAT32) for rank in range(3)})
    cluster.run_until_ended(list(first.values()), 60.0)
    began = cluster.now
    calls: list[Pending] = []
    for _ in range(20):
        calls += make_calls(
            cluster, groups, {rank: all_reduce(one, Element.FLOAT32) for rank in range(3)}
        ).values()
    cluster.run_until_ended(calls, 60.0)
    assert all((call.result() == 3).all() for call in calls)
    assert cluster.now - began < 4 * 0.4, "calls wait for each other's round trips"


@pytest.mark.parametrize("size", [5, 5000, 700_000])
def test_different_calls_at_the_same_place_end_the_job_and_name_both_sides(size: int) -> None:
    cluster = SimulatedCluster(3, chunk_size=1000).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    exchanges = {rank: all_reduce(np.ones(6, np.float32), Element.FLOAT32) for rank in (0, 1)}
    exchanges[2] = all_reduce(np.ones(size, np.float32), Element.FLOAT32)
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_until_ended(list(calls.values()), 30.0)
    for call in calls.values():
        with pytest.raises(Disagreement, match=rf"FLOAT32 \({size},\) at rank 2") as caught:
            call.result()
        assert "FLOAT32 (6,) at rank" in str(caught.value)


def test_another_operation_of_the_same_size_is_a_disagreement_too() -> None:
    cluster = SimulatedCluster(3).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    exchanges = {rank: all_reduce(np.ones(6, np.float32), Element.FLOAT32) for rank in (0, 1)}
    exchanges[2] = all_gather(2, np.ones(2, np.float32), 3)
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_until_ended(list(calls.values()), 30.0)
    for call in calls.values():
        with pytest.raises(Disagreement, match="all_gather at rank 2"):
            call.result()


def test_the_same_bytes_of_another_call_are_never_taken_for_this_call() -> None:
    cluster = SimulatedCluster(3).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    ones = np.ones(6, np.float32)
    exchanges = {
        rank: replace(all_reduce(ones, Element.FLOAT32), text=f"broadcast from rank {int(rank == 2)}")
        for rank in range(3)
    }
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_until_ended(list(calls.values()), 30.0)
    for call in calls.values():
        with pytest.raises(Disagreement, match="broadcast from rank 1 at rank 2"):
            call.result()


def test_a_member_that_ends_without_a_call_is_named_and_others_may_end() -> None:
    cluster = SimulatedCluster(3).join()
    groups = groups_of(cluster, "pair", (0, 1))
    cluster.nodes[2].finish()  # not in the group: it is not missed
    done = make_calls(
        cluster, groups, {rank: all_reduce(np.ones(6, np.float32), Element.FLOAT32) for rank in (0, 1)}
    )
    cluster.run_until_ended(list(done.values()), 30.0)
    assert all((call.result() == 2).all() for call in done.values())
    waiting = cluster.nodes[0].call(groups[0], all_reduce(np.ones(6, np.float32), Element.FLOAT32))
    cluster.nodes[1].finish()
    cluster.run_until_ended([waiting], 30.0)
    with pytest.raises(UnevenRounds, match=r"rank 1 .* has finished without it"):
        waiting.result()


def test_a_call_that_reaches_its_time_out_ends_the_job_and_names_who_has_not_made_it() -> None:
    cluster = SimulatedCluster(4).join()
    groups = groups_of(cluster, "g", (0, 1, 3))
    waiting = [
        cluster.nodes[rank].call(groups[rank], all_reduce(np.ones(6, np.float32), Element.FLOAT32), 20.0)
        for rank in (0, 1)
    ]
    cluster.run_until_ended(waiting, 30.0)
    for call in waiting:
        assert 20.0 <= (call.ended_at or 0.0) < 23.0
        with pytest.raises(
            WaitTimeout, match=r"all_reduce of FLOAT32 .* within its timeout of 20 s .*: rank 3 has not made"
        ):
            call.result()


@pytest.mark.parametrize("seed", range(2))
def test_calls_survive_broken_connections_and_flipped_bits(seed: int) -> None:
    faults = [Reset(at=0.05 + 0.03 * index, source=index % 4, target=(index + 1) % 4) for index in range(8)]
    cluster = SimulatedCluster(
        4, seed=seed, chunk_size=200, delay_s=0.005, faults=[*faults, Corrupt(probability=0.02)]
    ).join()
    everybody = groups_of(cluster, "all", (0, 1, 2, 3))
    pair = groups_of(cluster, "pair", (1, 3))
    rng = np.random.default_rng(seed)
    for _ in range(10):
        values = {rank: rng.integers(-9, 9, 3000).astype(np.int64) for rank in range(4)}
        calls = make_calls(
            cluster, everybody, {rank: all_reduce(values[rank], Element.INT64) for rank in range(4)}
        )
        others = make_calls(cluster, pair, {rank: all_reduce(values[rank], Element.INT64) for rank in (1, 3)})
        cluster.run_until_ended([*calls.values(), *others.values()], 120.0)
        assert all(np.array_equal(call.result(), sum(values.values())) for call in calls.values())
        assert all(np.array_equal(call.result(), values[1] + values[3]) for call in others.values())


def test_policies_change_between_the_rounds_of_groups() -> None:
    cluster = SimulatedCluster(4, chunk_size=100, topology="packing").join()
    everybody = groups_of(cluster, "all", (0, 1, 2, 3))
    pair = groups_of(cluster, "pair", (0, 3))
    from netstorm.topology.policy import Policy
    from netstorm.topology.tree import Tree

    for step in range(12):
        root = step % 4
        tree = Tree.undirected(root, tuple(-1 if rank == root else root for rank in range(4)))  # type: ignore[arg-type]
        cluster.install_policy(
            Policy(version=step + 1, trees=(tree,), weights=(1,), takes_over=step % 2 == 1)
        )
        calls = make_calls(
            cluster, everybody, {r: all_reduce(np.full(900, r, np.int64), Element.INT64) for r in range(4)}
        )
        others = make_calls(
            cluster, pair, {r: all_reduce(np.full(900, r, np.int64), Element.INT64) for r in (0, 3)}
        )
        cluster.run_until_ended([*calls.values(), *others.values()], 60.0)
        assert all((call.result() == 6).all() for call in calls.values())
        assert all((call.result() == 3).all() for call in others.values())
    cluster.finish()


# ----------------------------------------------------------------------------------- while ranks die and join

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


# -------------------------------------------------------------- while the scheduler dies and is started again


def star(version: int, root: int, nodes: int) -> Policy:
    parents = tuple(-1 if rank == root else root for rank in range(nodes))
    return Policy(version=version, trees=(Tree.undirected(Rank(root), parents),), weights=(1,))


@pytest.mark.parametrize(
    "seed", [1, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 5))]
)
@pytest.mark.parametrize("begun_before", [0, 1, 40])
def test_calls_that_were_granted_before_a_restart_run_under_the_same_policies_after_it(
    seed: int, begun_before: int
) -> None:
    quick: dict[str, Any] = {
        "link_timeout_s": 2.0,
        "heartbeat_timeout_s": 6.0,
        "scheduler_timeout_s": 60.0,
    }
    cluster = SimulatedCluster(4, seed=seed, chunk_size=300, keep_log=True, jitter_s=0.01, **quick).join()
    everybody = groups_of(cluster, "all", (0, 1, 2, 3))
    pair = groups_of(cluster, "pair", (1, 3))
    expected: list[tuple[Any, int]] = []

    def call(count: int) -> None:
        for _ in range(count):
            size = (2, 900)[len(expected) % 2]
            for groups in (everybody, pair):
                exchanges = {
                    rank: all_reduce(np.full(size, rank, np.int64), Element.INT64) for rank in groups
                }
                calls = make_calls(cluster, groups, exchanges)
                expected.extend((one, sum(groups)) for one in calls.values())

    call(begun_before)
    cluster.run_for(0.02 * seed)
    cluster.faults.crash(SCHEDULER)
    call(50)
    cluster.run_for(3.0)
    cluster.start(SCHEDULER)
    cluster.run_for(1.0)
    call(50)
    cluster.run_until_ended([one for one, _ in expected], 120.0)
    version = cluster.scheduler.machine.policy.version
    cluster.install_policy(star(version + 1, seed % 4, 4))
    call(70)
    cluster.run_until_ended([one for one, _ in expected], 120.0)
    assert all((one.result() == total).all() for one, total in expected)
    cluster.finish()
