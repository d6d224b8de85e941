"""Contended networks, and caps that links share, by what they carried in the same half seconds."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.messages import THROUGHPUT_PERIOD_S, LinkThroughput, ThroughputReport
from netstorm.scheduler.measured_links import AccessLines, Readings

M = 1e6
OUT, INTO = 0, 1


class Job:
    """Nodes that report what their links carry, once a second."""

    def __init__(self, size):
        self.lines = AccessLines(size)
        self.caps = {}
        self.now = 100.0
        self.number = 7_000_000

    def carry(self, seconds, rates, eager=None):
        """Let links carry rates by (source, target), or what `rates()` says for each half second.

        `eager`: those that have more to send (all).
        """
        for _ in range(round(seconds / THROUGHPUT_PERIOD_S)):
            now = rates() if callable(rates) else rates
            for source in {pair[0] for pair in now}:
                links = tuple(
                    LinkThroughput(pair[1], rate, eager is None or pair in eager)
                    for pair, rate in now.items()
                    if pair[0] == source and rate
                )
                self.lines.record(source, (ThroughputReport(self.number, links),), self.now)
            self.now += THROUGHPUT_PERIOD_S
            self.number += 1
            self.look()
        return self

    def limits(self, line, cap, link):
        return self.lines.may_have_slowed(line, cap, link, self.now)

    def beyond(self, line, cap):
        return self.lines.exceeds(line, cap, self.now)

    def look(self):
        if self.now >= self.lines.due():
            self.caps.update(self.lines.find_caps(self.now))


def into(*sources):
    return [(source, 0) for source in sources]


def trading(chance, cap, pairs, lasting_s=2.0):
    """Return rates of links whose total is the cap; every two seconds others are the faster ones."""
    parts, left = {}, 0

    def rates():
        nonlocal parts, left
        if left == 0:
            weights = [chance.uniform(0.1, 1.9) for _ in pairs]
            parts = {pair: cap * weight / sum(weights) for pair, weight in zip(pairs, weights, strict=True)}
        left = (left + 1) % round(lasting_s / THROUGHPUT_PERIOD_S)
        noise = chance.uniform(0.98, 1.02)
        return {pair: rate * noise for pair, rate in parts.items()}

    return rates


def coming_and_going(chance, rates_of):
    """Return rates of some of the links; every two seconds other ones have something to send."""
    chosen, left = [], 0

    def rates():
        nonlocal chosen, left
        if left == 0:
            pairs = sorted(rates_of(None))
            chosen = chance.sample(pairs, chance.randint(1, len(pairs)))
        left = (left + 1) % 4
        return {pair: rate * chance.gauss(1, 0.02) for pair, rate in rates_of(chosen).items()}

    return rates


def shared(cap, pairs):
    """All get the same of a line."""

    def rates_of(chosen):
        chosen = pairs if chosen is None else chosen
        return dict.fromkeys(chosen, cap / len(chosen))

    return rates_of


def independent(rates):
    def rates_of(chosen):
        return {pair: rate for pair, rate in rates.items() if chosen is None or pair in chosen}

    return rates_of


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("pairs", "line"), [(into(1, 2, 3, 4), (INTO, 0)), ([(2, one) for one in (0, 1, 3, 4)], (OUT, 2))]
)
def test_links_that_trade_under_a_ceiling_share_a_line(seed, pairs, line):
    job = Job(5).carry(40, trading(random.Random(seed), 40 * M, pairs))
    assert set(job.caps) == {line}
    assert job.caps[line] == pytest.approx(40 * M, rel=0.03)


@pytest.mark.parametrize("seed", range(2))
def test_links_that_get_less_in_company_are_contended(seed):
    job = Job(5).carry(30, coming_and_going(random.Random(seed), shared(40 * M, into(1, 2, 3, 4))))
    assert job.lines.contended
    assert job.lines.upper_bound((1, 0)) <= 44 * M


@pytest.mark.parametrize("seed", range(2))
def test_links_that_do_the_same_in_any_company_share_nothing(seed):
    chance = random.Random(seed)
    rates = {pair: chance.uniform(5, 20) * M for pair in itertools.permutations(range(5), 2)}
    job = Job(5).carry(60, coming_and_going(chance, independent(rates)))
    assert job.caps == {}
    assert not job.lines.contended
    assert job.lines.upper_bound((1, 0)) == float("inf")


@pytest.mark.parametrize("seed", range(3))
def test_links_that_change_share_nothing(seed):
    chance = random.Random(seed)
    job = Job(5)
    for _ in range(6):
        rates = {pair: chance.uniform(5, 38) * M for pair in itertools.permutations(range(5), 2)}
        job.carry(20, coming_and_going(chance, independent(rates)))
        assert job.caps == {}
        assert not job.lines.contended


def test_what_others_hand_over_slowly_is_no_ceiling_and_a_single_link_shares_nothing():
    """A relay passes on what comes in at a steady rate, now to one child and now to the other."""
    chance = random.Random(1)
    for job in (
        Job(3).carry(40, trading(chance, 20 * M, [(0, 1), (0, 2)]), eager=()),
        Job(3).carry(40, lambda: {(0, 1): chance.uniform(10, 20) * M}),
    ):
        assert job.caps == {}
        assert not job.lines.contended


def test_what_was_seen_a_minute_ago_counts_no_more():
    pairs = into(1, 2, 3)
    job = Job(4).carry(30, trading(random.Random(1), 40 * M, pairs))
    assert job.caps
    job.caps.clear()
    job.carry(70, {(1, 0): 10 * M})
    job.caps.clear()
    job.carry(4, trading(random.Random(2), 20 * M, pairs))
    assert job.caps == {}  # four seconds are too few


def test_a_network_is_no_longer_contended_when_links_no_longer_are():
    pairs = into(1, 2, 3, 4)
    job = Job(5).carry(30, coming_and_going(random.Random(1), shared(40 * M, pairs)))
    assert job.lines.contended
    rates = {pair: place * 10 * M for place, pair in enumerate(pairs, 1)}
    job.carry(90, coming_and_going(random.Random(2), independent(rates)))
    assert not job.lines.contended


def test_a_link_is_limited_by_what_others_carry_on_a_full_line():
    job = Job(4).carry(5, {(1, 0): 12 * M, (2, 0): 20 * M})
    assert job.limits((INTO, 0), 40 * M, (1, 0))
    assert not job.limits((INTO, 0), 60 * M, (1, 0))  # there was room for more
    assert not job.limits((INTO, 0), 0.0, (1, 0))  # nobody knows of a cap
    assert not job.limits((OUT, 1), 12 * M, (1, 0))  # it had that line to itself
    assert not job.limits((INTO, 0), 40 * M, (3, 0))  # it carried nothing
    job.carry(8, {(1, 0): 3 * M})
    assert not job.limits((INTO, 0), 40 * M, (1, 0))  # it is slow by itself


def test_in_a_contended_network_any_line_that_is_well_used_may_be_the_limit():
    job = Job(5).carry(30, coming_and_going(random.Random(1), shared(40 * M, into(1, 2, 3, 4))))
    job.carry(8, {(1, 0): 10 * M, (2, 0): 20 * M})
    assert job.limits((INTO, 0), 0.0, (1, 0))
    job.carry(8, {(1, 0): 2 * M, (2, 0): 3 * M})
    assert not job.limits((INTO, 0), 0.0, (1, 0))
    job.carry(8, {(1, 0): 30 * M})
    assert not job.limits((INTO, 0), 0.0, (1, 0))  # alone


def test_a_line_that_carries_more_than_its_cap_has_another_one():
    job = Job(4).carry(5, {(1, 0): 30 * M, (2, 0): 20 * M})
    assert job.beyond((INTO, 0), 40 * M)
    assert not job.beyond((INTO, 0), 48 * M)
    assert not job.beyond((OUT, 3), 1 * M)


def test_what_was_carried_in_other_company_is_forgotten():
    job = Job(5).carry(30, coming_and_going(random.Random(1), shared(40 * M, into(1, 2, 3, 4))))
    job.lines.reset(job.now)
    assert not job.lines.contended
    job.caps.clear()
    job.carry(9.5, trading(random.Random(2), 20 * M, into(1, 2, 3)))
    assert not job.limits((INTO, 0), 20 * M, (1, 0))  # may be under way since then
    job.carry(3, {(1, 0): 10 * M, (2, 0): 10 * M})
    assert job.limits((INTO, 0), 20 * M, (1, 0))
    assert job.caps == {}


def test_what_one_node_reports_late_is_put_with_what_others_reported_of_that_time():
    lines = AccessLines(3)
    for number in range(8):
        lines.record(1, (ThroughputReport(number, (LinkThroughput(0, 15 * M, True),)),), 100.0 + number / 2)
        lines.record(2, (ThroughputReport(number, (LinkThroughput(0, 15 * M, True),)),), 101.5 + number / 2)
    assert lines.may_have_slowed((INTO, 0), 30 * M, (1, 0), 105.0)


@pytest.mark.parametrize(
    "link",
    [
        LinkThroughput(9, 1 * M, True),
        LinkThroughput(-1, 1 * M, True),
        LinkThroughput(1, 1 * M, True),
        LinkThroughput(0, -1.0, True),
        LinkThroughput(0, float("nan"), True),
        LinkThroughput(0, float("inf"), True),
        LinkThroughput(0, 1e300, True),
    ],
)
def test_what_cannot_be_is_refused(link):
    lines = AccessLines(3)
    assert lines.record(1, (ThroughputReport(1, (link, LinkThroughput(2, 5 * M, True))),), 1.0) == 1
    assert lines.may_have_slowed((OUT, 1), 5 * M, (1, 2), 1.0) is False
    assert lines.find_caps(10.0) == {}


def test_a_node_that_reports_no_end_of_half_seconds_fills_no_memory():
    lines = AccessLines(3)
    endless = tuple(ThroughputReport(number, (LinkThroughput(0, M, True),)) for number in range(5000))
    assert lines.record(1, endless, 1.0) > 4000
    lines.find_caps(10.0)
    lines.record(2, (ThroughputReport(5001, (LinkThroughput(0, M, True),)),), 10.0)
    assert lines.may_have_slowed((INTO, 0), M, (2, 0), 10.0) is False


_LINK = st.builds(LinkThroughput, st.integers(-2, 5), st.floats(allow_nan=True), st.booleans())
_REPORT = st.tuples(
    st.integers(0, 3),
    st.lists(
        st.builds(ThroughputReport, st.integers(-3, 12), st.lists(_LINK, max_size=5).map(tuple)), max_size=4
    ),
    st.floats(0.0, 3.0),
)


@given(st.lists(_REPORT, max_size=40))
def test_whatever_is_reported_nothing_fails(reports):
    lines, now = AccessLines(4), 0.0
    for source, carried, later in reports:
        now += later
        lines.record(source, carried, now)
        for (end, rank), cap in lines.find_caps(now).items():
            assert end in (0, 1)
            assert 0 <= rank < 4
            assert cap > 0.0
            lines.exceeds((end, rank), cap, now)
        lines.may_have_slowed((INTO, 1), 0.0, (0, 1), now)


# ------------------------------------------------------------------- a quantity that is measured with noise


def fed(values, error=0.05):
    readings = Readings()
    for now, value in enumerate(values):
        readings.add(value, error, float(now))
    return readings


def noisy(level, sigma, count, seed=0):
    chance = random.Random(seed)
    return [level * (1 + chance.gauss(0, sigma)) for _ in range(count)]


def test_the_first_reading_is_the_estimate():
    readings = fed([100.0])
    assert not Readings()
    assert readings
    assert readings.value == 100.0
    assert readings.error(0.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("last", "value"), [([20.0], 100.0), ([20.0, 500.0, 100.0], 100.0), ([20.0, 21.0], 20.5)]
)
def test_two_that_agree_are_a_change_that_makes_the_past_forgotten_and_outliers_are_none(last, value):
    assert fed([*noisy(100.0, 0.05, 10), *last]).value == pytest.approx(value, rel=0.05)


def test_what_was_read_while_a_link_changed_is_no_part_of_what_it_has_become():
    assert fed([*[20.0] * 10, 40.0, 80.0]).value == pytest.approx(80.0)
    assert fed([*[20.0] * 10, 75.0, 80.0]).value == pytest.approx(77.5)


@pytest.mark.parametrize("seed", range(4))
def test_many_readings_are_better_than_one(seed):
    readings = fed(noisy(100.0, 0.05, 15, seed))
    assert readings.value == pytest.approx(100.0, rel=0.07)
    assert readings.error(14.0) < 0.065


def test_a_reading_that_may_be_an_outlier_makes_what_was_before_no_newer():
    readings = fed([100.0] * 10)
    readings.add(20.0, 0.05, 15.0)
    assert readings.age(16.0) == 7.0
    readings.add(20.0, 0.05, 16.0)
    assert readings.age(16.0) == 0.0
    assert readings.value == pytest.approx(20.0)


@pytest.mark.parametrize("error", [0.2, 0.5])
def test_a_fall_is_a_change_however_unsure_the_low_readings_are_by_themselves(error):
    readings = fed([24e6] * 10, 0.02)
    readings.add(4.1e6, error, 10.0)
    readings.add(4.9e6, error, 11.0)
    assert readings.value == pytest.approx(4.5e6, rel=0.05)
    assert readings.changed_at == 11.0


def test_a_rise_that_is_as_unsure_as_it_is_high_is_none():
    readings = fed([5e6] * 10, 0.02)
    readings.add(11e6, 0.5, 10.0)
    readings.add(11e6, 0.5, 11.0)
    assert readings.value == pytest.approx(5e6, rel=0.05)


def test_who_says_to_be_exact_and_scatters_is_not_believed():
    readings = fed(noisy(100.0, 0.2, 15, seed=3), error=0.0)
    assert 0.05 < readings.error(14.0) < 0.3
    assert readings.value == pytest.approx(100.0, rel=0.3)


def test_errors_grow_while_nothing_is_read():
    readings = fed([100.0] * 10)
    assert readings.error(9.0) < 0.05
    assert readings.error(9.0 + 120.0) == pytest.approx(0.2, rel=0.1)
    assert readings.age(129.0) == 120.0


def test_a_slow_drift_is_followed():
    readings = fed([100.0 * 1.01**second for second in range(60)])
    assert readings.value == pytest.approx(100.0 * 1.01**59, rel=0.1)


def test_after_a_long_time_one_reading_is_enough_for_a_change():
    readings = fed([100.0] * 6)
    readings.add(20.0, 0.05, 60.0)
    assert readings.value == 20.0
    assert readings.changed_at == 60.0
    assert fed([100.0] * 6).changed_at < 0


def test_who_has_seen_the_change_is_believed_though_the_reading_rests_on_little():
    readings = fed([27e6] * 6)
    readings.add(11e6, 0.5, 6.0, jumped=True)
    assert readings.value == 11e6
    assert readings.changed_at == 6.0


def test_a_lower_bound_above_the_estimate_is_the_estimate_and_no_change():
    readings = fed([100.0, 101.0, 99.0])
    readings.at_least(150.0, 0.05, 5.0)
    assert readings.value == 150.0
    assert readings.error(5.0) == pytest.approx(0.05)
    assert readings.age(6.0) == 1.0
    assert readings.changed_at == float("-inf")


@pytest.mark.parametrize("value", [10.0, 99.0, 104.0])
def test_a_lower_bound_that_is_not_clearly_above_the_estimate_says_nothing(value):
    readings = fed([100.0, 100.0])
    readings.at_least(value, 0.05, 9.0)
    assert readings.value == pytest.approx(100.0)
    assert readings.age(9.0) == 8.0


def test_the_first_lower_bound_is_all_that_is_known():
    readings = Readings()
    readings.at_least(7.0, 0.1, 1.0)
    assert readings
    assert readings.value == 7.0
    readings.add(3.0, 0.05, 2.0, jumped=True)
    assert readings.value == 3.0
