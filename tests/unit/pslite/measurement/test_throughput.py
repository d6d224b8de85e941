"""What a sender's kernel has delivered, cut into half seconds of the cluster clock."""

from __future__ import annotations

import random

import pytest

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import THROUGHPUT_PERIOD_S
from netstorm.pslite.link_meter import ThroughputSampler
from netstorm.pslite.rates import TcpProgress

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
            progress[peer] = TcpProgress(
                delivered=round(self.delivered[peer]),
                segment=SEGMENT,
                retransmitted=0,
                unsent=0 if peer in idle else 100_000,
                window=100,
                busy_s=self.busy_s[peer],
                receiver_limited_s=0.0,
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
