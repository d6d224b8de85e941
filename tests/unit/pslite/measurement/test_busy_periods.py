"""Running minima of measured times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from netstorm.pslite.rates import RunningMinimum


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
