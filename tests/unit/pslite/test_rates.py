"""What follows from how far a connection has come, by the kernel."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.frames import Peer
from netstorm.pslite.link_meter import LinkMeter, MeterOptions
from netstorm.pslite.rates import (
    BbrRestart,
    BusyLink,
    BusyPeriod,
    DeliveryMonitor,
    DeliverySample,
    PaperEstimator,
    RateEstimator,
    RunningMinimum,
    TcpProgress,
)

SEGMENT = 1448
LOOK_S = 0.25
IDLE = TcpProgress(
    delivered=0,
    segment=SEGMENT,
    retransmitted=0,
    unsent=0,
    window=100,
    busy_s=0.0,
    receiver_limited_s=0.0,
    smoothed_rtt_s=0.06,
    min_rtt_s=0.06,
)


def after(before, rate, seconds=LOOK_S, *, unsent=100_000, busy=1.0, **others):
    """Return what the kernel says after some seconds at a rate in bit/s."""
    return before._replace(
        delivered=before.delivered + round(rate * seconds / 8 / SEGMENT),
        busy_s=before.busy_s + busy * seconds,
        unsent=unsent,
        **others,
    )


def looked(rate, seconds=LOOK_S, *, busy=1.0, unsent=100_000, **others):
    monitor, first = DeliveryMonitor(), IDLE._replace(unsent=100_000, window=others.get("window", 100))
    assert monitor.sample(first, 10.0) is None
    return monitor.sample(after(first, rate, seconds, busy=busy, unsent=unsent, **others), 10.0 + seconds)


def test_what_was_delivered_while_something_waited_is_the_rate():
    found = looked(20e6)
    assert found is not None
    assert (found.start, found.end) == (10.0, 10.25)
    assert found.bits / LOOK_S == pytest.approx(20e6, rel=0.01)
    assert not found.saturated


@pytest.mark.parametrize(
    "why",
    [
        {"unsent": 0},
        {"busy": 0.5},
        {"receiver_limited_s": 0.1},
        {"window": 4},
    ],
    ids=str,
)
def test_what_tcp_itself_was_the_limit_of_says_nothing(why):
    assert looked(20e6, **why) is None


@pytest.mark.parametrize(
    ("before", "now", "lower_bound"),
    [(8e6, 20.6e6, 20e6), (8e6, 8.1e6, 0.0), (20e6, 8e6, 0.0), (0.0, 8e6, 0.0)],
)
@pytest.mark.parametrize("unsent", [0, 100_000])
def test_more_than_bbr_has_seen_before_is_what_the_link_carries_at_least(before, now, lower_bound, unsent):
    monitor, first = DeliveryMonitor(), IDLE._replace(unsent=unsent, bandwidth=before)
    monitor.sample(first, 0.0)
    found = monitor.sample(after(first, 6e6, unsent=unsent, bandwidth=now), LOOK_S)
    assert (found.lower_bound if found else 0.0) == pytest.approx(lower_bound)
    assert (found.bits > 0.0 if found else False) == bool(unsent)


def test_what_bbr_has_seen_while_packets_were_lost_may_be_what_came_late_all_at_once():
    monitor, first = DeliveryMonitor(), IDLE._replace(unsent=100_000, bandwidth=8e6)
    monitor.sample(first, 0.0)
    found = monitor.sample(after(first, 20e6, bandwidth=30e6, retransmitted=100), LOOK_S)
    assert found is not None
    assert (found.lower_bound, found.saturated) == (0.0, True)


@pytest.mark.parametrize("why", [{"smoothed_rtt_s": 0.25}, {"retransmitted": 20}], ids=str)
def test_a_queue_or_losses_say_that_the_link_is_full(why):
    assert looked(20e6, **why).saturated


def test_too_few_segments_wait_for_the_next_look():
    monitor, first = DeliveryMonitor(), IDLE._replace(unsent=100_000)
    monitor.sample(first, 0.0)
    second = after(first, 0.3e6)
    assert monitor.sample(second, LOOK_S) is None
    found = monitor.sample(after(second, 0.3e6, seconds=0.5), 3 * LOOK_S)
    assert found is not None
    assert found.start == 0.0
    assert found.bits / 0.75 == pytest.approx(0.3e6, rel=0.05)


def test_another_connection_begins_anew():
    monitor, first = DeliveryMonitor(), after(IDLE, 20e6, seconds=10.0)
    monitor.sample(first, 0.0)
    assert monitor.sample(after(IDLE, 20e6), LOOK_S) is None
    assert monitor.sample(after(after(IDLE, 20e6), 20e6), 2 * LOOK_S) is not None


def history(*rates, saturated=False):
    """Return a history of what was delivered, a look after the other, and whether the last one was a jump."""
    found = RateEstimator()
    for number, rate in enumerate(rates):
        start = LOOK_S * number
        found.add_delivery(DeliverySample(start, start + LOOK_S, rate * LOOK_S, saturated), 0.0, 0.0)
    return found


def rate_of(found):
    return found.estimate(1, independent=True).rate


def test_one_look_is_a_fall_if_tcp_presses():
    found = history(*[24e6] * 8, 5e6, saturated=True)
    assert found.jumped
    assert rate_of(found) == 5e6
    assert found.estimate(1, independent=True).error == 0.1
    assert not history(*[24e6] * 8, 20e6, saturated=True).jumped


def test_a_look_at_a_handful_of_packets_after_a_time_out_is_no_fall():
    found, shut = history(*[24e6] * 8), looked(1e6, window=8, retransmitted=12)
    assert shut is not None
    assert shut.saturated
    assert shut.window_rate == pytest.approx(8 * SEGMENT * 8 / 0.06)
    assert not found.add_delivery(shut, 0.0, 0.0)
    assert rate_of(found) == 24e6


@pytest.mark.parametrize(("lower_bound", "believed"), [(0.0, 8e6), (9e6, 8e6), (11e6, 11e6), (30e6, 30e6)])
def test_what_a_link_was_found_to_carry_is_a_rise_if_it_is_clearly_more(lower_bound, believed):
    found = history(*[8e6] * 8)
    said = found.add_delivery(DeliverySample(2.0, 2.25, 0.0, False, lower_bound), 0.0, 0.0)
    assert said == found.jumped == (believed != 8e6)
    assert rate_of(found) == believed


def test_a_rise_of_a_link_that_nothing_is_known_of_says_nothing():
    assert not RateEstimator().add_delivery(DeliverySample(2.0, 2.25, 0.0, False, 9e6), 0.0, 0.0)


def test_what_is_slow_while_nothing_presses_is_not_believed_at_first():
    assert rate_of(history(*[24e6] * 8, *[7e6] * 5)) == 24e6
    assert rate_of(history(*[24e6] * 8, *[7e6] * 7)) == 7e6


def test_a_rise_needs_no_pressure():
    found = history(*[5e6] * 8, 20e6, 21e6)
    assert found.jumped
    assert rate_of(found) > 15e6


def test_chunks_count_no_more_while_the_kernel_says_something():
    found = history(*[24e6] * 8)
    slow = [
        BusyPeriod(2.0 + 0.1 * second, 2.1 + 0.1 * second, 0.5e6, back_to_back=True, start_known=True)
        for second in range(10)
    ]
    found.add_periods(slow)
    assert rate_of(found) == 24e6
    found.add_periods(
        [BusyPeriod(30.0 + k, 31.0 + k, 5e6, back_to_back=True, start_known=True) for k in range(10)]
    )
    assert rate_of(found) == 5e6
    assert not found.estimate(1, independent=True).delivered


def test_a_meter_reports_a_fall_at_once_and_says_who_saw_it():
    peer, now, said = Peer(1), 0.0, IDLE
    meter = LinkMeter(MeterOptions(), now=0.0)
    meter.progress = lambda: [(peer, said)]
    meter.control_arrived(peer, 0, 30_000_000)
    reports = []
    for look in range(40):
        fallen = look >= 30
        now += LOOK_S
        said = after(said, 5e6 if fallen else 24e6, smoothed_rtt_s=0.3 if fallen else 0.07)
        if look < 20:
            meter.acknowledged(peer, 262_144, now - 0.1, now, int((now - 0.03) * 1e9), resent=False)
        assert meter.due() <= now
        report = meter.report(now)
        reports += [(look, one) for one in (report.outgoing if report else ())]
    jumped = [look for look, one in reports if one.jumped and look >= 30]
    assert jumped[0] == 30
    last = reports[-1][1]
    assert last.delivered
    assert last.rate == pytest.approx(5e6, rel=0.05)


def test_what_has_been_said_is_not_said_again():
    peer, meter = Peer(1), LinkMeter(MeterOptions(), now=0.0)
    said = [IDLE]
    meter.progress = lambda: [(peer, said[-1])]
    outgoing = []
    for look in range(1, 40):
        now = LOOK_S * look
        said.append(after(said[-1], 24e6, unsent=100_000 if look < 10 else 0))
        meter.acknowledged(peer, 262_144, now - 0.3, now, int((now - 0.03) * 1e9), resent=False)
        report = meter.report(now)
        outgoing += [now for _ in (report.outgoing if report else ())]
    assert outgoing
    assert outgoing[-1] <= LOOK_S * 14


def test_only_the_default_estimator_asks_the_kernel():
    peer, meter = Peer(1), LinkMeter(MeterOptions(estimator="busy"), now=0.0)
    meter.progress = lambda: pytest.fail("asked")
    meter.acknowledged(peer, 262_144, 0.1, 0.2, 150_000_000, resent=False)
    meter.report(0.5)


def test_a_connection_that_is_gone_is_looked_at_no_more():
    peer, meter = Peer(1), LinkMeter(MeterOptions(), now=0.0)
    told = [(peer, IDLE._replace(unsent=100_000))]
    meter.progress = lambda: told
    meter.acknowledged(peer, 262_144, 0.1, 0.2, 150_000_000, resent=False)
    for look in range(1, 5):
        meter.report(LOOK_S * look)
    assert meter.due() < 5.0  # something waits to be sent
    told.clear()
    for look in range(5, 15):
        meter.report(LOOK_S * look)
    assert meter.due() == float("inf")


# ----------------------------------------- what the default estimator makes of arrivals whose link is known


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


def test_a_link_that_has_become_fast_is_known_after_a_tenth_of_a_second_of_chunks_that_come_alone():
    link, estimator = BusyLink(), RateEstimator()
    link.add_small_message(0.0, 0.0)
    for number in range(16):
        at = number * 1.0
        link.add_chunk(CHUNK, at, at + (0.07 if number < 10 else 0.021))
        estimator.add_periods(link.take_until(float("inf")))
        assert estimator.jumped == (number == 14)
    assert sure(estimator.estimate(4, independent=False)).rate == pytest.approx(CHUNK / 0.021, rel=0.01)


def test_chunks_of_a_link_that_has_become_five_times_as_fast_are_no_batch():
    link, estimator = BusyLink(), RateEstimator()
    for _, arrived in arrivals([0.0] * 20, 8e6, 0.0):
        link.add_chunk(CHUNK, 0.0, arrived)
    estimator.add_periods(link.take_until(float("inf")))
    link.rate = sure(estimator.estimate(4, independent=False)).rate
    free = link.arrived
    for _ in range(8):
        free += CHUNK / 40e6
        link.add_chunk(CHUNK, 0.0, free)
    estimator.add_periods(link.take_until(float("inf")))
    assert estimator.jumped
    assert sure(estimator.estimate(4, independent=False)).rate == pytest.approx(40e6, rel=0.01)


def test_a_link_that_has_fallen_in_a_pause_is_known_after_four_chunks():
    estimator, free = used_estimator()
    free += 0.5
    for number in range(4):
        free = take(estimator, free, CHUNK / 8e6)
        assert estimator.jumped == (number == 3)
    assert sure(estimator.estimate(4, independent=True)).rate == pytest.approx(8e6, rel=0.01)


def test_a_link_is_not_slow_because_tcp_begins_anew_after_a_pause():
    estimator, free = used_estimator()
    free += 0.5
    for rate in (2e6, 4e6, 8e6, 14e6):
        free = take(estimator, free, CHUNK / rate)
        assert not estimator.jumped


def used_estimator():
    """Return an estimator of a link that carried 20 Mbit/s, and until when it did."""
    estimator, free = RateEstimator(), 0.0
    for _ in range(50):
        free = take(estimator, free, CHUNK / 20e6)
    return estimator, free


def take(estimator, start, duration):
    """Add one chunk's busy period, and return its end."""
    end = start + duration
    estimator.add_periods([BusyPeriod(start, end, CHUNK, back_to_back=True, start_known=True)])
    return end


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


# ------------------------------------------------------------------------------------ the paper's estimator


def test_the_paper_estimator_is_right_for_enough_lone_chunks_and_synchronised_clocks():
    paper = PaperEstimator(4)
    paper.add_chunk(CHUNK, 10.0, 9.9)  # arrived before it was sent
    assert paper.impossible == 1
    for sent, arrived in arrivals([0.0, 1.0, 2.0, 3.0], 20e6, 0.0):
        assert paper.estimate() is None
        paper.add_chunk(CHUNK, sent, arrived)
    assert sure(paper.estimate()).rate == pytest.approx(20e6)
    assert sure(paper.estimate()).chunks == 4


def test_the_paper_estimator_charges_latency_and_queue_to_the_link():
    paper = PaperEstimator(4)
    for sent, arrived in arrivals([0.0] * 4, 20e6, 0.03):
        paper.add_chunk(CHUNK, sent, arrived)
    expected = sum(CHUNK / (0.03 + (place + 1) * CHUNK / 20e6) for place in range(4)) / 4
    assert sure(paper.estimate()).rate == pytest.approx(expected)
    assert sure(paper.estimate()).rate < 0.5 * 20e6


# ------------------------------------------------------------------------------------- when bbr starts anew


KNOWN = 20e6


def starts(bandwidths, *, known=KNOWN, begin=0.0, fresh=None):
    """Return when a connection should start anew; its bandwidths are one look apart, the first at `begin`."""
    fresh = fresh or BbrRestart()
    times = [begin + LOOK_S * number for number in range(len(bandwidths))]
    return [at for at, one in zip(times, bandwidths, strict=True) if fresh.due(one, known, at)]


@pytest.mark.parametrize(
    ("bandwidths", "known", "anew_at"),
    [
        pytest.param([20e6, 19e6, 21e6, 20.5e6] * 40, KNOWN, [], id="right about its link"),
        pytest.param([11e6] * 40, KNOWN, [], id="more than half"),
        pytest.param([20e6] * 8 + [0.4e6], KNOWN, [8], id="next to nothing"),
        pytest.param([20e6] * 8 + [9.9e6], KNOWN, [8], id="less than half"),
        pytest.param([20e6] * 8 + [0.4e6] * 8, 0.0, [], id="nothing is known of the link"),
        pytest.param([0.0] * 40, KNOWN, [], id="not BBR"),
        pytest.param([0.4e6, 1e6, 3e6, 8e6, 20e6, 20e6, 20e6], KNOWN, [], id="finds out within a second"),
        pytest.param([0.4e6] * 5, KNOWN, [4], id="does not"),
    ],
)
def test_a_connection_that_has_less_than_half_starts_anew(bandwidths, known, anew_at):
    assert starts(bandwidths, known=known) == [LOOK_S * number for number in anew_at]


def test_what_was_in_vain_is_done_the_more_seldom():
    found = starts([5e6] * 400)
    pauses = [after - before for before, after in pairwise(found)]
    assert pauses == [2.0, 4.0, 8.0, *[16.0] * 5]


def test_and_what_helped_may_be_done_again_after_a_second():
    fresh = BbrRestart()
    assert starts([5e6] * 5, fresh=fresh) == [1.0]
    assert starts([20e6] * 8 + [1e6], begin=1.25, fresh=fresh) == [3.25]
    assert starts([20e6] * 8 + [1e6], begin=3.5, fresh=fresh) == [5.5]


# ------------------------------------------------------------------------- running minima of measured times


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-5, 5)), min_size=1, max_size=60))
def test_the_smallest_value_is_that_of_at_least_ten_and_at_most_twenty_seconds(steps):
    smallest = RunningMinimum()
    seen, now = [], 0.0
    for pause, value in steps:
        now += pause
        smallest.offer(value, now)
        seen.append((now, value))
        assert smallest.value <= min(value for at, value in seen if at >= now - 10)
        assert smallest.value in [value for _, value in seen]


# ------------------------------------------ chunks that arrive over a link whose rate and latency are known


CHUNK = 256 * 1024 * 8.0


def arrivals(sent, rate, latency, bits=CHUNK, clock=0.0):
    """Return (sent, arrived) of chunks over a first-in-first-out link; the receiver's clock is fast."""
    free = 0.0
    found = []
    for time in sent:
        free = max(free, time) + bits / rate
        found.append((time, free + latency + clock))
    return found


def sure(estimate):
    assert estimate is not None
    return estimate
