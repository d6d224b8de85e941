"""Row-sparse arrays inside operations of MXNet's engine: read, given rows, and given back."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays import empty_rows, replace_rows, rows_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray
from netstorm.frontends.mxnet.entries import gather_rows


def made(
    numbers: list[int], value: float, shape: tuple[int, ...] = (9, 2), dtype: str = "float32"
) -> NDArray:
    array = empty_rows(shape, np.dtype(dtype), len(numbers))
    rows = rows_of(array)
    rows.numbers[:] = numbers
    rows.values[:] = value
    return array


def test_rows_of_every_type_are_read_and_made_in_place() -> None:
    shapes = itertools.cycle([(9,), (9, 2), (9, 2, 3, 1, 2, 2)])
    for dtype in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8"):
        shape = next(shapes)
        array = made([1, 8], 3, shape, dtype)
        assert array.indices.asnumpy().tolist() == [1, 8]
        assert (array.data.asnumpy() == 3).all()
        copy = rows_of(array)
        assert copy.values.shape == (2, int(np.prod(shape[1:])))
        assert copy.values.dtype == np.dtype(dtype)
        assert len(rows_of(mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype))) == 0


def test_an_array_gets_its_rows_inside_an_operation_and_what_waits_for_it_sees_them(
    started: Callable[..., Completion],
) -> None:
    target, copy = empty_rows((9, 2), np.float32), mx.nd.sparse.zeros("row_sparse", (9, 2))
    weight = mx.nd.ones((9, 2)).tostype("row_sparse")
    completion = started(writes=(target,))
    mx.nd.sgd_update(weight, target, out=weight, lr=1.0)
    target.copyto(copy)
    replace_rows(target, made([0, 5], 2))
    assert rows_of(target).numbers.tolist() == [0, 5]
    completion.succeed()
    assert copy.indices.asnumpy().tolist() == [0, 5]
    assert weight.asnumpy()[:, 0].tolist() == [-1, 1, 1, 1, 1, -1, 1, 1, 1]


def test_memory_that_arrays_have_changed_hands_of_is_given_back() -> None:
    rows, before = 50_000, 0
    for count in range(30):
        target = empty_rows((rows, 20), np.float32)
        replace_rows(target, made(list(range(0, rows, 2)), 1, (rows, 20)))
        replace_rows(target, made(list(range(0, rows, 2)), 2, (rows, 20)))
        mx.nd.waitall()
        if count == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000, f"{grown} kB more after 38 arrays of 2000 kB"


def test_a_stored_value_that_lacks_rows_has_zeros_there_and_a_number_out_of_range_is_an_error() -> None:
    stored = made([2, 5], 7)
    picked = gather_rows(stored, mx.nd.array([8, 5, 0, 5]))
    assert picked.indices.asnumpy().tolist() == [0, 5, 8]
    assert picked.data.asnumpy()[:, 1].tolist() == [0, 7, 0]
    assert gather_rows(empty_rows((9, 2), np.float32), mx.nd.array([3])).asnumpy().sum() == 0
    for number in (9, -1):
        with pytest.raises(UsageError, match=f"row {number} of an array with 9 rows"):
            gather_rows(stored, mx.nd.array([number])).asnumpy()
