"""Rates of links that were not measured since others have changed."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.awareness.test_collector import M, collector, measure, rates, report


def test_a_fast_link_not_seen_since_the_others_have_changed_is_not_believed_to_be_fast():
    found = collector(4)
    for second in range(4):
        measures = (measure(0, 100 * M), measure(1, 20 * M), measure(2, 30 * M))
        found.record(3, report(*measures), float(second))
    assert rates(found, 4.0)[0, 3] == pytest.approx(100 * M)
    for second in range(20, 24):  # nothing has changed, as far as can be seen
        found.record(3, report(measure(1, 20 * M), measure(2, 30 * M)), float(second))
    assert rates(found, 24.0)[0, 3] == pytest.approx(100 * M)
    for second in range(24, 28):
        found.record(3, report(measure(1, 60 * M), measure(2, 30 * M)), float(second))
    half = rates(found, 28.0)[0, 3]
    assert half == pytest.approx(100 * M - 0.5 * (100 - 30) * M)
    for second in range(28, 32):
        found.record(3, report(measure(1, 60 * M), measure(2, 10 * M)), float(second))
    assert rates(found, 32.0)[0, 3] == pytest.approx(10 * M)
    found.record(3, report(measure(0, 90 * M)), 33.0)
    assert rates(found, 33.0)[0, 3] == pytest.approx(100 * M, rel=0.15)


def test_a_slow_link_not_seen_since_the_others_have_changed_may_be_as_fast_as_they_are():
    found = collector(4)
    for second in range(4):
        found.record(3, report(measure(0, 5 * M), measure(1, 40 * M), measure(2, 30 * M)), float(second))
    assert rates(found, 4.0)[0, 3] == pytest.approx(5 * M)
    for second in range(20, 24):
        found.record(3, report(measure(1, 20 * M), measure(2, 30 * M)), float(second))
    assert rates(found, 24.0)[0, 3] == pytest.approx(5 * M)  # the 25th percentile, as before
    for second in range(24, 28):
        found.record(2, report(measure(0, 50 * M), measure(1, 60 * M), measure(3, 70 * M)), float(second))
    changed, measured = 1, 5
    assert rates(found, 28.0)[0, 3] == pytest.approx((5 + (20 - 5) * changed / measured) * M)
