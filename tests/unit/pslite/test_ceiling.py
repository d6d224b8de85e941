"""What connections that share a line look like to the kernel of their sender, and those that do not."""

from __future__ import annotations

import random

import pytest

from netstorm.pslite.ceiling import Ceiling
from netstorm.pslite.progress import Progress

SEGMENT = 1448
LOOK_S = 0.25


class Connections:
    """Connections that have been delivering at given rates, looked at four times a second."""

    def __init__(self, number):
        self.ceiling = Ceiling()
        self.now = 100.0
        self.delivered = dict.fromkeys(range(number), 0.0)
        self.busy_s = dict.fromkeys(range(number), 0.0)

    def look(self, rates, eager=None, trip_s=0.06):
        """Let a quarter of a second pass; `eager`: those that have more to send (all)."""
        self.now += LOOK_S
        told = {}
        for peer, rate in rates.items():
            self.delivered[peer] += rate * LOOK_S / 8 / SEGMENT
            self.busy_s[peer] += LOOK_S if rate else 0.0
            told[peer] = Progress(
                delivered=int(self.delivered[peer]),
                segment=SEGMENT,
                sent_again=0,
                waiting=100_000 if eager is None or peer in eager else 0,
                window=100,
                busy_s=self.busy_s[peer],
                starved_s=0.0,
                round_trip_s=trip_s,
                shortest_s=trip_s,
            )
        self.ceiling.look(told, self.now)

    def for_seconds(self, seconds, rates, **how):
        for _ in range(round(seconds / LOOK_S)):
            self.look(rates() if callable(rates) else rates, **how)


def trading(chance, cap, number):
    """Return rates whose total is the cap; every two seconds others are the faster ones."""
    parts, left = {}, 0

    def rates():
        nonlocal parts, left
        if left == 0:
            weights = [chance.uniform(0.7, 1.3) for _ in range(number)]
            parts = {peer: cap * weight / sum(weights) for peer, weight in enumerate(weights)}
        left = (left + 1) % 8
        noise = chance.uniform(0.98, 1.02)
        return {peer: rate * noise for peer, rate in parts.items()}

    return rates


@pytest.mark.parametrize("seed", range(5))
def test_connections_that_trade_under_a_ceiling_share_a_line(seed):
    links = Connections(4)
    links.for_seconds(30, trading(random.Random(seed), 40e6, 4))
    assert links.ceiling.cap == pytest.approx(40e6, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_steady_connections_share_nothing(seed):
    chance = random.Random(seed)
    links = Connections(4)
    links.for_seconds(
        40, lambda: {peer: rate * chance.gauss(1, 0.05) for peer, rate in enumerate((5e6, 10e6, 12e6, 20e6))}
    )
    assert links.ceiling.cap == 0


@pytest.mark.parametrize("seed", range(20))
def test_connections_whose_links_change_share_nothing(seed):
    chance = random.Random(seed)
    links = Connections(4)
    for _ in range(6):
        rates = [chance.uniform(5e6, 38e6) for _ in range(4)]
        links.for_seconds(20, lambda rates=rates: {p: r * chance.gauss(1, 0.05) for p, r in enumerate(rates)})
        assert links.ceiling.cap == 0


def test_what_others_hand_over_slowly_is_no_ceiling():
    """A relay passes on what comes in at a steady rate, now to one child and now to the other."""
    chance = random.Random(1)
    links = Connections(2)
    links.for_seconds(40, trading(chance, 20e6, 2), eager=set())
    assert links.ceiling.cap == 0


def test_a_single_connection_shares_nothing():
    chance = random.Random(1)
    links = Connections(1)
    links.for_seconds(40, lambda: {0: chance.uniform(10e6, 20e6)})
    assert links.ceiling.cap == 0


def test_what_was_seen_a_minute_ago_counts_no_more():
    links = Connections(3)
    links.for_seconds(30, trading(random.Random(1), 40e6, 3))
    assert links.ceiling.cap > 0
    links.for_seconds(70, dict.fromkeys(range(3), 0.0), eager=set())
    assert links.ceiling.cap == 0


def test_a_connection_that_is_another_one_now_is_left_out():
    links = Connections(3)
    links.for_seconds(30, trading(random.Random(1), 40e6, 3))
    links.delivered[2] = links.busy_s[2] = 0.0
    links.for_seconds(5, trading(random.Random(2), 40e6, 3))
    assert all(rate > 0 for one in links.ceiling._windows for rate in one.rates.values())
    assert links.ceiling.cap == pytest.approx(40e6, rel=0.03)


def test_windows_last_as_long_as_the_slowest_answers_take():
    links = Connections(4)
    links.for_seconds(18, trading(random.Random(1), 40e6, 4), trip_s=1.0)
    assert links.ceiling.cap == 0  # four windows of 4 s are too few
    links.for_seconds(30, trading(random.Random(2), 40e6, 4), trip_s=1.0)
    assert links.ceiling.cap == pytest.approx(40e6, rel=0.05)
