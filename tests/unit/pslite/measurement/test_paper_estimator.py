"""The paper's estimator, on arrivals whose link is known."""

from __future__ import annotations

import pytest

from netstorm.pslite.rates import PaperEstimator
from tests.unit.pslite.measurement.arrivals import CHUNK, arrivals, sure


def test_the_paper_estimator_is_right_for_lone_chunks_and_synchronised_clocks():
    paper = PaperEstimator(4)
    for sent, arrived in arrivals([0.0, 1.0, 2.0, 3.0], 20e6, 0.0):
        paper.add_chunk(CHUNK, sent, arrived)
    assert sure(paper.estimate()).rate == pytest.approx(20e6)
    assert sure(paper.estimate()).chunks == 4


def test_the_paper_estimator_waits_for_enough_chunks():
    paper = PaperEstimator(4)
    for sent, arrived in arrivals([0.0, 1.0, 2.0], 20e6, 0.0):
        paper.add_chunk(CHUNK, sent, arrived)
    assert paper.estimate() is None


def test_the_paper_estimator_charges_latency_and_queue_to_the_link():
    paper = PaperEstimator(4)
    for sent, arrived in arrivals([0.0] * 4, 20e6, 0.03):
        paper.add_chunk(CHUNK, sent, arrived)
    expected = sum(CHUNK / (0.03 + (place + 1) * CHUNK / 20e6) for place in range(4)) / 4
    assert sure(paper.estimate()).rate == pytest.approx(expected)
    assert sure(paper.estimate()).rate < 0.5 * 20e6


def test_chunks_that_arrive_before_they_were_sent_are_counted_and_left_out():
    paper = PaperEstimator(1)
    paper.add_chunk(CHUNK, 10.0, 9.9)
    assert paper.estimate() is None
    assert paper.impossible == 1
