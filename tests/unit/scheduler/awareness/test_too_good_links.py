"""Links that are too good to be true: a member that reports them, to attract trees, gets no further."""

from __future__ import annotations

import pytest

from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.scheduler.awareness import Collector
from netstorm.topology.network import Network, Rank


def both_ends(said: float, seen: float, **more) -> Collector:
    """Rank 0 says what its link to rank 1 carries, and rank 1 what it sees of it."""
    known = Collector(Network.uniform(3), known=False)
    for second in range(5):
        out = LinkMeasure(source=1, rate=said, error=0.02, delivered=True, **more)
        known.record(0, Measured(links=(), outgoing=(out,)), float(second))
        known.record(1, Measured(links=(LinkMeasure(source=0, rate=seen, error=0.02),)), second + 0.5)
    return known


def rate_of(known: Collector, source: int, target: int, now: float = 5.0) -> float:
    return known.estimate(now).network.link(Rank(source), Rank(target)).rate


def test_a_member_that_says_its_links_are_fast_is_believed_five_times_what_receivers_see():
    assert rate_of(both_ends(1e13, 1e7), 0, 1) == pytest.approx(5e7)
    assert rate_of(both_ends(3e7, 1e7), 0, 1) == pytest.approx(3e7), "a kernel is right at once"
    assert rate_of(both_ends(1e6, 1e7), 0, 1) == pytest.approx(1e6)


def test_a_member_that_says_it_receives_fast_is_believed_five_times_what_senders_see():
    known = both_ends(1e7, 1e7)
    for second in range(5, 20):
        known.record(1, Measured(links=(LinkMeasure(source=0, rate=1e13, error=0.02),)), float(second))
    assert rate_of(known, 0, 1, 20.0) == pytest.approx(5e7)


def test_what_the_other_end_saw_long_ago_or_beside_others_bounds_less():
    assert rate_of(both_ends(1e13, 1e7), 0, 1, now=304.5) == pytest.approx(2.5e8)
    known = Collector(Network.uniform(3), known=False)
    for second in range(5):
        out = LinkMeasure(source=1, rate=1e8, error=0.02, delivered=True)
        known.record(0, Measured(links=(), outgoing=(out,)), float(second))
        seen = LinkMeasure(source=0, rate=1e7, error=0.02, shared=1.0)
        known.record(1, Measured(links=(seen,)), second + 0.5)
    assert rate_of(known, 0, 1) == pytest.approx(1e8), "it may be one of ten into that rank"


def test_a_member_that_says_it_is_near_is_believed_a_quarter_of_the_others_round_trip():
    known = both_ends(1e7, 1e7, trip=1e-6)
    out = LinkMeasure(source=0, rate=1e7, error=0.02, delivered=True, trip=0.2)
    known.record(1, Measured(links=(), outgoing=(out,)), 5.0)
    link = known.estimate(6.0).network.link(Rank(0), Rank(1))
    assert link.latency == pytest.approx(0.2 / 4 / 2)
