"""A node's reports, from made-up traffic over links that are known."""

from __future__ import annotations

import random

import pytest

from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.protocol.messages import THROUGHPUT_PERIOD_S
from netstorm.pslite.link_meter import (
    AccessLineDetector,
    Contention,
    LinkMeter,
    MeterOptions,
    RoundTrips,
    ThroughputSampler,
    slices,
)
from netstorm.pslite.rates import BusyPeriod, TcpProgress

CHUNK = 262_144
A, B = Peer(1), Peer(2)
SECOND = 1_000_000_000


class Wire:
    """Feeds a meter with chunks that come one behind the other, and tells it the time."""

    def __init__(self, **options):
        self.meter = LinkMeter(MeterOptions(**options), now=0.0)
        self.reports = []
        self.now = 0.0

    def stream(self, peers, *, seconds, rates, latency=0.03, begin=1.0, contended=False):
        """Let chunks arrive from some peers, and be acknowledged by them, at these rates in bit/s."""
        events = []
        for peer in peers:
            takes = CHUNK * 8 / rates[peer]
            events += [(begin + number * takes, peer) for number in range(1, int(seconds / takes))]
        for at, peer in sorted(events):
            takes = CHUNK * 8 / rates[peer]
            sent, arrived = max(begin, at - 4 * takes), at + latency
            self.meter.control_arrived(peer, int(at * SECOND), int((at + latency) * SECOND))
            self.meter.arrived(
                peer, CHUNK, int(sent * SECOND), int(arrived * SECOND), resent=False, contended=contended
            )
            self.meter.acknowledged(peer, CHUNK, sent, arrived + latency, int(arrived * SECOND), resent=False)
            self.tick(at)
        return self

    def tick(self, now):
        self.now = now
        if now >= self.meter.due():
            report = self.meter.report(now)
            if report is not None:
                self.reports.append(report)

    def rest(self, now):
        for _ in range(3):
            now += 1.0
            self.tick(now)
        return self


IDLE = TcpProgress(
    delivered=0,
    segment=1448,
    retransmitted=0,
    unsent=100_000,
    window=100,
    busy_s=0.0,
    receiver_limited_s=0.0,
    smoothed_rtt_s=0.06,
    min_rtt_s=0.06,
)


def kernel(delivered=0.0, **others):
    """Return what the kernel says of a connection."""
    return IDLE._replace(delivered=int(delivered), **others)


def by_peer(measures):
    return {one.source: one for one in measures}


def test_links_in_and_out_are_reported_with_their_latency():
    wire = Wire().stream([A], seconds=5, rates={A: 100e6}).rest(7.0)
    assert any(report.links for report in wire.reports)
    assert any(report.outgoing for report in wire.reports)
    known = wire.meter.known()
    [into], [out] = known.links, known.outgoing
    assert into.source == out.source == A
    assert into.rate == pytest.approx(100e6, rel=0.01)
    assert out.rate == pytest.approx(100e6, rel=0.01)
    assert into.latency == out.latency == pytest.approx(0.03, abs=0.002)


def test_reports_are_a_second_apart_and_nothing_is_reported_without_traffic_nor_twice():
    wire = Wire().stream([A], seconds=10, rates={A: 100e6}).rest(12.0)
    before = len(wire.reports)
    assert 0 < before <= 12
    wire.rest(20.0)
    assert len(wire.reports) == before
    assert wire.meter.due() == float("inf")
    little = Wire(chunks=1).stream([A], seconds=1.2, rates={A: 2.5e6})
    assert little.rest(2.5).reports == []


def test_the_scheduler_is_no_link():
    wire = Wire()
    wire.meter.arrived(SCHEDULER, CHUNK, 0, SECOND, resent=False, contended=False)
    wire.meter.acknowledged(SCHEDULER, CHUNK, 0.0, 1.0, SECOND, resent=False)
    wire.meter.control_arrived(SCHEDULER, 0, SECOND)
    assert wire.meter.known().links == ()
    assert wire.meter.due() == float("inf")


def test_what_was_sent_again_measures_nothing():
    meter = LinkMeter(MeterOptions(), now=0.0)
    for number in range(100):
        meter.arrived(A, CHUNK, 0, number * SECOND // 100, resent=True, contended=False)
        meter.acknowledged(A, CHUNK, 0.0, number / 100, number * SECOND // 100, resent=True)
    for now in (2.0, 3.0, 4.0):
        meter.report(now)
    assert meter.known().links == meter.known().outgoing == ()


def test_rates_are_lower_bounds_where_links_at_the_other_end_were_busy():
    for contended in (False, True):
        wire = Wire().stream([A], seconds=5, rates={A: 100e6}, contended=contended).rest(7.0)
        [into] = wire.meter.known().links
        assert (into.shared > 0.9) == contended


def test_rates_are_lower_bounds_where_links_at_this_end_were_busy():
    wire = Wire().stream([A, B], seconds=5, rates={A: 50e6, B: 50e6}).rest(7.0)
    assert all(one.shared > 0.9 for one in wire.meter.known().links)


def test_links_that_are_as_fast_alone_are_measured_even_if_others_are_busy():
    wire = Wire().stream([A], seconds=3, rates={A: 50e6})
    wire.stream([A, B], seconds=3, rates={A: 50e6, B: 80e6}, begin=4.5).rest(8.0)
    known = by_peer(wire.meter.known().links)
    assert known[A].shared == 0.0
    assert known[A].rate == pytest.approx(50e6, rel=0.01)


def test_what_the_kernel_has_delivered_is_reported_for_each_half_second():
    wire, rates = Wire(), {A: 60e6, B: 40e6}

    def progress():
        return [(peer, kernel(rate * wire.now / 8 / 1448, busy_s=wire.now)) for peer, rate in rates.items()]

    wire.meter.progress = progress
    wire.meter.clock_ns = lambda: int((wire.now + 5000.0) * SECOND)
    wire.stream([A, B], seconds=30, rates=rates)
    told = [one for report in wire.reports for one in report.throughput]
    numbers = [one.number for one in told]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert 10_000 < numbers[0] < numbers[-1] < 10_062
    assert len(numbers) > 50
    for one in told:
        assert {link.target: link.rate for link in one.links} == pytest.approx({1: 60e6, 2: 40e6}, rel=0.01)
        assert all(link.backlogged for link in one.links)


def test_the_kernels_round_trips_are_told_at_once_also_of_links_that_nothing_has_measured():
    wire, shortest = Wire(), {A: 0.06, B: 0.02, SCHEDULER: 0.01}

    def progress():
        return [
            (peer, kernel(unsent=0, smoothed_rtt_s=0.5, min_rtt_s=trip)) for peer, trip in shortest.items()
        ]

    wire.meter.progress = progress
    wire.meter.acknowledged(A, CHUNK, 0.0, 0.2, SECOND // 10, resent=False)
    wire.tick(0.3)
    [first] = wire.reports
    assert {one.source: (one.rate, one.trip) for one in first.outgoing} == {1: (0.0, 0.06), 2: (0.0, 0.02)}
    wire.stream([A], seconds=5, rates={A: 100e6}, begin=1.0)
    told = [one for report in wire.reports[1:] for one in report.outgoing]
    assert {one.source for one in told} == {1}  # of the other there is no news
    assert all(one.trip == 0.06 and one.rate > 0.0 for one in told)
    shortest[B] = 0.015
    wire.stream([A], seconds=2, rates={A: 100e6}, begin=7.0)
    assert [one.trip for report in wire.reports for one in report.outgoing if one.source == 2] == [
        0.02,
        0.015,
    ]
    assert by_peer(wire.meter.known().outgoing)[2].trip == 0.015


def test_bbr_starts_anew_where_it_has_less_than_half_of_what_the_link_is_known_to_carry():
    wire, told = Wire(), []

    def progress():
        """Of two connections that carry 50 Mbit/s each; BBR takes the second link for slower from 6 s on."""
        return [
            (
                peer,
                kernel(
                    50e6 * wire.now / 8 / 1448,
                    window=400,
                    busy_s=wire.now,
                    bandwidth=2e6 if peer == B and wire.now > 6.0 else 50e6,
                ),
            )
            for peer in (A, B)
        ]

    wire.meter.progress = progress
    wire.meter.restart_bbr = lambda peer: told.append((peer, wire.now))
    wire.stream([A, B], seconds=6, rates={A: 50e6, B: 50e6})
    assert [peer for peer, _ in told] == [B]
    assert 6.0 < told[0][1] < 6.5


def test_the_papers_estimator_reports_what_arrives_alone():
    wire = Wire(estimator="paper").stream([A], seconds=5, rates={A: 100e6}).rest(7.0)
    report = wire.reports[-1]
    expected = CHUNK * 8 / (0.03 + 4 * CHUNK * 8 / 100e6)
    assert report.links[0].rate == pytest.approx(expected, rel=0.01)
    assert (report.outgoing, report.egress, report.ingress) == ((), 0.0, 0.0)


# --------------------------------------------------------------------- what a sender's kernel has delivered


SEGMENT = 1000
BIT_S = 8.0 * SEGMENT


class Kernel:
    """Connections that deliver at given rates, in segments a second."""

    def __init__(self, now=1000.0):
        self.now = now
        self.links = ThroughputSampler()
        self.delivered = {}
        self.busy_s = {}
        self.reports = []

    def look(self, rates, *, after=0.25, idle=(), trip_s=0.0):
        """Let some seconds pass; `idle`: those that have nothing more to send."""
        self.now += after
        progress = {}
        for peer, rate in rates.items():
            self.delivered[peer] = self.delivered.get(peer, 0.0) + rate * after
            self.busy_s[peer] = self.busy_s.get(peer, 0.0) + (after if rate else 0.0)
            trip = trip_s[peer] if isinstance(trip_s, dict) else trip_s
            progress[peer] = kernel(
                round(self.delivered[peer]),
                segment=SEGMENT,
                unsent=0 if peer in idle else 100_000,
                busy_s=self.busy_s[peer],
                smoothed_rtt_s=trip,
                min_rtt_s=trip,
            )
        self.links.sample(progress, self.now)
        self.reports += self.links.take_reports()

    def rates_of(self, peer):
        return {one.number: link.rate for one in self.reports for link in one.links if link.target == peer}


def test_each_half_second_has_the_rates_of_its_links():
    kernel = Kernel()
    for _ in range(20):
        kernel.look({1: 400, 2: 1200})
    numbers = [one.number for one in kernel.reports]
    assert numbers == list(range(2001, 2001 + len(numbers)))  # the first one was not seen as a whole
    assert len(numbers) >= 8
    for one in kernel.reports:
        assert {link.target: link.rate for link in one.links} == pytest.approx(
            {1: 400 * BIT_S, 2: 1200 * BIT_S}
        )
        assert all(link.backlogged for link in one.links)


def test_looks_need_not_be_where_half_seconds_begin():
    chance = random.Random(1)
    kernel = Kernel(now=1000.1)
    for _ in range(60):
        kernel.look({1: 1000}, after=chance.uniform(0.05, 0.4))
    rates = kernel.rates_of(1)
    assert len(rates) >= 15
    assert all(rate == pytest.approx(1000 * BIT_S, rel=0.02) for rate in rates.values())


def test_what_is_delivered_now_arrived_half_a_round_trip_ago():
    kernel = Kernel()
    for number in range(40):
        kernel.look({1: 1000 if number < 21 else 0, 2: 1000}, trip_s={1: 0.5, 2: 0.0})
    # The last was heard of at 1005.25 s.
    assert max(kernel.rates_of(1)) == 2009
    assert kernel.rates_of(1)[2009] == pytest.approx(1000 * BIT_S)


def test_who_had_nothing_to_send_for_a_moment_was_not_eager():
    kernel = Kernel()
    for number in range(24):
        kernel.look({1: 1000, 2: 1000}, idle={2} if number == 10 else ())
    eager = {one.number: {link.target: link.backlogged for link in one.links} for one in kernel.reports}
    assert all(links[1] for links in eager.values())
    # Seen idle at 1002.75 s, and eager again at 1003 s: nobody knows since when.
    assert [number for number, links in eager.items() if not links[2]] == [2005, 2006]


def test_a_connection_that_was_made_anew_begins_anew():
    kernel = Kernel()
    for _ in range(10):
        kernel.look({1: 1000})
    kernel.delivered[1] = kernel.busy_s[1] = 0.0
    for _ in range(10):
        kernel.look({1: 1000})
    rates = kernel.rates_of(1)
    assert all(rate == pytest.approx(1000 * BIT_S) for rate in rates.values())
    assert 2005 not in rates


def test_nothing_is_made_up_for_a_time_in_which_nobody_looked():
    kernel = Kernel()
    for _ in range(10):
        kernel.look({1: 1000})
    kernel.look({1: 1000}, after=5.0)
    for _ in range(10):
        kernel.look({1: 1000})
    assert not any(2006 <= number < 2014 for number in kernel.rates_of(1))


def test_links_that_carry_nothing_are_not_told():
    kernel = Kernel()
    for _ in range(10):
        kernel.look({1: 0, 2: 0})
    assert kernel.reports == []
    assert len(kernel.links) == 0


def test_what_nobody_asks_for_is_forgotten_and_told_once():
    kernel = Kernel()
    links = kernel.links
    for number in range(200):
        progress = TcpProgress(number * 100, SEGMENT, 0, 1, 10, number * 0.25, 0.0, 0.02, 0.02)
        links.sample({Peer(1): progress}, 1000.0 + number * 0.25)
    assert 0 < len(links.take_reports()) <= 8
    assert links.take_reports() == ()


@pytest.mark.parametrize("trip_s", [0.01, 3.0])
def test_a_clock_that_is_put_back_or_a_round_trip_that_shrinks_does_no_harm(trip_s):
    kernel = Kernel()
    for number in range(40):
        if number == 20:
            kernel.now -= 2.0
        kernel.look({1: 1000}, trip_s=trip_s / (1 + number))
    assert all(rate <= 1300 * BIT_S for rate in kernel.rates_of(1).values())
    assert THROUGHPUT_PERIOD_S == 0.5


# ---------------------------------------------- what the access line looks like in the windows of its links


def period(start, end, rate):
    return BusyPeriod(start, end, rate * (end - start), back_to_back=True, start_known=True)


def feed(access, links):
    """Let an access line see periods, (start, end, rate) by link."""
    for part in slices(
        {
            link: [(start, end, period(start, end, rate)) for start, end, rate in times]
            for link, times in links.items()
        }
    ):
        access.add(part)
    return access.classify()


def shared_line(chance, *, cap, best, seconds=40, step=0.1):
    """Return periods of links that share a line max-min fairly while these and those have data."""
    links: dict[int, list[tuple[float, float, float]]] = {link: [] for link in best}
    now = 0.0
    while now < seconds:
        busy = [link for link in best if chance.random() < 0.7]
        lasts = step * chance.randint(2, 8)
        left, rates = cap, {}
        for place, link in enumerate(sorted(busy, key=best.get)):
            rates[link] = min(best[link], left / (len(busy) - place))
            left -= rates[link]
        for tick in range(round(lasts / step)):
            for link, rate in rates.items():
                noisy = rate * chance.uniform(0.97, 1.03)
                links[link].append((now + tick * step, now + (tick + 1) * step, noisy))
        now += lasts
    return links


BEST = {1: 60e6, 2: 80e6, 3: 100e6, 4: 120e6}


@pytest.mark.parametrize(
    ("cap", "verdict", "found"), [(150e6, Contention.CAPPED, 150e6), (1e12, Contention.INDEPENDENT, 0.0)]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_cap_that_limits_links_is_found_and_links_without_one_are_independent(seed, cap, verdict, found):
    links = shared_line(random.Random(seed), cap=cap, best=BEST)
    assert feed(AccessLineDetector(), links) == (verdict, pytest.approx(found, rel=0.05))


@pytest.mark.parametrize(("links", "carried"), [((1, 2), 100e6), ((1,), 0.0)])
def test_links_always_busy_together_tell_what_they_carried_and_a_single_one_tells_nothing(links, carried):
    times = [(step / 10, (step + 1) / 10, 50e6) for step in range(300)]
    found = feed(AccessLineDetector(), dict.fromkeys(links, times))
    assert found == (Contention.UNKNOWN, pytest.approx(-carried))


def test_time_is_cut_where_links_begin_and_end_and_a_pause_of_all_is_left_out():
    one, other = period(0.0, 2.0, 1.0), period(1.0, 3.0, 1.0)
    parts = list(slices({1: [(0.0, 2.0, one), (5.0, 6.0, one)], 2: [(1.0, 3.0, other)]}))
    assert [(part.start, part.end, sorted(part.busy)) for part in parts] == [
        (0.0, 1.0, [1]),
        (1.0, 2.0, [1, 2]),
        (2.0, 3.0, [2]),
        (5.0, 6.0, [1]),
    ]


# ------------------------------------------------------------------------------- which round trips are told


def test_what_is_new_is_told_once_and_what_is_nearly_the_same_is_no_news():
    trips = RoundTrips()
    trips.record(A, 0.06)
    trips.record(B, 0.0)  # the kernel does not know
    assert [trips.changed, trips.take_changes(1.0)] == [True, [A]]
    trips.record(A, 0.0605)
    assert [trips.changed, trips.take_changes(2.0)] == [False, []]
    trips.record(A, 0.05)
    assert trips.take_changes(2.0) == [A]
    assert (trips.of(A), trips.of(B)) == (0.05, 0.0)


def test_all_are_told_again_after_a_while_since_a_report_may_be_lost():
    trips = RoundTrips()
    trips.record(A, 0.06)
    trips.record(B, 0.02)
    assert trips.take_changes(1.0) == [A, B]
    assert trips.take_changes(30.9) == []
    assert not trips.changed  # and no report is made for it
    assert trips.take_changes(31.0) == [A, B]
    assert trips.peers() == [A, B]
