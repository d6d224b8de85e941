"""A node's reports, from made-up traffic over links that are known."""

from __future__ import annotations

import pytest

from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.pslite.link_meter import LinkMeter, MeterOptions
from netstorm.pslite.rates import TcpProgress

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


def test_nothing_is_reported_without_traffic_nor_twice():
    wire = Wire().stream([A], seconds=3, rates={A: 100e6}).rest(5.0)
    before = len(wire.reports)
    assert before > 0
    wire.rest(10.0)
    wire.rest(20.0)
    assert len(wire.reports) == before
    assert wire.meter.due() == float("inf")


def test_reports_are_a_second_apart():
    assert len(Wire().stream([A], seconds=10, rates={A: 100e6}).reports) <= 10


def test_little_traffic_is_not_worth_a_report():
    wire = Wire(chunks=1).stream([A], seconds=1.2, rates={A: 2.5e6})
    wire.rest(2.5)
    assert wire.reports == []


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
        return [
            (
                peer,
                TcpProgress(
                    delivered=int(rate * wire.now / 8 / 1448),
                    segment=1448,
                    retransmitted=0,
                    unsent=100_000,
                    window=100,
                    busy_s=wire.now,
                    receiver_limited_s=0.0,
                    smoothed_rtt_s=0.06,
                    min_rtt_s=0.06,
                ),
            )
            for peer, rate in rates.items()
        ]

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
        silent = TcpProgress(
            delivered=0,
            segment=1448,
            retransmitted=0,
            unsent=0,
            window=10,
            busy_s=0.0,
            receiver_limited_s=0.0,
            smoothed_rtt_s=0.5,
            min_rtt_s=0.0,
        )
        return [(peer, silent._replace(min_rtt_s=trip)) for peer, trip in shortest.items()]

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
                TcpProgress(
                    delivered=int(50e6 * wire.now / 8 / 1448),
                    segment=1448,
                    retransmitted=0,
                    unsent=100_000,
                    window=400,
                    busy_s=wire.now,
                    receiver_limited_s=0.0,
                    smoothed_rtt_s=0.06,
                    min_rtt_s=0.06,
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
