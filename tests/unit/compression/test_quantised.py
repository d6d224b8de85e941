"""Values of few bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.codec import Floats, GradientPlace
from netstorm.compression.quantised import (
    RESOLUTION,
    TWO_BIT_MOST,
    add_constant,
    add_planes,
    exceeds,
    noise,
    packed_planes_of,
    plane_bytes,
    quantised,
    two_bit_problem,
    two_bit_values,
    unpacked,
)

# ------------------------------------------------------------------------------------------------ bit planes


LARGEST = 1100
"""So that values of more than 8 bits, which are unpacked to two bytes, occur."""

limits = st.sampled_from([1, 2, 3, 6, 7, 8, 14, 100, 127, 128, 255, 256, 511, LARGEST])


def packed(values, planes):
    """Return what the module says planes are, one value and one bit at a time."""
    found = np.zeros((planes, plane_bytes(len(values))), np.uint8)
    for place, value in enumerate(values):
        for plane in range(planes):
            found[plane, place // 8] |= (value >> plane & 1) << (place % 8)
    return found


def values_up_to(limit, count):
    return st.lists(st.integers(0, limit), min_size=count, max_size=count)


@given(st.data(), st.integers(1, 40), limits)
def test_integers_come_out_as_they_went_in(data, count, limit):
    values = data.draw(values_up_to(limit, count))
    assert unpacked(packed(values, limit.bit_length()), count).tolist() == values


@given(st.data(), st.integers(1, 40), limits, limits)
def test_sums_are_those_of_the_integers_and_addends_are_not_written(data, count, most, more):
    first, second = (data.draw(values_up_to(limit, count)) for limit in (most, more))
    addends = packed(first, most.bit_length()), packed(second, more.bit_length())
    before = [one.tobytes() for one in addends]
    planes = (most + more).bit_length()
    total = add_planes(*addends, planes)
    assert len(total) == planes
    assert unpacked(total, count).tolist() == [one + other for one, other in zip(first, second, strict=True)]
    assert [one.tobytes() for one in addends] == before


@given(st.data(), st.integers(1, 40), limits, st.integers(0, 300))
def test_a_constant_is_added_to_all_integers(data, count, limit, constant):
    values = data.draw(values_up_to(limit, count))
    total = add_constant(packed(values, limit.bit_length()), constant, (limit + constant).bit_length())
    assert unpacked(total, count).tolist() == [value + constant for value in values]


@given(st.data(), st.integers(1, 40), limits, st.integers(0, LARGEST))
def test_one_integer_that_is_too_large_is_found(data, count, most, limit):
    values = data.draw(values_up_to(most, count))
    assert exceeds(packed(values, most.bit_length()), limit) == (max(values) > limit)


@pytest.mark.parametrize("planes", range(1, 6))
def test_every_limit_is_told_from_its_neighbours(planes):
    for value in range(2**planes):
        found = packed([0, value, 0], planes)
        assert [exceeds(found, limit) for limit in range(2**planes)] == [
            value > limit for limit in range(2**planes)
        ]


# ---------------------------------------------------------------------------------------------------- dither
# Noise for stochastic rounding.


def cut(rank: int, round: int, shape: tuple[int, ...] = (1000,), piece: int = 0) -> Floats:
    """Return the noise of a piece."""
    return next(itertools.islice(noise(GradientPlace(shape, 4, rank, round), 32_768), piece, None))


@pytest.mark.parametrize("value", [0.0, 0.25, 1 / 3, 0.5, 0.9999, -0.1, 126.7])
def test_over_the_whole_table_rounding_is_right_to_the_resolution(value):
    table = next(noise(GradientPlace((1,), 1, 0, 0), 1 << 17))
    rounded = np.floor(np.float32(value) + table)
    assert set(rounded) <= {np.floor(value), np.ceil(value)}
    assert abs(rounded.mean(dtype=np.float64) - np.float32(value)) <= RESOLUTION


@pytest.mark.parametrize("level", [7, 28, 63, 127])
@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_stay_though_float32_has_rounded_their_scaling(level, sign):
    extremes = np.array([RESOLUTION, 1 - RESOLUTION], np.float32)
    assert [cut(0, 0).min(), cut(0, 0).max()] == extremes.tolist()
    for error in (0, 2**-22):
        scaled = np.float32(sign * level * (1 + error))
        assert (np.floor(scaled + extremes) == sign * level).all()


def test_noise_is_the_same_again_and_another_one_for_each_rank_gradient_shape_and_piece():
    np.testing.assert_array_equal(cut(1, 2), cut(1, 2))
    others = [cut(0, 2), cut(1, 3), cut(1, 2, (10, 100)), cut(1, 2, piece=1)]
    for one, other in itertools.combinations([cut(1, 2), *others], 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03  # 5 deviations of independent numbers


# --------------------------------------------------------------------------------------------------- two bit
# Against MXNet's `quantize_2bit`, one value at a time, as its documentation and its numbers have it.


FLOATS = st.floats(width=32)
THRESHOLDS = st.floats(2.0**-20, 2.0**20, width=32)


def mxnets(gradient, residual, threshold):
    """Return the signs and the new residual, each value on its own."""
    signs, left = [], []
    with np.errstate(all="ignore"):
        for value, rest in zip(gradient, residual, strict=True):
            total = np.float32(np.float32(rest) + np.float32(value))
            sign = 1 if total >= threshold else -1 if total <= -threshold else 0
            if sign:
                total = np.float32(total - np.float32(sign * threshold))
            signs.append(sign)
            left.append(total)
    return signs, np.array(left, np.float32)


def signs_of(found, count, start=0):
    planes = found.planes(start, start + count)
    values = np.empty(count, np.float32)
    if planes is None:
        return [0] * count
    assert two_bit_problem(planes.reshape(-1), count, 1) is None
    two_bit_values(planes.reshape(-1), 1, np.float32(1), values)
    return values.tolist()


@given(st.lists(st.lists(FLOATS, min_size=11, max_size=11), min_size=1, max_size=5), THRESHOLDS)
def test_signs_and_residuals_are_mxnets_push_after_push(gradients, t):
    threshold = np.float32(t)
    residual, theirs = np.zeros(11, np.float32), np.zeros(11, np.float32)
    for gradient in gradients:
        found = quantised(np.array(gradient, np.float32), residual, threshold)
        signs, theirs = mxnets(gradient, theirs, threshold)
        assert signs_of(found, 11) == signs
        np.testing.assert_array_equal(residual, theirs)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_any_slice_of_the_values_is_packed_like_those_values_alone(start, count, seed):
    gradient = np.random.default_rng(seed).integers(-1, 2, 100).astype(np.float32)
    found = quantised(gradient, np.zeros(100, np.float32), np.float32(1))
    assert signs_of(found, count, start) == gradient[start : start + count].tolist()


def test_values_that_all_stay_below_the_threshold_need_no_payload():
    found = quantised(np.full(9, 0.4, np.float32), np.zeros(9, np.float32), np.float32(0.5))
    assert found.planes(0, 9) is None


@pytest.mark.parametrize(
    ("ranks", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (9, 5), (127, 8), (200, 9)]
)
def test_sums_take_as_few_bits_as_hold_them(ranks, bits):
    assert packed_planes_of(ranks, TWO_BIT_MOST) == bits


@pytest.mark.parametrize("ranks", [1, 2, 3, 9, 127, 128, 200])
def test_every_sum_over_so_many_ranks_is_itself_times_the_threshold(ranks):
    sums = np.arange(-ranks, ranks + 1)
    shifted = sums + ranks
    payload = b"".join(
        np.packbits(shifted >> plane & 1, bitorder="little").tobytes()
        for plane in range(packed_planes_of(ranks, TWO_BIT_MOST))
    )
    values = np.empty(len(sums), np.float32)
    two_bit_values(payload, ranks, np.float32(0.1), values)
    assert values.tolist() == [np.float32(np.float32(0.1) * one) for one in sums]
    assert two_bit_problem(payload, len(sums), ranks) is None


def test_payloads_that_no_sum_has_are_problems():
    right = bytes(2 * 2)  # two planes of 16 values
    assert two_bit_problem(right, 16, 1) is None
    assert two_bit_problem(right + b"\0", 16, 1) == "has 5 bytes, not 4: 16 sums over 1 ranks of 2 bits"
    assert two_bit_problem(right, 17, 1) is not None
    assert two_bit_problem(b"\x01\0\x01\0", 16, 1) == "has values that no sum over 1 ranks has"
