"""Against MXNet's `quantize_2bit`, one value at a time, as its documentation and its numbers have it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.quantised import quantised, two_bit_planes_of, two_bit_problem, two_bit_values

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
    assert two_bit_planes_of(ranks) == bits


@pytest.mark.parametrize("ranks", [1, 2, 3, 9, 127, 128, 200])
def test_every_sum_over_so_many_ranks_is_itself_times_the_threshold(ranks):
    sums = np.arange(-ranks, ranks + 1)
    shifted = sums + ranks
    payload = b"".join(
        np.packbits(shifted >> plane & 1, bitorder="little").tobytes()
        for plane in range(two_bit_planes_of(ranks))
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
