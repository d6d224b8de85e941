"""What the access line looks like in the windows of its links."""

from __future__ import annotations

import random

import pytest

from netstorm.pslite.link_meter import AccessLineDetector, Contention, slices
from netstorm.pslite.rates import BusyPeriod


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


@pytest.mark.parametrize("seed", range(5))
def test_a_cap_that_limits_links_is_found(seed):
    verdict, cap = feed(AccessLineDetector(), shared_line(random.Random(seed), cap=150e6, best=BEST))
    assert verdict is Contention.CAPPED
    assert cap == pytest.approx(150e6, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_links_without_a_cap_are_independent(seed):
    verdict, cap = feed(AccessLineDetector(), shared_line(random.Random(seed), cap=1e12, best=BEST))
    assert verdict is Contention.INDEPENDENT
    assert cap == 0


def test_two_links_that_are_always_busy_together_tell_nothing():
    times = [(step / 10, (step + 1) / 10, 50e6) for step in range(300)]
    assert feed(AccessLineDetector(), {1: times, 2: times}) == (Contention.UNKNOWN, 0.0)


def test_a_single_link_tells_nothing():
    times = [(step / 10, (step + 1) / 10, 50e6) for step in range(300)]
    assert feed(AccessLineDetector(), {1: times}) == (Contention.UNKNOWN, 0.0)


def test_time_is_cut_where_links_begin_and_end():
    one, other = period(0.0, 2.0, 1.0), period(1.0, 3.0, 1.0)
    parts = list(slices({1: [(0.0, 2.0, one)], 2: [(1.0, 3.0, other)]}))
    assert [(part.start, part.end, sorted(part.busy)) for part in parts] == [
        (0.0, 1.0, [1]),
        (1.0, 2.0, [1, 2]),
        (2.0, 3.0, [2]),
    ]


def test_a_pause_of_all_links_is_no_part_of_any_slice():
    one, other = period(0.0, 1.0, 1.0), period(5.0, 6.0, 1.0)
    parts = list(slices({1: [(0.0, 1.0, one), (5.0, 6.0, other)]}))
    assert [(part.start, part.end) for part in parts] == [(0.0, 1.0), (5.0, 6.0)]
