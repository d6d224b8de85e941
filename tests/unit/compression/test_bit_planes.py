import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.quantised import add_constant, add_planes, exceeds, plane_bytes, unpacked

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
