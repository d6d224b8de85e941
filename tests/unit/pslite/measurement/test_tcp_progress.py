"""What follows from how far a connection has come, by the kernel."""

from __future__ import annotations

import pytest

from netstorm.protocol.frames import Peer
from netstorm.pslite.link_meter import LinkMeter, MeterOptions
from netstorm.pslite.rates import BusyPeriod, DeliveryMonitor, DeliverySample, RateEstimator, TcpProgress

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
