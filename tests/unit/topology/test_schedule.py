"""Shares as whole weights, and weights as an even sequence."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.topology.policy import PARTS, interleave, quantise, staggered

shares = st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=40)
weights = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(shares)
def test_weights_are_1000_in_all_or_40_for_each_of_many_and_no_tree_is_left_out(shares: list[float]):
    found = quantise(shares)

    assert sum(found) == max(PARTS, 40 * len(shares))
    assert min(found) >= 1


@given(st.lists(st.integers(10, 1000), min_size=1, max_size=20))
def test_weights_are_within_one_of_their_exact_share(whole: list[int]):
    found = quantise([float(share) for share in whole])

    for weight, share in zip(found, whole, strict=True):
        exact = PARTS * share / sum(whole)
        # Each has one part before the rest is divided, which only a share below that part can notice.
        assert abs(weight - exact) < 1 or exact < 1 or min(whole) * PARTS < sum(whole)


@given(shares)
@example([9.999999999999998e299, 9.999999999999999e299, 9.999999999999993e299])
def test_a_larger_share_never_gets_less(shares: list[float]):
    found = quantise(shares)

    ordered = sorted(zip(shares, found, strict=True))
    assert [weight for _, weight in ordered] == sorted(found)


@given(shares, st.sampled_from([0.5, 2.0, 1024.0]))
def test_only_the_proportion_of_shares_counts(shares: list[float], factor: float):
    shares = [min(max(share, 1e-200), 1e200) for share in shares]

    assert quantise([share * factor for share in shares]) == quantise(shares)


def test_equal_shares_are_divided_from_the_first_on():
    assert quantise([1.0] * 3) == (334, 333, 333)
    assert quantise([0.5, 0.3, 0.2]) == (500, 300, 200)
    assert quantise([7.0]) == (1000,)


def test_hundreds_of_trees_get_finer_parts():
    found = quantise([1.0] * 512)

    assert set(found) == {40}


@pytest.mark.parametrize("shares", [[], [0.0], [1.0, -1.0], [float("inf")], [float("nan")]])
def test_shares_that_are_no_shares_are_refused(shares: list[float]):
    with pytest.raises(UsageError, match="expected at least one, all positive and finite"):
        quantise(shares)


@given(weights)
def test_one_period_has_each_index_as_often_as_its_weight(weights: list[int]):
    sequence = interleave(weights)

    assert [sequence.count(i) for i in range(len(weights))] == weights


@given(weights)
def test_from_the_start_every_count_is_within_one_of_its_exact_share(weights: list[int]):
    counts = [0] * len(weights)
    for slots, i in enumerate(interleave(weights), start=1):
        counts[i] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - slots * weight / sum(weights)) < 1


@given(weights, st.data())
def test_in_any_window_every_count_is_within_two_of_its_exact_share(weights: list[int], data: st.DataObject):
    sequence = interleave(weights) * 3
    start = data.draw(st.integers(0, len(sequence) - 1))
    end = data.draw(st.integers(start, len(sequence)))

    for i, weight in enumerate(weights):
        exact = (end - start) * weight / sum(weights)
        assert abs(sequence[start:end].count(i) - exact) < 2


@given(st.integers(1, 30), st.integers(1, 5))
def test_equal_weights_take_turns(count: int, weight: int):
    assert interleave([weight] * count) == tuple(range(count)) * weight


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=12))
def test_leads_change_the_order_of_a_period_and_not_its_counts(trees):
    weights, leads = zip(*trees, strict=True)
    sequence = staggered(weights, leads)
    assert [sequence.count(one) for one in range(len(weights))] == list(weights)


def test_what_takes_long_has_none_of_the_last_slots():
    sequence = staggered((50, 50), (20, 0))
    assert set(sequence[:10]) == {0}
    assert set(sequence[-10:]) == {1}


def test_without_a_lead_a_single_chunk_is_in_the_middle():
    assert staggered((10, 1), (0, 0)).index(1) == 5
