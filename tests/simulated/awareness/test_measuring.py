"""What nodes measure of links whose rates are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.simulated.awareness.reports import Reports, clocks_off_by


@pytest.mark.parametrize("seed", [1, 2])
def test_after_ten_rounds_links_without_caps_are_known(seed):
    reports = Reports("mesh", seed).train(rounds=10, megabytes=4)
    assert len(reports.links) >= 16  # FAPTs that share links
    assert reports.median_error() < 0.05
    assert reports.reported_bytes < 0.005 * reports.bytes
    lines = {line for message in reports.caps.values() for line in (message.egress, message.ingress)}
    assert lines <= {0.0, math.inf}


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


def test_latencies_are_known_without_clocks():
    reports = Reports("mesh", 3, clocks=clocks_off_by(0.05, 50e-6)).train(rounds=5, megabytes=4)
    known = {ends: link.latency for ends, link in reports.links.items() if link.latency >= 0}
    assert len(known) >= 8
    assert all(
        latency == pytest.approx(reports.truth.link(*ends).latency, abs=0.005)
        for ends, latency in known.items()
    )


def test_clocks_that_are_wrong_do_not_harm_the_busy_period_estimator():
    reports = Reports("mesh", 1, clocks=clocks_off_by(0.05, 50e-6)).train(rounds=5, megabytes=4)
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
