"""Some elements of many: their payloads, sums and the largest of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.sparse import (
    Entries,
    decode_entries,
    encode_entries,
    entries_problem,
    largest_entries,
    total_of,
)

ELEMENTS = 3000


def entries(values):
    """Return the entries of a dictionary."""
    numbers = sorted(values)
    return Entries(np.array(numbers, np.int64), np.array([values[one] for one in numbers], np.float32))


def as_dict(found):
    return dict(zip(found.numbers.tolist(), found.values.tolist(), strict=True))


some = st.dictionaries(st.integers(0, ELEMENTS - 1), st.integers(-9, 9).map(float), max_size=20)


@given(some, st.integers(0, 50))
def test_a_payload_is_read_as_it_was_written(values, more):
    payload = encode_entries(entries(values), len(values) + more)
    assert entries_problem(payload, ELEMENTS, 10) is None
    found, contributed = decode_entries(payload)
    assert (as_dict(found), contributed) == (values, len(values) + more)


@pytest.mark.parametrize(
    ("number", "gap_bytes"), [(0, 1), (254, 1), (255, 2), (509, 2), (510, 3), (2999, 12)]
)
def test_a_gap_takes_a_byte_and_one_more_for_each_255_elements(number, gap_bytes):
    payload = encode_entries(entries({number: 1.5}), 1)
    assert len(payload) == 8 + 4 + gap_bytes
    assert as_dict(decode_entries(payload)[0]) == {number: 1.5}
    assert entries_problem(payload, number + 1, 1) is None
    assert entries_problem(payload, max(1, number), 1) == (
        f"has an entry {number} of {number} elements" if number else None
    )


def test_more_contributions_than_the_header_has_room_for_count_as_the_most():
    assert decode_entries(encode_entries(entries({1: 1.0}), 1 << 40))[1] == (1 << 32) - 1


@given(some, some)
def test_a_sum_has_the_elements_of_both_and_changes_neither(first, second):
    one, other = entries(first), entries(second)
    expected = {key: first.get(key, 0) + second.get(key, 0) for key in first | second}
    assert as_dict(total_of(one, other)) == expected
    assert (as_dict(one), as_dict(other)) == (first, second)


def test_the_largest_are_by_magnitude_with_nan_first_and_in_order():
    found = largest_entries(entries({1: 2.0, 5: -7.0, 6: float("nan"), 9: 3.0}), 2)
    assert found.numbers.tolist() == [5, 6]
    assert largest_entries(found, 5) is found
    assert len(largest_entries(found, 0).numbers) == 0


def test_between_are_the_entries_of_a_chunk_numbered_from_its_start():
    found = entries({1: 1.0, 4: 2.0, 7: 3.0, 8: 4.0}).between(4, 8)
    assert as_dict(found) == {0: 2.0, 3: 3.0}
