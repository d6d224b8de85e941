"""Calls that copy values of one rank: to whom they go, from which memory, when their owner may change it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import NodeLost
from netstorm.kvstore.calls import TensorExchange
from netstorm.kvstore.exchanges import CollectiveExchanges
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.network import Network
from tests.simulated.collectives.exchanges import groups_of, make_calls
from tests.simulated.jobs import examples

Rows = dict[int, Any]

LARGE = 6_000_000
"""Bytes, of which a root makes no copy."""


def arrays(count: int, nbytes: int) -> list[np.ndarray[Any, Any]]:
    return [np.full(nbytes, 7 + place, np.uint8) for place in range(count)]


@examples(25)
@given(st.data())
def test_every_call_that_copies_gives_each_member_what_the_others_have(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 5))
    members = tuple(sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1))))
    size, root = len(members), data.draw(st.integers(0, len(members) - 1))
    nbytes = data.draw(st.sampled_from([0, 1, 90, 1000]))
    hub = data.draw(st.integers(0, nodes - 1))
    cluster = SimulatedCluster(nodes, chunk_size=20, topology="star", hub=hub).join()
    groups = groups_of(cluster, "some", members)
    mine, rows = arrays(size, nbytes), {rank: arrays(size, nbytes) for rank in members}
    made = [CollectiveExchanges(place, size) for place in range(size)]

    def run(exchanges: list[TensorExchange]) -> None:
        calls = make_calls(cluster, groups, dict(zip(members, exchanges, strict=True)))
        cluster.run_until_ended(list(calls.values()), 60.0)
        assert all(call.ended_well for call in calls.values())

    outputs = [[np.zeros(nbytes, np.uint8) for _ in range(size)] for _ in range(size)]
    run([made[at].all_gather("", mine[at], tuple(outputs[at])) for at in range(size)])
    for output in outputs:
        assert np.array_equal(output, mine)
    at_root = tuple(np.zeros(nbytes, np.uint8) for _ in range(size))
    run([made[at].gather("", mine[at], at_root if at == root else None, root) for at in range(size)])
    assert np.array_equal(at_root, mine)
    given_out = tuple(rows[members[root]])
    targets = [np.zeros(nbytes, np.uint8) for _ in range(size)]
    run([made[at].scatter("", targets[at], given_out if at == root else None, root) for at in range(size)])
    assert np.array_equal(targets, given_out)
    copies = [mine[root] if at == root else np.zeros(nbytes, np.uint8) for at in range(size)]
    run([made[at].broadcast("", copies[at], root) for at in range(size)])
    assert all(np.array_equal(copy, mine[root]) for copy in copies)


@pytest.mark.parametrize("root", [0, 1])
def test_nobody_gets_his_own_values_back(root: int) -> None:
    cluster = SimulatedCluster(3, topology="star", hub=0).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    tensors = arrays(3, 1_000_000)
    before = {pair: cluster.traffic(*pair) for pair in ((0, 1), (0, 2), (1, 0), (2, 0))}
    exchanges = {at: CollectiveExchanges(at, 3).broadcast("", tensors[at], root) for at in range(3)}
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_until_ended(list(calls.values()), 60.0)
    sent = {pair for pair, known in before.items() if cluster.traffic(*pair) - known > 100_000}
    assert sent == ({(0, 1), (0, 2)} if root == 0 else {(1, 0), (0, 2)})
    assert all(np.array_equal(tensor, tensors[root]) for tensor in tensors)


@pytest.mark.parametrize("hub", [0, 1])
def test_a_large_broadcast_ends_when_its_source_may_be_overwritten(hub: int) -> None:
    network = Network.uniform(3, rate=100e6)
    cluster = SimulatedCluster(3, network=network, topology="star", hub=hub).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    tensors = arrays(3, LARGE)
    exchanges = {at: CollectiveExchanges(at, 3).broadcast("", tensors[at], 0) for at in range(3)}
    calls = make_calls(cluster, groups, exchanges)
    calls[0].then(lambda: tensors[0].fill(99))
    cluster.run_for(0.2)
    assert not calls[0].ended, "most of it has not left yet"
    cluster.run_until_ended(list(calls.values()), 60.0)
    cluster.run_for(0.1)
    assert (tensors[0] == 99).all()
    assert (tensors[1] == 7).all()
    assert (tensors[2] == 7).all()


def test_a_small_broadcast_ends_at_its_root_at_once() -> None:
    cluster = SimulatedCluster(3, delay_s=0.5, topology="star", hub=0).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    took = []
    for _ in range(2):  # the first one waits for its key
        tensors = arrays(3, 1000)
        exchanges = {at: CollectiveExchanges(at, 3).broadcast("", tensors[at], 0) for at in range(3)}
        began, calls = cluster.now, make_calls(cluster, groups, exchanges)
        cluster.run_until_ended([calls[0]], 60.0)
        took.append(cluster.now - began)
        tensors[0].fill(99)
        cluster.run_until_ended(list(calls.values()), 60.0)
        assert (tensors[2] == 7).all()
    assert took[1] < 2.1, "contributions come here, and the end is not waited for"


def test_a_large_broadcast_fails_at_its_root_when_a_receiver_dies() -> None:
    cluster = SimulatedCluster(3, network=Network.uniform(3, rate=10e6), topology="star", hub=0).join()
    groups = groups_of(cluster, "g", (0, 1, 2))
    tensors = arrays(3, LARGE)
    exchanges = {at: CollectiveExchanges(at, 3).broadcast("", tensors[at], 0) for at in range(3)}
    calls = make_calls(cluster, groups, exchanges)
    cluster.run_for(1.0)
    cluster.faults.crash(2)
    cluster.run_until_ended([calls[0], calls[1]], 60.0)
    with pytest.raises(NodeLost, match="rank 2"):
        calls[0].result()


@examples(12)
@given(st.data())
def test_whoever_dies_in_an_elastic_job_all_others_have_what_the_root_has(data: st.DataObject) -> None:
    root, victim, hub = data.draw(st.permutations(range(4)).map(lambda order: order[:3]))
    hub = data.draw(st.sampled_from([hub, root, victim]))
    cluster = SimulatedCluster(
        4,
        network=Network.uniform(4, rate=50e6),
        topology="star",
        hub=hub,
        elastic="1:4",
        heartbeat_interval_s=0.5,
        heartbeat_timeout_s=3.0,
        link_timeout_s=2.0,
    ).join()
    groups = groups_of(cluster, "g", (0, 1, 2, 3))
    tensors = arrays(4, LARGE)
    exchanges = {at: CollectiveExchanges(at, 4).broadcast("", tensors[at], root) for at in range(4)}
    calls = make_calls(cluster, groups, exchanges)
    calls[root].then(lambda: tensors[root].fill(99))
    cluster.run_for(data.draw(st.floats(0.0, 3.0)))
    cluster.faults.crash(victim)
    others = [at for at in range(4) if at != victim]
    cluster.run_until_ended([calls[at] for at in others], 120.0)
    cluster.run_for(0.1)
    for at in others:
        assert calls[at].ended_well
        assert (tensors[at] == (99 if at == root else 7 + root)).all()
