"""What nodes measure of links whose rates are known, and of clocks that are off and drift."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.process import LocalClock
from netstorm.protocol import messages as m
from netstorm.protocol.frames import open_frames
from netstorm.topology.network import Rank, generate
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree


class Reports:
    """A cluster, and what its nodes have reported last of each link and access line."""

    def __init__(self, family, seed, *, nodes=9, **settings):
        self.truth = generate(family, nodes, seed)
        informed = SimulatedCluster(nodes, network=self.truth)
        watching = {"awareness": True, "update_time_s": 1e6}  # nothing is to follow from what is measured
        self.cluster = SimulatedCluster(
            nodes, network=self.truth, policy=informed.policy, seed=seed, **{**watching, **settings}
        )
        self.links, self.caps = {}, {}
        self.bytes = self.reported_bytes = 0
        others = self.cluster.network.watch
        assert others is not None

        def watch(source, target, header, payload):
            others(source, target, header, payload)
            self.bytes += len(header) + (0 if payload is None else len(payload))
            if target == "scheduler":
                self._report(int(source.removeprefix("node")), header)

        self.cluster.network.watch = watch

    def _report(self, rank, header):
        message = open_frames(header, 1).message
        if isinstance(message, m.Measured):
            self.reported_bytes += len(header)
            for link in message.links:
                self.links[link.source, rank] = link
            self.caps[rank] = message

    def train(self, rounds, megabytes):
        self.cluster.join()
        values = np.ones(megabytes * 250_000, np.float32)
        for _ in range(rounds):
            pending = [node.push("w", values) for node in self.cluster.nodes]
            self.cluster.run_until_ended(pending, 1e4)
        self.cluster.run_for(3.0)
        return self

    def errors(self):
        """Return how far off each link's rate is, as a fraction."""
        return {ends: link.rate / self.truth.link(*ends).rate - 1 for ends, link in self.links.items()}

    def median_error(self):
        return statistics.median(map(abs, self.errors().values()))


def clocks_off_by(seconds, drift):
    """Return clocks of which every second one is wrong."""
    return lambda rank: LocalClock(
        offset_s=1000.0 * rank,
        drift=drift * (rank % 2),
        sync_error_s=seconds * (rank % 2),
        sync_drift=drift * (rank % 2),
    )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_ten_rounds_links_without_caps_are_known(seed):
    reports = Reports("mesh", seed).train(rounds=10, megabytes=4)
    assert len(reports.links) >= 16  # FAPTs that share links
    assert reports.median_error() < 0.05
    assert reports.reported_bytes < 0.005 * reports.bytes
    lines = {line for message in reports.caps.values() for line in (message.egress, message.ingress)}
    assert all(line <= 0.0 or line == math.inf for line in lines)  # no cap, as far as is known


def test_caps_that_bind_are_known_and_rates_behind_them_are_marked_as_lower_bounds():
    reports = Reports("cloud", 2, chunk_size=65_536).train(rounds=6, megabytes=6)
    known = [
        (value, cap)
        for rank, message in reports.caps.items()
        for value, cap in (
            (message.egress, reports.truth.nodes[rank].egress),
            (message.ingress, reports.truth.nodes[rank].ingress),
        )
        if 0.0 < value < math.inf
    ]
    assert known
    assert all(value == pytest.approx(cap, rel=0.15) for value, cap in known)
    far_off = [reports.links[ends] for ends, error in reports.errors().items() if error < -0.3]
    assert far_off
    assert sum(link.shared > 0.5 for link in far_off) >= 0.8 * len(far_off)


def test_latencies_and_rates_are_known_with_clocks_that_are_wrong():
    reports = Reports("mesh", 1, clocks=clocks_off_by(0.05, 50e-6)).train(rounds=5, megabytes=4)
    known = {ends: link.latency for ends, link in reports.links.items() if link.latency >= 0}
    assert len(known) >= 8
    assert all(
        latency == pytest.approx(reports.truth.link(*ends).latency, abs=0.005)
        for ends, latency in known.items()
    )
    assert reports.median_error() < 0.05


def test_clocks_that_are_wrong_harm_the_papers_estimator():
    reports = Reports("mesh", 1, clocks=clocks_off_by(0.05, 50e-6), estimator="paper").train(5, 4)
    assert reports.median_error() > 0.3


def test_nothing_is_measured_without_awareness():
    reports = Reports("mesh", 1, nodes=3, awareness=False).train(rounds=2, megabytes=4)
    assert reports.bytes > 0
    assert not reports.links


def test_chunks_below_the_probe_size_measure_nothing():
    small = {"nodes": 3, "chunk_size": 16_384, "largest_chunk": 16_384, "probe_chunk_num": 1}
    whole = Reports("mesh", 1, probe_chunk_size=65_536, **small)
    whole.cluster.join()
    a_chunk, less = np.ones(16_384, np.float32), np.ones(16_000, np.float32)
    for values, wanted in ((less, False), (a_chunk, True)):
        for _ in range(4):
            name = f"{values.size}"
            pending = [node.push(name, values) for _ in range(8) for node in whole.cluster.nodes]
            whole.cluster.run_until_ended(pending, 1e4)
        whole.cluster.run_for(3.0)
        assert bool(whole.links) == wanted


def test_an_estimate_waits_for_as_many_chunks_as_are_asked_for():
    assert not Reports("mesh", 1, nodes=3, probe_chunk_num=1000).train(2, 4).links


# ----------------------------------------------------------- clocks that are off by 50 ms and drift by 50 ppm

NODES = 9
CHAIN = Tree.undirected(Rank(0), (-1, *range(NODES - 1)))
LOW = Tree.undirected(Rank(0), (-1, 0, 0, 1, 1, 2, 2, 3, 3))
LEVELS = [1, 2, 2, 3, 3, 3, 3, 4, 4]


def wrong(rank):
    """Return a clock that is off, to either side; the scheduler's is right."""
    if rank < 0:
        return LocalClock()
    side = 1 if rank % 2 else -1
    return LocalClock(
        offset_s=1000.0 * rank, drift=50e-6 * side, sync_error_s=0.05 * side, sync_drift=50e-6 * side
    )


def errors(cluster):
    """Return by how much each node's idea of the cluster clock is off, in s."""
    return [node.process.synced_clock.cluster() - cluster.now for node in cluster.nodes]


def synchronised(source, tree=LOW, **options):
    policy = Policy(version=0, trees=(tree,), weights=(1,))
    cluster = SimulatedCluster(
        NODES, policy=policy, clocks=wrong, sync_clocks=True, clock_source=source, seed=2, **options
    ).join()
    cluster.run_for(300.0)
    return cluster


@pytest.mark.parametrize("source", ["scheduler", "trees"])
def test_clocks_that_are_off_and_drift_are_found_out(source):
    cluster = synchronised(source, delay_s=0.02)
    assert max(map(abs, errors(cluster))) < 1e-4
    views = [node.process.synced_clock for node in cluster.nodes]
    assert [view.sync.hops for view in views] == ([1] * NODES if source == "scheduler" else LEVELS)
    for rank, view in enumerate(views):
        assert view.sync.drift == pytest.approx(50e-6 if rank % 2 == 0 else -50e-6, rel=0.1)


@pytest.mark.parametrize("source", ["scheduler", "trees"])
def test_no_clock_is_off_by_more_than_it_says_whatever_queues_are_on_the_way(source):
    cluster = synchronised(source, delay_s=0.02, jitter_s=0.02)
    for node, error in zip(cluster.nodes, errors(cluster), strict=True):
        assert abs(error) < node.process.synced_clock.error_bound()


def test_along_a_chain_errors_add_up():
    last = {
        source: max(map(abs, errors(synchronised(source, CHAIN, delay_s=0.02, jitter_s=0.02))))
        for source in ("scheduler", "trees")
    }
    assert last["scheduler"] < last["trees"]


def test_the_scheduler_is_asked_where_parents_do_not_answer():
    cluster = synchronised("trees", delay_s=0.02)
    cluster.faults.crash(0, silent=True)
    datagrams = cluster.nodes[1].process.synced_clock._datagrams
    datagrams.serve("node0", lambda _: None)
    cluster.run_for(300.0)
    assert cluster.nodes[1].process.synced_clock.sync.hops == 1
    assert abs(errors(cluster)[1]) < 1e-4


@pytest.mark.slow
def test_what_estimators_make_of_clocks_with_and_without_synchronisation():
    def error(estimator, **options):
        return Reports("mesh", 1, clocks=wrong, estimator=estimator, **options).train(5, 4).median_error()

    assert error("busy") < 0.01
    assert error("busy", sync_clocks=True) < 0.01
    assert error("paper", sync_clocks=True) == pytest.approx(
        statistics.fmean(
            [Reports("mesh", 1, clocks=lambda _: LocalClock(), estimator="paper").train(5, 4).median_error()]
        ),
        abs=0.02,
    )
