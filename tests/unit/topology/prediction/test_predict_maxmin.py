"""Max-min fair rates against progressive filling from scratch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.topology.prediction import MaxMin


def filled(uses, capacities, started):
    """Return the rates by definition: raise all alike; what meets a full resource stays as it is."""
    rates = dict.fromkeys(started, 0.0)
    left = list(capacities)
    rising = set(started)
    while rising:
        counts = [sum(resource in uses[flow] for flow in rising) for resource in range(len(left))]
        step, full = min((left[r] / counts[r], r) for r in range(len(left)) if counts[r])
        for flow in rising:
            rates[flow] += step
        for resource, count in enumerate(counts):
            left[resource] -= step * count
        left[full] = 0.0
        stopped = {flow for flow in rising if any(left[r] <= 1e-9 * capacities[r] for r in uses[flow])}
        rising -= stopped
    return rates


@st.composite
def sharings(draw):
    resources = draw(st.integers(1, 6))
    capacities = draw(st.lists(st.integers(1, 20).map(float), min_size=resources, max_size=resources))
    uses = draw(
        st.lists(
            st.lists(st.integers(0, resources - 1), min_size=1, max_size=4, unique=True),
            min_size=1,
            max_size=9,
        )
    )
    return uses, capacities


@given(sharings(), st.data())
def test_rates_are_those_of_progressive_filling_whatever_comes_and_goes(sharing, data):
    uses, capacities = sharing
    shared = MaxMin(capacities)
    later = list(uses)
    uses = []
    started: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0 if uses else 1, len(later)))) if later else ():
            assert shared.add(later[0]) == len(uses)
            uses.append(later.pop(0))
        for flow in data.draw(st.sets(st.integers(0, len(uses) - 1), max_size=3)):
            if not uses[flow]:
                continue
            if flow in started:
                started.remove(flow)
                shared.stop(flow)
            else:
                started.add(flow)
                shared.start(flow)
        if data.draw(st.booleans()):
            if data.draw(st.booleans()) and uses[0]:
                shared.remove(0)
                started.discard(0)
                uses[0] = []
            capacities = data.draw(
                st.lists(st.integers(1, 20).map(float), min_size=len(capacities), max_size=len(capacities))
            )
            shared.set_capacities(capacities)
        before = list(shared.rates)
        changed = shared.settle()
        expected = filled(uses, capacities, started)
        for flow in range(len(uses)):
            assert shared.rates[flow] == pytest.approx(expected.get(flow, 0.0), rel=1e-6)
            if flow in started and not math.isclose(before[flow], expected[flow], rel_tol=1e-6):
                assert flow in changed


def test_what_one_flow_cannot_use_goes_to_the_others():
    # Three flows over a line of 12; one of them has an access of 2.
    shared = MaxMin([12.0, 2.0])
    for uses in ([0], [0], [0, 1]):
        shared.start(shared.add(uses))
    assert sorted(shared.settle()) == [0, 1, 2]
    assert shared.rates == [5.0, 5.0, 2.0]
    shared.stop(0)
    assert shared.settle() == [1]
    assert shared.rates == [0.0, 10.0, 2.0]
