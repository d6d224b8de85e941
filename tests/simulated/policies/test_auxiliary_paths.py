"""Auxiliary paths on the simulated cluster: sums stay exact, nothing loops, static networks get no slower."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Delay
from netstorm.lab.testing.strategies import fault_plans, networks
from netstorm.protocol.messages import Part
from netstorm.topology.form import form_policy
from netstorm.topology.network import Rank, generate
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree
from tests.simulated.jobs import examples, jobs, nothing_was_amiss, on_messages, usable


@given(jobs(nodes=(3, 9), policies=(1, 4), detours=True))
@examples(7)
def test_sums_are_right_with_detours_over_any_ranks_by_either_rule(job):
    cluster = job.cluster().join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values())
    job.check(pending)
    nothing_was_amiss(cluster)
    cluster.finish()


@given(st.data(), jobs(nodes=(3, 6), policies=(1, 3), detours=True))
@examples(10)
def test_connections_that_break_lose_nothing_on_auxiliary_paths_and_count_nothing_twice(data, job):
    plan = data.draw(fault_plans(job.nodes, duration_s=max(0.05, job.spread_s), longest_cut_s=4.0))
    cluster = job.cluster(faults=plan).join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values())
    job.check(pending)
    nothing_was_amiss(cluster)
    cluster.finish()


@given(networks(3, 7, changing=True, capped=True, routing=None).map(usable), st.integers(0, 2**32))
@examples(5)
def test_sums_are_right_with_the_detours_that_a_network_gets(network, seed):
    unmeasured = tuple((int(link.source), int(link.target)) for link in network.links)
    policy = form_policy(network, chunk_bytes=2000, auxiliary=True, unmeasured=unmeasured)
    cluster = SimulatedCluster(
        network.size, seed=seed, network=network, policy=policy, chunk_size=500, window_bytes=4000
    )
    for _ in range(2):
        values = [np.arange(4000) % 100 + rank for rank in range(network.size)]
        results = cluster.allreduce("w", values, limit_s=3600)
        assert all((total == sum(values)).all() for total in results)
    nothing_was_amiss(cluster)


def trails(cluster):
    """Take note of where each part on an auxiliary path goes: by what it is, the hosts that get it."""
    found: dict[tuple[object, ...], list[str]] = {}

    def record(_source, target, part):
        if part.is_aux:
            found.setdefault((part.key, part.round, part.chunk, part.phase, part.path), []).append(target)

    on_messages(cluster, Part, record)
    return found


def test_stale_paths_make_no_loop():
    """The paper's Fig. 10: s and t have the new path s-m-t, while m still has the old one, m-s-t.

    If each node went by its own policy, s would give m a chunk for t, and m would give it back.
    """
    s, m, t = map(Rank, range(3))
    to_t = Tree.undirected(t, (t, t, -1))
    old = Policy(version=0, trees=(to_t,), weights=(1,), detours=(always(m, s, t),))
    new = Policy(version=1, trees=(to_t,), weights=(1,), detours=(always(s, m, t),))
    late = [Delay(at=0.5, source=-1, target=m, seconds=2.0)]
    cluster = SimulatedCluster(
        3,
        policy=old,
        faults=late,
        chunk_size=10,
        window_bytes=300,
        aux_rule="queue",
        primary_busy_bound=1,
        auxiliary_queue_length=5,
    ).join()
    seen = trails(cluster)
    for node in cluster.nodes:
        node.register("a", (200,), "float32")
        node.register("b", (200,), "float32")
    cluster.run_for(1.0)
    cluster.install_policy(new)
    cluster.run_for(0.5)  # s and t have it, m has not
    assert [node.machine.counters.snapshot().get("policies", 0) for node in cluster.nodes] == [1, 0, 1]
    pending = [node.push(key, np.full(200, 1.0, np.float32)) for node in cluster.nodes for key in "ab"]
    cluster.run_until_ended(pending, 60)
    pending += [node.push(key, np.full(200, 1.0, np.float32)) for node in cluster.nodes for key in "ab"]
    cluster.run_until_ended(pending, 60)
    assert all((one.result() == 3).all() for one in pending)
    used = Counter(path for *_, path in seen)
    assert used[s, m, t] > 0
    assert used[m, s, t] > 0
    for (*_, path), hosts in seen.items():
        assert hosts == [f"node{rank}" for rank in path[1:]]
    nothing_was_amiss(cluster)


def always(*path):
    """Return a detour that is believed to take no time."""
    return Detour(path=path, links=((1e12, 0.0),) * (len(path) - 1))


def round_s(network, policy, elements=1_000_000):
    """Return the time of the fourth round: in the first ones, nobody knows how fast links are."""
    cluster = SimulatedCluster(network.size, network=network, policy=policy, chunk_size=65_536).join()
    ones = np.ones(elements, np.float32)
    times = []
    for _ in range(4):
        begin = cluster.now
        pending = [node.push("w", ones, in_place=True) for node in cluster.nodes]
        cluster.run_until_ended(pending, 1000)
        assert all((one.result() == network.size).all() for one in pending)
        times.append(max(one.ended_at or 0.0 for one in pending) - begin)
    return times[-1]


@pytest.mark.parametrize("topology", ["fapt", pytest.param("mst", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["internet2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("asymmetric", "cloud"))]
)
def test_detours_make_no_static_network_slower(family, topology):
    network = generate(family, 9, 3)
    policy = form_policy(network, topology, auxiliary=True)
    assert round_s(network, policy) <= 1.03 * round_s(network, msgspec.structs.replace(policy, detours=()))


@pytest.mark.slow
def test_idle_links_make_a_star_faster():
    network = generate("asymmetric", 9, 1)
    policy = form_policy(network, "star", auxiliary=True)
    without = msgspec.structs.replace(policy, detours=())
    assert round_s(network, policy, 4_000_000) < 0.8 * round_s(network, without, 4_000_000)
