"""Some entries of many, and rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from netstorm.compression.registry import codec_of
from netstorm.compression.sparse import (
    Entries,
    Rows,
    TopK,
    add_rows,
    decode_entries,
    decode_rows,
    encode_entries,
    encode_rows,
    entries_problem,
    joined_rows,
    largest_entries,
    rows_problem,
    tidy,
    total_of,
)
from netstorm.errors import UsageError
from netstorm.lab.testing.codec_trees import CodecTrees

# --------------------------------------------------------------------------------------------------- entries
# Some elements of many: their payloads, sums and the largest of them.


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


# ------------------------------------------------------------------------------------------------------ rows
# Rows against plain matrices: the oracle adds whole ones.


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


# ----------------------------------------------------------------------------------------------------- top k
# Deep Gradient Compression: momentum correction, local clipping, warm-up; refused parameters.


def one_rank(**parameters):
    return CodecTrees(TopK(**parameters), (10,), 1)


def test_momentum_correction_accumulates_velocities_and_forgets_those_of_what_it_sent():
    summing = one_rank(ratio=0.1, momentum=0.5)
    gradient = np.zeros(10, np.float32)
    gradient[[2, 7]] = 4, 3
    assert np.flatnonzero(summing.sum([gradient])[0]).tolist() == [2]
    second = summing.sum([gradient])[0]
    assert second[7] == 3 + 3 * 1.5  # residual and velocity of the first gradient
    assert summing.states[0]["velocity"][7] == 0
    assert summing.states[0]["velocity"][2] == 4


def test_the_velocity_of_what_the_root_has_left_out_goes_on():
    summing = CodecTrees(TopK(ratio=0.1, kept=1, momentum=0.5), (10,), 2)
    gradients = np.zeros((2, 10), np.float32)
    gradients[0, 2], gradients[1, 7] = 4, 3  # two elements, of which the root keeps the larger one
    assert np.flatnonzero(summing.sum(list(gradients))[0]).tolist() == [2]
    assert summing.states[0]["velocity"][2] == 0
    assert summing.states[1]["velocity"][7] == summing.states[1]["residual"][7] == 3


def test_a_state_without_velocity_gets_one():
    summing = one_rank(ratio=0.1, momentum=0.5)
    summing.states[0]["residual"] = np.ones(10, np.float32)
    summing.sum([np.ones(10, np.float32)])
    assert "velocity" in summing.states[0]


def test_clipping_bounds_the_norm_of_a_rank_by_the_square_root_of_their_number():
    summing = CodecTrees(TopK(ratio=1.0, clip=10.0), (2,), 4)
    found = summing.sum([np.array([30, 40], np.float32)] * 4)[0]
    assert found.tolist() == [4 * 3, 4 * 4]  # a norm of 10 / 2 each
    small = CodecTrees(TopK(ratio=1.0, clip=10.0), (2,), 4)
    assert small.sum([np.array([3, 4], np.float32)] * 4)[0].tolist() == [12, 16]


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.01, [250, 50, 10, 10]), (0.25, [250] * 4), (0.5, [500] * 4)]
)
def test_warm_up_begins_with_a_quarter_and_reaches_the_ratio_by_equal_factors(ratio, expected):
    summing = CodecTrees(TopK(ratio=ratio, warmup=2, kept=0), (1000,), 1)
    sent = [np.count_nonzero(summing.sum([np.arange(1, 1001, dtype=np.float32)])[0]) for _ in range(4)]
    assert sent == expected


def test_of_a_large_tensor_about_the_ratio_is_sent():
    summing = CodecTrees(TopK(ratio=0.01), (300, 1000), 1)
    values = np.random.default_rng(2).standard_normal((300, 1000)).astype(np.float32)
    assert 0.008 < np.count_nonzero(summing.sum([values])[0]) / values.size < 0.012


def test_a_tensor_whose_columns_differ_is_sampled_in_all_of_them():
    values = np.ones((300, 1024), np.float32)
    values[:, 0] = 9
    values += np.random.default_rng(2).random(values.shape, np.float32)
    found = CodecTrees(TopK(ratio=0.01), values.shape, 1).sum([values])[0]
    assert 0.006 < np.count_nonzero(found) / values.size < 0.02


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"ratio": 0}, "topk with ratio=0: expected more than 0, up to 1"),
        ({"ratio": float("nan")}, "topk with ratio=nan"),
        ({"kept": 0.001}, "topk with kept=0.001: expected 0, or from 0.01 to 1000"),
        ({"momentum": 1.0}, "topk with momentum=1.0: expected from 0 to less than 1"),
        ({"clip": -1.0}, "topk with clip=-1.0: expected 0 or more"),
        ({"warmup": -1}, "topk with warmup=-1: expected 0 or more"),
        ({"ratio": "much"}, "codec 'topk' with {'ratio': 'much'}"),
    ],
)
def test_a_parameter_out_of_its_range_is_refused(parameters, message):
    with pytest.raises(UsageError) as refused:
        codec_of({"type": "topk", **parameters})
    assert str(refused.value).startswith(message)
