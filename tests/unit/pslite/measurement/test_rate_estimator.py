"""What the default estimator makes of arrivals whose link is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.pslite.rates import BusyLink, RateEstimator
from tests.unit.pslite.measurement.arrivals import CHUNK, arrivals, sure


def measured(times, transit=None):
    """Return the estimate of chunks of which there are enough."""
    return sure(busy_estimate(times, transit))


def busy_estimate(times, transit=None):
    link, estimator = BusyLink(), RateEstimator()
    if transit is not None:
        link.add_small_message(-1.0, transit - 1.0)
    for sent, arrived in times:
        link.add_chunk(CHUNK, sent, arrived)
    estimator.add_periods(link.take_until(float("inf")))
    return estimator.estimate(4, independent=True)


@given(
    rate=st.floats(1e6, 1e9),
    latency=st.floats(0.0, 0.2),
    clock=st.floats(-1e5, 1e5),
    burst=st.integers(6, 20),
)
def test_back_to_back_chunks_measure_a_link_whatever_the_clocks(rate, latency, clock, burst):
    estimate = measured(arrivals([0.0] * burst, rate, latency, clock=clock))
    assert estimate.rate == pytest.approx(rate, rel=0.01)


@given(
    rate=st.floats(1e7, 1e8),
    latency=st.floats(0.0, 0.2),
    clock=st.floats(-100, 100),
    gaps=st.lists(st.floats(0.0, 1.0), min_size=5, max_size=15),
)
def test_pauses_of_the_sender_are_not_the_links(rate, latency, clock, gaps):
    sent = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    estimate = measured(arrivals(sent, rate, latency, clock=clock), transit=latency + clock)
    assert estimate.rate == pytest.approx(rate, rel=0.01)


def test_lone_chunks_say_nothing_before_the_latency_is_known():
    times = arrivals([0.0, 1.0, 2.0, 3.0, 4.0], 1e8, 0.05)
    assert busy_estimate(times) is None
    assert measured(times, transit=0.05).rate == pytest.approx(1e8, rel=0.01)


@given(seed=st.integers(0, 1000), rate=st.floats(1e7, 2e8))
def test_batches_do_not_fool_the_busy_period_estimator(seed, rate):
    chance = random.Random(seed)
    times = []
    batch, ready = chance.randint(1, 5), []
    for sent, arrived in arrivals([0.0] * 200, rate, 0.03):
        ready.append(sent)
        if len(ready) == batch:  # the reader looks only now
            times += [(one, arrived) for one in ready]
            batch, ready = chance.randint(1, 5), []
    estimate = measured(times)
    assert estimate.rate == pytest.approx(rate, rel=0.1)


def test_a_new_rate_counts_more_than_the_old_one():
    times = arrivals([0.0] * 100, 50e6, 0.02)
    moved = times[-1][1] + 0.1
    times += [(sent + moved, arrived + moved) for sent, arrived in arrivals([0.0] * 200, 100e6, 0.02)]
    assert measured(times).rate > 0.9 * 100e6


def test_even_samples_have_a_small_error_and_uneven_ones_a_large_one():
    even = measured(arrivals([0.0] * 50, 20e6, 0.02))
    chance = random.Random(1)
    free, times = 0.0, []
    for _ in range(50):
        free += CHUNK / (20e6 * chance.uniform(0.5, 1.5))
        times.append((0.0, free))
    uneven = measured(times)
    assert even.error <= 0.011
    assert 0.05 < uneven.error < 0.3


def in_turns(link):
    """Return periods of a link that does 20 Mbit/s alone and 16 in company, by turns."""
    periods, now = [], 0.0
    for turn in range(12):
        rate = 16e6 if turn % 2 else 20e6
        for _ in range(6):
            now += CHUNK / rate
            link.add_chunk(CHUNK, 0.0, now)
        for period in link.take_until(float("inf")):
            period.shared_s = period.duration if turn % 2 else 0.0
            periods.append(period)
    return periods


def test_times_in_which_others_were_busy_are_left_out_if_there_are_others():
    estimator = RateEstimator()
    estimator.add_periods(in_turns(BusyLink()))
    assert sure(estimator.estimate(4, independent=False)).rate == pytest.approx(20e6, rel=0.01)
    assert sure(estimator.estimate(4, independent=False)).shared == 0.0


def test_a_rate_that_has_changed_is_known_after_a_few_chunks():
    link, estimator = BusyLink(), RateEstimator()
    for sent, arrived in arrivals([0.0] * 200, 20e6, 0.0):
        link.add_chunk(CHUNK, sent, arrived)
    free = link.arrived
    estimator.add_periods(link.take_until(float("inf")))
    for _ in range(8):
        free += CHUNK / 8e6
        link.add_chunk(CHUNK, 0.0, free)
    estimator.add_periods(link.take_until(float("inf")))
    assert estimator.jumped
    assert sure(estimator.estimate(4, independent=False)).rate == pytest.approx(8e6, rel=0.01)


def test_stalls_do_not_make_a_link_slow():
    chance, free, times = random.Random(7), 0.0, []
    for _ in range(200):
        free += CHUNK / 20e6 + (0.2 if chance.random() < 0.05 else 0.0)
        times.append((0.0, free))
    assert measured(times).rate == pytest.approx(20e6, rel=0.02)


def test_a_clock_that_is_set_back_ends_a_period_and_harms_nothing():
    times = arrivals([0.0] * 20, 20e6, 0.0)
    times += [(0.0, arrived - 1.5) for _, arrived in arrivals([0.0] * 40, 20e6, 0.0)[20:]]
    assert measured(times).rate == pytest.approx(20e6, rel=0.01)
