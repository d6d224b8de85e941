"""What is known of all links at once, in matrices, is what is known of each link."""

import gc
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.messages import LinkMeasure
from netstorm.scheduler.measured_links import (
    AccessCaps,
    MeasuredLinks,
    Readings,
    error_after,
    errors_after,
    percentile,
    percentile_of,
)

SIZE = 5
PAIRS = list(itertools.permutations(range(SIZE), 2))


def random_measure(draw, source, latency):
    return LinkMeasure(
        source=source,
        rate=draw.choice((0.0, 1e6, 1e6, 1e6)) * draw.uniform(5, 20) * draw.choice((1, 1, 1, 4)),
        error=draw.choice((0.0, 0.03, 0.2)),
        latency=draw.choice((-1.0, latency * draw.uniform(0.9, 1.3))),
        shared=draw.choice((0.0, 0.9)),
        chunks=5,
        trip=draw.choice((0.0, 2 * latency * draw.uniform(1, 1.2))),
        signal=draw.choice((math.inf, latency + draw.uniform(-0.01, 0.01))),
        jumped=draw.random() < 0.1,
        delivered=draw.random() < 0.5,
    )


def told(seed, count=120):
    """Yield links that were told of random measures, and the time, after each."""
    draw, now = random.Random(seed), 1.0
    links = MeasuredLinks(frozenset(PAIRS), AccessCaps(SIZE), SIZE)
    latency = {pair: draw.uniform(0.001, 0.1) for pair in PAIRS}
    for _ in range(count):
        now += draw.choice((0.1, 0.5, 3.0, 40.0, 80.0))
        pair = draw.choice(PAIRS)
        end = draw.choice(pair)
        links.record(pair, random_measure(draw, end, latency[pair]), now)
        if draw.random() < 0.03:
            links.mark_contended((draw.randrange(2), draw.randrange(SIZE)))
        yield links, now


def shown(rate):
    return None if rate is None else (rate.value, rate.bound, *rate.readings.row())


@given(st.integers(0, 10_000))
def test_the_rates_of_a_refresh_are_those_of_each_link(seed):
    stale = np.zeros((SIZE, SIZE), bool)
    for number, (links, now) in enumerate(told(seed)):
        if number % 4:
            continue
        stale = links.refresh(now)
        assert stale.any()
        known = links.rates(links.table.known)
        for source, target in np.argwhere(stale):
            pair = (int(source), int(target))
            assert shown(known.get(pair)) == shown(links.rate(pair, now))
            if pair in known:
                table, row = links.table, known[pair].readings.row()
                columns = (table.error, table.changed_at, table.was)
                assert tuple(column[pair] for column in columns) == (row[1], *row[3:-1])
                assert table.at[pair] >= row[2]  # the other readings may be newer
                assert table.value[pair] == known[pair].value


@given(st.integers(0, 10_000))
def test_a_latency_is_the_shortest_or_one_that_was_reported(seed):
    links, _ = list(told(seed, 60))[-1]
    sources, targets = np.array(PAIRS).T
    latencies = links.table.latencies(sources, targets).tolist()
    reported = links.table.latency
    for pair, latency in zip(PAIRS, latencies, strict=True):
        shortest = links.shortest_latency(pair)
        expected = shortest or (reported[pair] if reported[pair] >= 0.0 else reported[pair[::-1]])
        assert latency == expected


@given(st.integers(0, 10_000))
def test_a_link_changes_with_its_way_back_if_both_were_alike_and_only_that_one_was_measured_since(seed):
    for links, now in told(seed, 60):
        links.refresh(now)
    sources, targets = np.array(PAIRS).T
    began = links.table.changed_at[targets, sources] - 0.2
    changed = links.table.changed_with(sources, targets, began, now)
    rates = links.rates(links.table.known)
    for pair, is_changed in zip(PAIRS, changed.tolist(), strict=True):
        link, back = rates.get(pair), rates.get(pair[::-1])
        expected = (
            link is not None
            and back is not None
            and back.readings.was > 0.0
            and links.table.at[pair] < back.readings.changed_at - 0.2
            and 1 / 1.25 <= link.value / back.readings.was <= 1.25
        )
        assert is_changed == expected


def test_rates_that_are_reset_are_unknown_until_they_are_measured_again():
    for links, now in told(3):
        links.refresh(now)
    kept = frozenset(list(links.rates(links.table.known))[:3])
    for source in range(SIZE):
        links.reset_rates(source, kept)
    assert links.rates(links.table.known).keys() == kept
    again = next(pair for pair in PAIRS if pair not in kept)
    links.record(again, LinkMeasure(source=again[0], rate=3e6, error=0.1), now)
    links.refresh(now)
    assert links.rates(links.table.known)[again].value == 3e6


@given(
    st.lists(st.floats(0, 2), min_size=1),
    st.floats(-1, 1e6),
)
def test_errors_of_many_grow_as_one_does(errors, age):
    expected = [error_after(error, age) for error in errors]
    assert errors_after(np.array(errors), np.full(len(errors), age)).tolist() == pytest.approx(
        expected, 1e-15
    )


@given(st.lists(st.floats(0, 1e9)), st.sampled_from((0.25, 0.75)))
def test_a_percentile_of_an_array_is_that_of_its_values(values, part):
    assert percentile_of(np.array(values), part) == percentile(values, part)


def test_the_garbage_collector_leaves_readings_alone():
    readings = Readings()
    for number in range(10):
        readings.add(1e6, 0.1, float(number))
    assert not gc.is_tracked(readings)
