"""Rounds end without late contributions: within the bound, the same at all ranks, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import WaitTimeout
from netstorm.kvstore.calls import TensorExchange
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.bounded_loss import MOST_MISSED, BoundedLoss, EndedChunks, MissedRounds
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.codecs import Element, Reduction
from netstorm.protocol.frames import ranks_in
from netstorm.protocol.messages import LossTerms
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.bounded_loss.lossy_job import run

STAR = Tree.undirected(Rank(0), (-1, 0, 0, 0))
CHAIN = Tree.undirected(Rank(0), (-1, 0, 1, 2))
VALUES, CHUNK = 40_000, 4000
TERMS = LossTerms(bound=0.3, deadline_s=0.2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("more", [{}, {"policies": 3}, {"crashes": 1, "policies": 1}], ids=str)
def test_all_sums_are_exact_and_nothing_is_lost_while_policies_change_or_nodes_leave(seed, more):
    assert run(100 * len(more) + seed, **more).results


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_so_it_is_in_many_jobs(seed):
    run(seed, policies=seed % 3, crashes=int(seed % 4 == 3), steps=20)


def cluster_of(tree, *, slow=(), rate=10e6, slow_rate=0.1e6):
    """Return a job of four nodes, some of whose links are slow."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    links = tuple(
        Link(source=Rank(a), target=Rank(b), rate=slow_rate if (a, b) in slow else rate, latency=0.005)
        for a, b in pairs
    )
    return SimulatedCluster(
        4,
        network=Network(nodes=Network.uniform(4).nodes, links=links, routing=Routing.OVERLAY),
        policy=Policy(version=0, trees=(tree,), weights=(1,)),
        chunk_size=CHUNK,
        loss_bound=TERMS.bound,
    ).join()


def push(cluster, kept, terms, ranks=range(4)):
    return [cluster.nodes[rank].push("a", kept[rank], loss=terms) for rank in ranks]


def gradients(step=1):
    return [np.full(VALUES, rank + step, np.float32) for rank in range(4)]


def contributors(cluster, rank, number=-1):
    return cluster.nodes[rank].operations[number].contributors


def named(cluster, rank, number=-1):
    """Return the ranks that are in each chunk of a result."""
    found = {}
    for bits, chunks in contributors(cluster, rank, number).items():
        found.update(dict.fromkeys(ranks_in(chunks), ranks_in(bits)))
    return [found[chunk] for chunk in sorted(found)]


def seconds(terms, *, tree=STAR, slow=((3, 0),), steps=2):
    """Return what the last step takes, and the job."""
    cluster = cluster_of(tree, slow=slow)
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    kept = [np.zeros(VALUES, np.float32) for _ in range(4)]
    begun, pending = 0.0, []
    for _ in range(steps):
        for rank, gradient in enumerate(gradients()):
            kept[rank] += gradient
        begun = cluster.now
        pending = push(cluster, kept, terms)
        cluster.run_until_ended(pending, 300)
    assert len({one.result().tobytes() for one in pending}) == 1
    return max(one.ended_at for one in pending) - begun, cluster, kept


def test_a_step_goes_on_without_what_is_behind_a_slow_link():
    reliable, _, _ = seconds(None)
    bounded, cluster, kept = seconds(TERMS)
    assert reliable > 10  # 160 kB at 0.1 Mbit/s
    assert bounded < 1  # what was late in the step before has been taken back, and does not count again
    assert {3} == {rank for chunk in named(cluster, 0) for rank in set(range(4)) - set(chunk)}
    late = [chunk for chunk, ranks in enumerate(named(cluster, 0)) if 3 not in ranks]
    for chunk in late:  # the gradients of the step before may be in it, too
        assert (kept[3][chunk * CHUNK : (chunk + 1) * CHUNK] >= 4).all()


def test_a_step_waits_if_more_is_late_than_the_bound_allows():
    took, cluster, kept = seconds(LossTerms(bound=0.05, deadline_s=0.2), steps=1)
    late = sum(chunk == (0, 1, 2) for chunk in named(cluster, 0))
    assert took > 5
    assert late == 2  # of ten chunks; a late contribution counts as 2, the mean of 1, 2 and 3, of 8
    assert not kept[0].any()


def test_inner_nodes_pass_on_what_they_have_and_then_what_comes_late():
    reliable, _, _ = seconds(None, tree=CHAIN, slow=((3, 2),))
    assert reliable > 10
    took, cluster, _ = seconds(LossTerms(bound=0.6, deadline_s=0.2), tree=CHAIN, slow=((3, 2),))
    counters = [node.machine.counters.snapshot() for node in cluster.nodes]
    assert took < 3
    assert counters[2]["sums_passed_on"]
    assert any(3 not in chunk for chunk in named(cluster, 1))


def test_nothing_is_lost_while_nothing_is_late():
    _, cluster, kept = seconds(LossTerms(bound=0.6, deadline_s=5.0), slow=())
    assert set(contributors(cluster, 2)) == {15}
    assert not any(one.any() for one in kept)


def test_a_rank_that_computes_for_long_is_waited_for_after_some_rounds_without_it():
    terms = LossTerms(bound=0.9, deadline_s=1.0)
    cluster = cluster_of(STAR)
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    cluster.run_until_ended(push(cluster, gradients(), terms), 60)
    without = []
    for _ in range(MOST_MISSED):
        without.append(push(cluster, gradients(), terms, ranks=(0, 1, 2)))
        cluster.run_until_ended(without[-1], 5)
        assert all(chunk == (0, 1, 2) for chunk in named(cluster, 1))
    last = push(cluster, gradients(), terms, ranks=(0, 1, 2))
    cluster.run_for(20)
    assert not any(one.ended for one in last)
    mine = np.zeros(VALUES, np.float32)
    for pending in without:
        mine += 4
        late = cluster.nodes[3].push("a", mine, loss=terms)
        cluster.run_until_ended([late], 5)
        assert late.result().tobytes() == pending[0].result().tobytes()  # what the others have had
    assert (mine == 4 * MOST_MISSED).all()  # and it has kept its own
    mine += 4
    cluster.run_until_ended([*last, cluster.nodes[3].push("a", mine, loss=terms)], 5)
    assert set(last[0].result()) == {1 + 2 + 3 + 4 * (MOST_MISSED + 1)}


def test_important_chunks_are_waited_for():
    terms = LossTerms(bound=0.9, deadline_s=0.2, important=0.2)
    cluster = cluster_of(STAR, slow=((3, 0),))
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    kept = [np.zeros(VALUES, np.float32) for _ in range(4)]
    for _ in range(3):
        for rank in range(4):
            kept[rank] += 0.001
            kept[rank][7 * CHUNK : 9 * CHUNK] += 100
        pending = push(cluster, kept, terms)
        cluster.run_until_ended(pending, 300)
    everywhere = named(cluster, 2)
    assert everywhere[7] == everywhere[8] == (0, 1, 2, 3)
    assert sum(3 not in chunk for chunk in everywhere) > 4


def test_so_it_is_in_collective_calls():
    cluster = cluster_of(STAR, slow=((3, 0),))
    groups = [node.group("world", (0, 1, 2, 3)) for node in cluster.nodes]
    kept = [np.zeros(VALUES, np.float32) for _ in range(4)]
    begun = 0.0
    calls: list[Any] = []
    for _ in range(2):
        calls = []
        for rank, group in enumerate(groups):
            kept[rank] += rank + 1
            exchange = TensorExchange(
                text="sum",
                reduction=Reduction.SUM,
                element=Element.FLOAT32,
                segment_bytes=VALUES * 4,
                source=(kept[rank],),
                destination=(np.empty(VALUES, np.float32),),
                loss=TERMS,
            )
            calls.append(cluster.nodes[rank].call_operation(group, exchange))
        begun = cluster.now
        cluster.run_until_ended([pending for pending, _ in calls], 300)
    assert cluster.now - begun < 7
    assert len({pending.result().tobytes() for pending, _ in calls}) == 1
    assert any(not bits >> 3 & 1 for bits in calls[0][1].contributors)
    assert not kept[0].any()
    assert kept[3].any()


# ------------------------------------------------------------------------------------------------- mutations


def end_whatever_is_missing(monkeypatch):
    monkeypatch.setattr(EndedChunks, "share", property(lambda _: 0.0))


def keep_what_was_counted(monkeypatch):
    monkeypatch.setattr("netstorm.kvstore.operations.Operation.record_counted", lambda *_: None)


def pass_on_the_same_twice(monkeypatch):
    incomplete = BoundedLoss.incomplete

    def wrong(self, round, chunk):
        total = round.sums[chunk]
        incomplete(self, round, chunk)
        if round.sums[chunk] is None:
            round.sums[chunk] = total

    monkeypatch.setattr(BoundedLoss, "incomplete", wrong)


def send_a_result_with_all_names(monkeypatch):
    send = Aggregation.send_down

    def wrong(self, round, chunk, payload, *, contributors, **more):
        send(self, round, chunk, payload, contributors=round.plan_of(chunk).everybody, **more)

    monkeypatch.setattr(Aggregation, "send_down", wrong)


def never_end(monkeypatch):
    monkeypatch.setattr(BoundedLoss, "_try_end", lambda *_: None)


def leave_slow_programs_behind(monkeypatch):
    monkeypatch.setattr(MissedRounds, "record", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        end_whatever_is_missing,
        keep_what_was_counted,
        pass_on_the_same_twice,
        send_a_result_with_all_names,
    ],
)
def test_the_checks_notice_wrong_nodes(mutation, monkeypatch):
    mutation(monkeypatch)
    assert fails()


def fails():
    """Return whether some job fails its checks."""
    for seed in (8, 12, 15, 18, 21, 24, 27):
        try:
            run(seed, policies=seed % 2)
        except (AssertionError, WaitTimeout):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "test"),
    [
        (never_end, test_a_step_goes_on_without_what_is_behind_a_slow_link),
        (
            leave_slow_programs_behind,
            test_a_rank_that_computes_for_long_is_waited_for_after_some_rounds_without_it,
        ),
    ],
)
def test_the_tests_above_notice_wrong_nodes(mutation, test, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test()
