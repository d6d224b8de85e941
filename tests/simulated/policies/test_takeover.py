"""Rounds under way move to a policy that takes over: they end sooner, and their sums stay right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.process import host_of
from netstorm.protocol.frames import SCHEDULER
from netstorm.protocol.messages import Moved, Part
from netstorm.topology.network import Change, Link, Network, Rank, Routing
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.jobs import counted, on_messages

VALUES = 100_000
CHUNK = 10_000
FAST, SLOW = 10e6, 0.2e6
CHANGE_AT = 2.0
OVER_0 = Tree.undirected(Rank(0), (-1, 0, 0, 0))
"""A star, whose links to rank 3 become slow."""
AROUND = Tree.undirected(Rank(1), (1, -1, 1, 2))
"""Without that link."""


def changing_job(*, slow=((0, 3), (3, 0)), before_s=0.0, policy=None, **settings):
    """Return a job of four nodes, shortly before the links between 0 and 3 become 50 times as slow."""
    links = [(a, b) for a in range(4) for b in range(4) if a != b]
    network = Network(
        nodes=Network.uniform(4).nodes,
        links=tuple(Link(source=Rank(a), target=Rank(b), rate=FAST, latency=0.01) for a, b in links),
        routing=Routing.OVERLAY,
    )
    changes = tuple(Change(at=CHANGE_AT, source=Rank(a), target=Rank(b), rate=SLOW) for a, b in slow)
    cluster = SimulatedCluster(
        4,
        network=replace(network, changes=changes),
        policy=policy or Policy(version=0, trees=(OVER_0,), weights=(1,)),
        chunk_size=CHUNK,
        **settings,
    ).join()
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    cluster.run_until_ended(push(cluster), 60)
    assert cluster.now < CHANGE_AT
    cluster.run_for(CHANGE_AT - before_s - cluster.now)
    return cluster


def push(cluster, nodes=None):
    return [
        node.push("a", np.arange(VALUES, dtype=np.float32) % 7 + node.rank) for node in nodes or cluster.nodes
    ]


def check(pending):
    right = 4 * (np.arange(VALUES, dtype=np.float32) % 7) + 6
    assert all(one.result().tobytes() == right.tobytes() for one in pending)


def seconds(*, takes_over, after=1.0):
    """Return what a round takes if another policy comes `after` its start; and its cluster."""
    cluster = changing_job()
    begun = cluster.now
    pending = push(cluster)
    cluster.run_for(after)
    cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=takes_over))
    cluster.run_until_ended(pending, 120)
    check(pending)
    return cluster.now - begun, cluster


def test_a_round_does_not_wait_for_a_link_that_the_new_policy_leaves_out():
    stays, cluster = seconds(takes_over=False)
    assert counted(cluster, "chunks_moved") == 0
    moves, cluster = seconds(takes_over=True)
    assert counted(cluster, "chunks_moved") > 0
    assert stays > 10.0  # 400 kB at 0.2 Mbit/s
    assert moves < 3.0


def test_results_that_wait_for_a_slow_link_take_the_new_policys_trees():
    took = {}
    for takes_over in (False, True):
        cluster = changing_job(slow=((0, 3),), before_s=0.2, window_bytes=50_000)
        pending = push(cluster)
        cluster.run_until(lambda cluster=cluster: left(cluster) == 0, 60, "all sums")
        begun = cluster.now
        cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=takes_over))
        cluster.run_until_ended(pending, 60)
        check(pending)
        took[takes_over] = cluster.now - begun
        assert (counted(cluster, "results_around") > 0) == takes_over
        assert counted(cluster, "chunks_moved") == 0
    assert took[True] < took[False] / 2


def test_results_that_wait_for_a_way_along_one_policys_trees_leave_it_for_the_next_policys():
    # 0→1→2→3, and then 0→2→1→3. The receiver knows no 0→2→3, and would wait for a policy that has it.
    chains = [Tree.undirected(Rank(0), parents) for parents in ((-1, 0, 1, 2), (-1, 2, 0, 1))]
    cluster = changing_job(slow=((0, 3), (0, 1)), before_s=0.2, window_bytes=50_000)
    pending = push(cluster)
    cluster.run_until(lambda: left(cluster) == 0, 60, "all sums")
    for version, chain in enumerate(chains, start=1):
        cluster.install_policy(Policy(version=version, trees=(chain,), weights=(1,), takes_over=True))
        cluster.run_for(0.1)
    cluster.run_until_ended(pending, 60)
    check(pending)
    assert counted(cluster, "results_around") > 0
    assert counted(cluster, "messages_held") == 0


def test_a_root_keeps_the_few_chunks_that_are_left():
    cluster = changing_job()
    pending = push(cluster)
    cluster.run_until(lambda: left(cluster) == 1, 60, "all sums but one")
    cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True))
    cluster.run_until_ended(pending, 60)
    check(pending)
    assert counted(cluster, "chunks_moved") == 0


def left(cluster):
    rounds = cluster.nodes[0].machine.joined.aggregation.rounds.values()
    return sum(round.results.count(False) for round in rounds)


OVER_2 = Tree.undirected(Rank(2), (2, 2, -1, 2))
"""A star without that link, too."""


@pytest.mark.parametrize(
    ("first", "slow", "given_by"),
    [
        ((0, 1, 2), (), {0, 2}),
        ((0, 1, 2), ((3, 0), (0, 3)), {0}),
        ((0, 1, 2), ((3, 2),), {2}),
        ((0, 2), ((1, 3),), set()),
        ((2,), ((3, 0),), {0, 2}),  # of nobody else anything has come to rank 2
        ((0, 1), ((1, 0), (0, 1)), set()),  # what rank 1 has to say is there
        ((0, 1), ((1, 0), (2, 0)), {0}),  # and rank 2's is not
    ],
)
def test_what_is_under_way_stays_if_it_lacks_nothing_from_behind_a_slow_link(first, slow, given_by):
    cluster = changing_job(policy=Policy(version=0, trees=(OVER_0, OVER_2), weights=(1, 1)))
    policy = Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True, slow=slow)
    assert given(cluster, policy, first) == {host_of(rank) for rank in given_by}


def given(cluster, policy, first):
    """Return which roots give chunks to a policy that comes when only the first ranks have begun a round."""
    pending = push(cluster, [cluster.nodes[rank] for rank in first])
    cluster.run_for(0.9)
    roots = set()
    on_messages(cluster, Moved, lambda source, *_: roots.add(source))
    cluster.install_policy(policy)
    cluster.run_for(0.1)
    pending += push(cluster, [node for node in cluster.nodes if node.rank not in first])
    cluster.run_until_ended(pending, 60)
    check(pending)
    return roots - {host_of(SCHEDULER)}


@pytest.mark.parametrize(("first", "given_by"), [((0, 1, 2), set()), ((2,), {2}), ((0, 3), {0})])
@pytest.mark.parametrize("slow", [(), ((3, 2), (3, 0), (1, 0))])
def test_only_what_has_not_begun_moves_if_the_policy_says_so(first, given_by, slow):
    cluster = changing_job(policy=Policy(version=0, trees=(OVER_0, OVER_2), weights=(1, 1)))
    policy = Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True, slow=slow, keeps_begun=True)
    assert given(cluster, policy, first) == {host_of(rank) for rank in given_by}


def test_results_of_what_stays_go_around_a_slow_link():
    cluster = changing_job(slow=((0, 3),))
    pending = push(cluster, cluster.nodes[:3])
    cluster.run_for(0.5)
    cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True, slow=((0, 3),)))
    cluster.run_for(0.1)
    begun = cluster.now
    pending += push(cluster, cluster.nodes[3:])
    cluster.run_until_ended(pending, 60)
    check(pending)
    assert counted(cluster, "chunks_moved") == 0
    assert counted(cluster, "results_around") == VALUES // CHUNK
    assert cluster.now - begun < 3.0  # 400 kB at 0.2 Mbit/s would take 16


def test_a_rank_that_begins_late_begins_under_the_policy_that_has_taken_over():
    cluster = changing_job()
    late = cluster.nodes[3]
    pending = push(cluster, cluster.nodes[:3])
    cluster.run_for(0.5)
    cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True))
    cluster.run_for(0.5)
    pending += push(cluster, [late])
    begun = cluster.now
    cluster.run_until_ended(pending, 60)
    check(pending)
    assert cluster.now - begun < 2.0


@pytest.mark.parametrize("swallowed", ["to the scheduler", "from the scheduler"])
def test_a_scheduler_that_ends_before_all_know_what_has_moved_is_told_again(swallowed):
    cluster = changing_job(
        keep_log=True, link_timeout_s=2.0, heartbeat_timeout_s=6.0, scheduler_timeout_s=60.0
    )
    pending = push(cluster)
    cluster.run_for(0.3)
    cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True))
    seen: list[Moved] = []

    def end(source, target, message):
        if not seen and (target == "scheduler") == (swallowed[0] == "t"):
            seen.append(message)
            cluster.at(cluster.now, lambda: cluster.faults.crash(SCHEDULER))
            cluster.at(cluster.now + 0.5, lambda: cluster.start(SCHEDULER))

    on_messages(cluster, Moved, end)
    cluster.run_until_ended(pending, 120)
    assert seen
    check(pending)
    again = push(cluster)
    cluster.run_until_ended(again, 60)
    check(again)


def test_later_policies_take_over_what_has_moved_already():
    cluster = changing_job()
    pending = push(cluster)
    versions = set()
    on_messages(cluster, Part, lambda _, __, part: versions.add(part.version))
    for version, tree in ((1, OVER_0), (2, AROUND), (3, OVER_0), (4, AROUND)):
        cluster.run_for(0.15)
        cluster.install_policy(Policy(version=version, trees=(tree,), weights=(1,), takes_over=True))
    cluster.run_until_ended(pending, 60)
    check(pending)
    assert versions == {0, 1, 2, 3, 4}


def test_a_policy_that_chunks_have_moved_to_is_kept_while_their_round_is_open():
    cluster = changing_job()

    def kept():
        return {policy.version for policy in cluster.scheduler.machine.job.policies()}

    pending = push(cluster)
    cluster.run_for(0.5)
    cluster.install_policy(Policy(version=1, trees=(AROUND,), weights=(1,), takes_over=True))
    cluster.run_for(0.1)
    assert counted(cluster, "chunks_moved") > 0
    for version in range(2, 20):
        cluster.install_policy(Policy(version=version, trees=(AROUND,), weights=(1,)))
    assert 1 in kept()
    cluster.run_until_ended(pending, 60)
    check(pending)
    for version in range(20, 24):
        cluster.run_until_ended(push(cluster), 60)
        cluster.install_policy(Policy(version=version, trees=(AROUND,), weights=(1,)))
    assert 1 not in kept()
