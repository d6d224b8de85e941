"""Row-sparse keys: the union of all ranks' rows, each with the right sum, and only those rows travel."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.sparse import Rows, joined_rows
from netstorm.errors import KeyMismatch
from netstorm.kvstore.forms import Key, RowParts
from netstorm.kvstore.operations import Operation
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.lab.testing.strategies import fault_plans
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.frames import SCHEDULER
from tests.simulated.jobs import examples, random_detours, random_policy


def register(node, name, shape, dtype="float32"):
    key = node.keys[name] = Key(0, name, shape, dtype, form=ROW_SPARSE)
    node.process.call(lambda now: node.machine.register(key, now))
    return key


class Pushed(Pending):
    """A round of a key, and the rows that have arrived."""

    def __init__(self, cluster, node, key):
        super().__init__(
            cluster.timeline, f"rank {node.rank}: round {key.last_taken + 1} of key {key.name!r}"
        )
        self.key = key
        self.parts: RowParts = []

    def rows(self):
        """Return the sum, or raise why there is none."""
        if self.error is not None:
            raise self.error
        assert self.ended_well
        return joined_rows(self.parts, row_length(self.key.spec.shape), self.key.dtype)


def push(cluster, node, key, rows, *, priority=0):
    """Begin the next round of a key with a node's rows (None: it contributes none)."""
    pending = Pushed(cluster, node, key)
    operation = Operation(
        key=key,
        round=key.take_round(),
        source=rows,
        destination=pending.parts,
        done=pending.done,
        priority=priority,
    )
    node.process.call(lambda now: node.machine.submit(operation, now))
    return pending


def random_rows(drawn, shape, dtype, share):
    """Return some rows of small whole numbers, some of which are zero."""
    numbers = np.flatnonzero(drawn.random(shape[0]) < share)
    low = 0 if dtype.startswith("u") else -5
    return Rows(numbers, drawn.integers(low, 6, (len(numbers), row_length(shape))).astype(dtype))


def run_job(nodes, seed, *, rounds=3, policies=1, chunk_size=7, faults=(), detours=False):
    """Sum random rows under random trees; check every rank's result."""
    chance, drawn = random.Random(seed), np.random.default_rng(seed)

    def policy(version):
        formed = random_policy(chance, nodes, version)
        return random_detours(chance, formed) if detours else formed

    cluster = SimulatedCluster(
        nodes, seed=seed, policy=policy(0), chunk_size=chunk_size, jitter_s=0.01, faults=faults
    ).join()
    dtype = chance.choice(["float16", "float32", "float64", "int64", "uint8"])
    shapes = [(drawn.integers(1, 40), *drawn.integers(1, 4, drawn.integers(0, 3))) for _ in range(2)]
    shares = [float(drawn.choice([0.0, 0.1, 0.5, 1.0])) for _ in range(nodes)]
    pending, pushed = {}, {}
    for number, version in enumerate(range(rounds), 1):
        for place, sides in enumerate(shapes):
            shape = tuple(map(int, sides))
            for node in chance.sample(cluster.nodes, nodes):
                name = f"key{place}"
                key = node.keys.get(name) or register(node, name, shape, dtype)
                one = pushed[node.rank, place, version] = random_rows(drawn, shape, dtype, shares[node.rank])
                own = Rows(one.numbers.copy(), one.values.copy())
                pending[node.rank, place, version] = push(cluster, node, key, own if len(own) else None)
        if number < policies:
            cluster.install_policy(policy(number))
    cluster.run_until_ended(pending.values(), 600.0)
    for (rank, place, version), one in pending.items():
        shape = tuple(map(int, shapes[place]))
        matrix, numbers = np.zeros((shape[0], row_length(shape)), np.int64), set()
        for other in range(nodes):
            rows = pushed[other, place, version]
            matrix[rows.numbers] += rows.values.astype(np.int64)
            numbers |= set(rows.numbers.tolist())
        found = one.rows()
        where = f"rank {rank}, key {place}, round {version}"
        assert found.numbers.tolist() == sorted(numbers), where
        assert found.values.tobytes() == matrix[sorted(numbers)].astype(dtype).tobytes(), where
    cluster.finish()
    return cluster


@given(st.integers(1, 9), st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([1, 7, 100, 10**4]))
@examples(7)
def test_the_sum_has_the_rows_of_all_ranks_whatever_the_trees_and_however_they_change(
    nodes, seed, policies, chunk_size
):
    run_job(nodes, seed, policies=policies, chunk_size=chunk_size)


@given(st.integers(2, 6), st.integers(0, 2**32), st.data())
@examples(5)
def test_so_it_has_over_detours_and_whatever_breaks(nodes, seed, data):
    plan = data.draw(fault_plans(nodes, duration_s=0.05, longest_cut_s=2.0))
    run_job(nodes, seed, policies=2, faults=plan, detours=True)


@given(st.integers(2, 9), st.integers(0, 2**32))
@examples(5)
def test_fractions_are_the_same_bytes_on_all_ranks(nodes, seed):
    drawn = np.random.default_rng(seed)
    cluster = SimulatedCluster(nodes, seed=seed, chunk_size=20, jitter_s=0.01).join()
    pending = []
    for node in cluster.nodes:
        rows = random_rows(drawn, (50, 3), "float32", 0.3)
        rows.values[:] = drawn.standard_normal(rows.values.shape)
        pending.append(push(cluster, node, register(node, "w", (50, 3)), rows))
    cluster.run_until_ended(pending, 60.0)
    results = [one.rows() for one in pending]
    assert len({(one.numbers.tobytes(), one.values.tobytes()) for one in results}) == 1


def traffic(rows_pushed):
    """Return the bytes that two rounds of a large key take, all nodes together."""
    cluster = SimulatedCluster(4, seed=1).join()
    shape = (100_000, 64)
    keys = [register(node, "embedding", shape) for node in cluster.nodes]
    sent = []
    for _ in range(2):
        pending = [
            push(
                cluster,
                node,
                key,
                Rows(np.arange(rows_pushed) * 7 + node.rank, np.ones((rows_pushed, 64), np.float32)),
            )
            for node, key in zip(cluster.nodes, keys, strict=True)
        ]
        cluster.run_until_ended(pending, 60.0)
        assert all(len(one.rows()) == 4 * rows_pushed for one in pending)
        links = [node.process.stack.endpoint.links() for node in cluster.nodes]
        sent.append(
            sum(link["bytes_sent"] for mine in links for (peer, _), link in mine.items() if peer != SCHEDULER)
        )
    return sent[1] - sent[0]


def test_only_the_rows_that_somebody_has_travel():
    one, ten = traffic(100), traffic(1000)
    nothing = traffic(0)
    # Four nodes: three hops up with one to three ranks' rows, three hops down with those of all.
    row = 64 * 4 + 4
    assert 3 * 4 * 100 * row < one - nothing < (3 * 4 + 3 * 3) * 100 * row * 1.1
    assert (ten - nothing) == pytest.approx(10 * (one - nothing), rel=0.05)
    assert nothing < 100_000 * row / 100


def test_a_key_that_is_dense_on_another_rank_is_an_error_that_names_both():
    cluster = SimulatedCluster(2, seed=1).join()
    first = push(cluster, cluster.nodes[0], register(cluster.nodes[0], "w", (4, 2)), None)
    second = cluster.nodes[1].push("w", np.ones((4, 2), np.float32))
    cluster.run_until(lambda: first.ended and second.ended, 60.0, "the end")
    with pytest.raises(KeyMismatch, match=r"as \(4, 2\) float32 row_sparse"):
        first.rows()
