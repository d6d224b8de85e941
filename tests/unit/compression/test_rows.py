"""Rows against plain matrices: the oracle adds whole ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from netstorm.compression.sparse import (
    Rows,
    add_rows,
    decode_rows,
    encode_rows,
    joined_rows,
    rows_problem,
    tidy,
)
from netstorm.errors import UsageError

DTYPES = st.sampled_from([np.dtype(name) for name in ("float16", "float32", "float64", "int8", "int64")])


def dense(rows, count):
    matrix = np.zeros((count, rows.values.shape[1]), rows.values.dtype)
    matrix[rows.numbers] = rows.values
    return matrix


@st.composite
def some_rows(draw, *, addends=1, least=0):
    """Return how many rows a matrix has, and that many addends with some of its rows."""
    dtype, count, length = draw(DTYPES), draw(st.integers(max(1, least), 12)), draw(st.integers(1, 5))
    found = []
    for _ in range(addends):
        numbers = sorted(draw(st.sets(st.integers(0, count - 1), min_size=least)))
        values = draw(arrays.arrays(np.int8, (len(numbers), length), elements=st.integers(-9, 9)))
        found.append(Rows(np.array(numbers, np.int64), values.astype(dtype)))
    return count, found


@given(some_rows(addends=2))
def test_a_sum_has_the_rows_of_both_and_is_that_of_the_matrices(drawn):
    count, (one, other) = drawn
    right = dense(one, count) + dense(other, count)
    expected = sorted({*one.numbers, *other.numbers})
    total = add_rows(one, other)
    assert total.numbers.tolist() == expected
    assert dense(total, count).tobytes() == right.tobytes()


@given(some_rows(addends=2))
def test_what_is_added_is_not_changed_and_a_sum_without_new_rows_is_made_in_place(drawn):
    _, (one, other) = drawn
    before = other.values.tobytes()
    total = add_rows(one, other)
    assert other.values.tobytes() == before
    assert (total is one) == (not set(other.numbers) - set(one.numbers))


def test_minus_zero_and_nan_survive_being_the_only_ones():
    one = Rows(np.array([1]), np.array([[-0.0, np.nan]]))
    other = Rows(np.array([0, 3]), np.array([[-0.0, 1.0], [np.inf, -0.0]]))
    total = add_rows(one, other)
    assert total.numbers.tolist() == [0, 1, 3]
    assert total.values.tobytes() == np.array([[-0.0, 1.0], [-0.0, np.nan], [np.inf, -0.0]]).tobytes()


@given(some_rows(least=1))
def test_a_payload_says_what_was_put_in_and_its_length_follows_from_the_number_of_rows(drawn):
    count, (rows,) = drawn
    payload = encode_rows(rows)
    length, dtype = rows.values.shape[1], rows.values.dtype
    assert len(payload) == len(rows) * (length * dtype.itemsize + 4)
    assert rows_problem(payload, length, dtype, count) is None
    again = decode_rows(payload, length, dtype)
    assert again.numbers.tolist() == rows.numbers.tolist()
    assert again.values.tobytes() == rows.values.tobytes()
    assert again.values.dtype == dtype


def test_decoded_values_are_the_payloads_memory():
    payload = encode_rows(Rows(np.array([2, 5]), np.ones((2, 3), np.float32)))
    rows = decode_rows(payload, 3, np.dtype(np.float32))
    rows.values += 1
    assert decode_rows(payload, 3, np.dtype(np.float32)).values.tolist() == [[2, 2, 2]] * 2


@given(some_rows(least=2), st.data())
def test_payloads_that_nobody_sends_have_a_problem(drawn, data):
    count, (rows,) = drawn
    length, dtype = rows.values.shape[1], rows.values.dtype
    payload = encode_rows(rows)
    assert "bytes" in str(rows_problem(b"", length, dtype, count))
    cut = data.draw(st.integers(1, length * dtype.itemsize + 3))
    assert "bytes" in str(rows_problem(payload[:-cut], length, dtype, count))
    assert "row" in str(rows_problem(payload, length, dtype, int(rows.numbers[-1])))
    for wrong in (rows.numbers[::-1], np.full_like(rows.numbers, rows.numbers[0])):
        assert "order" in str(rows_problem(encode_rows(Rows(wrong, rows.values)), length, dtype, count))


@given(st.binary(max_size=200), st.integers(1, 5), DTYPES, st.integers(1, 300))
def test_any_bytes_have_a_problem_or_are_rows(data, length, dtype, count):
    if rows_problem(data, length, dtype, count) is None:
        rows = decode_rows(data, length, dtype)
        assert (np.diff(rows.numbers) > 0).all()
        assert 0 <= rows.numbers[0] <= rows.numbers[-1] < count
        assert encode_rows(rows) == data


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 3))
def test_tidied_rows_are_in_order_and_add_up_what_came_several_times(numbers, length):
    values = np.arange(len(numbers) * length, dtype=np.float32).reshape(len(numbers), length)
    right = np.zeros((10, length), np.float32)
    np.add.at(right, np.array(numbers, int), values)
    rows = tidy(np.array(numbers, np.int64), values, 10)
    assert rows.numbers.tolist() == sorted(set(numbers))
    assert dense(rows, 10).tobytes() == right.tobytes()


def test_rows_in_order_are_not_copied():
    values = np.ones((2, 3))
    assert tidy(np.array([0, 4]), values, 5).values is values


@pytest.mark.parametrize("numbers", [[0, 5], [-1, 2]])
def test_a_row_that_does_not_exist_is_named(numbers):
    with pytest.raises(
        UsageError, match=f"row {numbers[0] if numbers[0] < 0 else 5} of an array with 5 rows"
    ):
        tidy(np.array(numbers), np.ones((2, 1)), 5)


@given(some_rows(), st.integers(1, 5))
def test_parts_of_a_matrix_join_to_its_rows(drawn, size):
    count, (rows,) = drawn
    parts = []
    for first in range(0, count, size):
        part = rows.between(first, min(first + size, count))
        if part is not None:
            assert 0 <= part.numbers[0] <= part.numbers[-1] < size
            parts.append((first, part))
    again = joined_rows(parts[::-1], rows.values.shape[1], rows.values.dtype)
    assert again.numbers.tolist() == rows.numbers.tolist()
    assert again.values.tobytes() == rows.values.tobytes()
