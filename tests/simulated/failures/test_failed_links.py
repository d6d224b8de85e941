"""A failed link does not end the job: its traffic takes a detour, and nothing counts twice."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from netstorm.errors import NodeLost, Overloaded
from netstorm.kvstore import operations
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Crash, Cut, Reset
from netstorm.pslite.machine import ForwardedBytes
from netstorm.scheduler.policies import tree_pairs
from netstorm.topology.network import Link, Network, Node, Rank
from tests.simulated.failures.workload import FAST_TIMEOUTS, endless_rounds, failing_links
from tests.simulated.jobs import Job, KeyUse, counted, examples, jobs


def scheduler(cluster):
    return cluster.scheduler.machine


def in_force_uses(cluster, *pairs):
    policy = scheduler(cluster).policy
    return bool(tree_pairs(policy) & set(pairs))


def check_with_failing_links(job):
    cluster = job.cluster(**FAST_TIMEOUTS).join()
    for cut in failing_links(job.seed, job.nodes, job.spread_s + 0.2):
        Cut(
            at=cluster.now + cut.at,
            source=cut.source,
            target=cut.target,
            heal_at=None if cut.heal_at is None else cluster.now + cut.heal_at,
            one_way=cut.one_way,
        ).schedule(cluster.faults)
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)
    job.check(pending)
    for name in ("protocol_violations", "dropped_refused"):
        assert counted(cluster, name) == 0, name
    cluster.finish(120.0)
    return cluster


@given(jobs(nodes=(3, 7), policies=(1, 4)))
@examples(8)
def test_sums_are_exact_whatever_links_die_for_good_or_for_a_while(job):
    check_with_failing_links(job)


@given(jobs(nodes=(3, 7), policies=(1, 4), detours=True))
@examples(4)
def test_sums_are_exact_if_the_links_of_auxiliary_paths_die(job):
    check_with_failing_links(job)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(jobs(nodes=(3, 9), policies=(1, 6)), st.booleans())
@settings(max_examples=250)
def test_sums_are_exact_whatever_links_die_many_seeds(job, detours):
    check_with_failing_links(replace(job, detours=detours))


def test_links_do_die_in_these_tests_and_parts_go_around_them():
    cluster = SimulatedCluster(4, seed=5, chunk_size=20, delay_s=0.01, **FAST_TIMEOUTS).join()
    pending = endless_rounds(cluster)
    Cut(at=cluster.now + 0.1, source=0, target=2).schedule(cluster.faults)
    cluster.run_for(10.0)
    assert counted(cluster, "links_failed") == 2
    assert counted(cluster, "parts_around_failed_links") > 0
    rounds = [len([one for owner, one in pending if owner is node and one.ended]) for node in cluster.nodes]
    assert min(rounds) > 50
    assert not any(node.failure for node in cluster.nodes)


@pytest.mark.parametrize(
    ("topology", "awareness"),
    [("auto", True), ("ring", False)],
)
def test_a_policy_without_the_link_follows_at_once_and_says_why(topology, awareness):
    cluster = SimulatedCluster(
        5, seed=5, chunk_size=50, delay_s=0.01, topology=topology, awareness=awareness, **FAST_TIMEOUTS
    ).join()
    endless_rounds(cluster)
    used = min(tree_pairs(scheduler(cluster).policy))
    Cut(at=cluster.now + 0.1, source=used[0], target=used[1]).schedule(cluster.faults)
    cluster.run_until(lambda: counted(cluster, "links_failed") > 0, 20.0, "a failed link")
    found_at = cluster.now
    cluster.run_until(lambda: not in_force_uses(cluster, used), 10.0, "a policy without the link")
    assert cluster.now - found_at <= 2 * cluster.settings.heartbeat_interval_s + 3.0
    assert f"link {used[0]}→{used[1]} has failed" in scheduler(cluster).policy.reason or (
        f"link {used[1]}→{used[0]} has failed" in scheduler(cluster).policy.reason
    )
    cluster.run_for(5.0)
    assert not any(node.failure for node in cluster.nodes)


def test_a_link_that_is_back_is_used_again():
    cluster = SimulatedCluster(
        3, seed=5, chunk_size=50, delay_s=0.01, topology="star", hub=0, **FAST_TIMEOUTS
    ).join()
    endless_rounds(cluster)
    first = scheduler(cluster).policy
    Cut(at=cluster.now + 0.1, source=0, target=2, heal_at=cluster.now + 20.0).schedule(cluster.faults)
    cluster.run_until(lambda: not in_force_uses(cluster, (0, 2)), 20.0, "a policy without the link")
    assert scheduler(cluster).failed_links
    cluster.run_until(lambda: not scheduler(cluster).failed_links, 30.0, "the links' return")
    cluster.run_for(5.0)
    assert scheduler(cluster).policy.trees == first.trees
    assert "works again" in scheduler(cluster).policy.reason
    before = cluster.traffic(0, 2)
    around = counted(cluster, "parts_around_failed_links")
    cluster.run_for(2.0)
    assert cluster.traffic(0, 2) > before + 1000
    assert counted(cluster, "parts_around_failed_links") == around


def test_a_link_that_fails_before_it_is_ever_used_is_no_other_case():
    cluster = SimulatedCluster(4, seed=2, chunk_size=10, **FAST_TIMEOUTS)
    cluster.faults.cut(0, 2)
    cluster.faults.cut(1, 3)
    values = [np.arange(100) if rank == 0 else np.zeros(100, np.int64) for rank in range(4)]
    results = cluster.allreduce("w", values)
    assert all((total == np.arange(100)).all() for total in results)
    cluster.finish()


def square(missing=()):
    """Return four nodes of which each has links to two others."""
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(4)),
        links=tuple(
            Link(source=Rank(a), target=Rank(b), rate=50e6, latency=0.01)
            for one, other in pairs
            for a, b in ((one, other), (other, one))
            if (a, b) not in missing
        ),
    )


def test_ways_lead_over_links_that_there_are():
    cluster = SimulatedCluster(4, seed=2, network=square(), chunk_size=500, **FAST_TIMEOUTS).join()
    endless_rounds(cluster, 2000)
    Cut(at=cluster.now + 0.5, source=0, target=1).schedule(cluster.faults)
    cluster.run_until(lambda: not in_force_uses(cluster, (0, 1), (1, 0)), 20.0, "a policy without the link")
    cluster.run_for(5.0)
    assert counted(cluster, "parts_around_failed_links") > 0
    assert cluster.traffic(0, 2) == cluster.traffic(1, 3) == 0
    assert not any(node.failure for node in cluster.nodes)


def test_if_the_network_falls_apart_without_the_link_the_job_ends_and_names_it():
    cluster = SimulatedCluster(4, seed=2, network=square(), chunk_size=500, **FAST_TIMEOUTS).join()
    endless_rounds(cluster, 5000)
    Cut(at=cluster.now + 0.5, source=0, target=1).schedule(cluster.faults)
    Cut(at=cluster.now + 10.5, source=0, target=3).schedule(cluster.faults)
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes), 30.0, "NodeLost")
    for node in cluster.nodes:
        assert isinstance(node.failure, NodeLost)
        assert "rank 0 (node0:" in str(node.failure)
        assert "rank 3 (node3:" in str(node.failure)
        assert "there is no way" in str(node.failure)


@pytest.mark.parametrize("silent", [False, True])
def test_a_node_that_dies_is_lost_as_before_also_while_a_link_has_failed(silent):
    cluster = SimulatedCluster(4, seed=2, chunk_size=50, delay_s=0.01, **FAST_TIMEOUTS).join()
    endless_rounds(cluster)
    Cut(at=cluster.now + 0.1, source=0, target=1).schedule(cluster.faults)
    Crash(at=cluster.now + 8.0, rank=3, silent=silent).schedule(cluster.faults)
    cluster.run_for(7.5)
    assert not any(node.failure for node in cluster.nodes)
    living = cluster.nodes[:3]
    cluster.run_until(lambda: all(node.failure for node in living), 10.0, "NodeLost")
    assert all(isinstance(node.failure, NodeLost) and "rank 3 " in str(node.failure) for node in living)


def test_a_node_on_the_way_around_that_loses_its_link_too_finds_another_way():
    cluster = SimulatedCluster(5, seed=7, chunk_size=20, delay_s=0.02, **FAST_TIMEOUTS).join()
    endless_rounds(cluster, 60)
    for number, (source, target) in enumerate([(0, 1), (0, 2), (2, 1), (3, 1), (3, 2)]):
        Cut(at=cluster.now + 0.1 + 1.3 * number, source=source, target=target).schedule(cluster.faults)
    cluster.run_for(20.0)
    assert not any(node.failure for node in cluster.nodes)
    before = len(cluster.nodes[0].pending)
    cluster.run_for(2.0)
    assert len(cluster.nodes[0].pending) > before + 10


def test_an_elastic_job_goes_on_without_a_rank_whose_only_way_led_over_one_that_has_died():
    cluster = SimulatedCluster(
        4,
        seed=2,
        chunk_size=500,
        elastic="1:4",
        heartbeat_interval_s=0.5,
        detect_s=1.0,
        delay_s=0.01,
        **FAST_TIMEOUTS,
    ).join()
    pending = endless_rounds(cluster)
    for other in (1, 2):
        cluster.faults.cut(0, other)
    cluster.run_for(8.0)
    assert counted(cluster, "links_failed") == 4
    assert not any(node.failure for node in cluster.nodes)
    cluster.faults.crash(3)
    cluster.run_for(5.0)
    assert scheduler(cluster).policy.members == (1, 2)
    assert "without that link there is no way" in str(cluster.nodes[0].failure)
    before = len(pending)
    cluster.run_for(2.0)
    assert len(pending) > before + 10


def test_resets_while_a_link_is_down_lose_nothing():
    cluster = SimulatedCluster(4, seed=9, chunk_size=20, delay_s=0.01, **FAST_TIMEOUTS).join()
    pending = endless_rounds(cluster, 100)
    Cut(at=cluster.now + 0.1, source=0, target=1).schedule(cluster.faults)
    for number in range(40):
        source, target = random.Random(number).sample(range(4), 2)
        Reset(at=cluster.now + 0.3 * number, source=source, target=target).schedule(cluster.faults)
    cluster.run_for(13.0)
    for owner, one in pending:
        if one.ended:
            assert (one.result() == 6).all(), owner
    assert not any(node.failure for node in cluster.nodes)


@given(jobs(nodes=(3, 6), policies=(1, 3), detours=True))
@example(  # one relay for all: what it has taken must be acknowledged, or the same comes again and again
    Job(
        nodes=6,
        seed=1278,
        keys=(KeyUse(name="key0", shape=(3,), dtype="float16"),),
        rounds=4,
        chunk_size=1,
        jitter_s=0.0,
        spread_s=0.0,
        policies=1,
        look_aheads=(0, 0, 1, 30, 1000),
        detours=True,
    )
)
@examples(2)
def test_nobody_waits_for_ever_if_hardly_anything_may_be_forwarded(job):
    overloads = []

    class Little(ForwardedBytes):
        def __init__(self, _most):
            super().__init__(4 * 1024)

        def take(self, *arguments):
            try:
                return super().take(*arguments)
            except Overloaded as error:
                overloads.append(error)
                raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "ForwardedBytes", Little)
        try:
            check_with_failing_links(job)
        except NodeLost as error:  # there was no way around the node that had no room
            assert overloads, error
    event(f"overloads: {bool(overloads)}")
