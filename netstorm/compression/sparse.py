"""Some rows of a matrix: their sums, and their encoding on the wire. Pure.

A payload is the values of its rows, one row after the other, and after them the number of each row as
`uint32`, little-endian. Its length tells how many rows it has. Row numbers rise, so there is one payload for
each set of rows, and adding two sets is a merge.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError

__all__ = [
    "Array",
    "Numbers",
    "Rows",
    "add_rows",
    "decode_rows",
    "encode_rows",
    "joined_rows",
    "rows_problem",
    "tidy",
]

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

_ON_WIRE: Final = np.dtype("<u4")


class Rows:
    """Rows of a matrix, the others being zeros: `numbers`, rising, shape (n,), and `values`, (n, length)."""

    __slots__ = ("numbers", "values")

    def __init__(self, numbers: Numbers, values: Array) -> None:
        self.numbers = numbers
        self.values = values

    def __len__(self) -> int:
        return len(self.numbers)

    def between(self, first: int, end: int) -> Rows | None:
        """Return views of the rows from number `first` to before `end`, renumbered from 0; None: there are
        none.
        """
        low, high = np.searchsorted(self.numbers, (first, end))
        return Rows(self.numbers[low:high] - first, self.values[low:high]) if low < high else None


def tidy(numbers: npt.NDArray[np.integer[Any]], values: Array, count: int) -> Rows:
    """Return rows in order, each once; the values of repeated rows are added.

    Rows that are in order already are not copied.

    Args:
        numbers: shape (n,), in any order.
        values: shape (n, length).
        count: rows of the whole matrix.

    Raises:
        UsageError: a number is not that of a row.
    """
    own = numbers.astype(np.int64, copy=False)
    if len(own) == 0:
        return Rows(own, values)
    low, high = int(own.min()), int(own.max())
    if low < 0 or high >= count:
        raise UsageError(
            f"row {low if low < 0 else high} of an array with {count} rows: row numbers are 0 to {count - 1}"
        )
    if (own[1:] > own[:-1]).all():
        return Rows(own, values)
    order = np.argsort(own, kind="stable")
    sorted_numbers = own[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_numbers[1:] > sorted_numbers[:-1])))
    with np.errstate(all="ignore"):  # the user sees inf and nan in the values; no warnings
        sums = np.add.reduceat(values[order], starts, axis=0, dtype=values.dtype)
    return Rows(sorted_numbers[starts], sums)


def add_rows(total: Rows, more: Rows) -> Rows:
    """Return the sum: `total` itself, changed, if it has all rows of `more`; else new rows."""
    places = np.searchsorted(total.numbers, more.numbers)
    known = places < len(total)
    known[known] = total.numbers[places[known]] == more.numbers[known]
    with np.errstate(all="ignore"):
        if known.all():
            total.values[places] += more.values
            return total
        # Rows that only one side has are copied: adding zero would turn -0.0 into 0.0.
        new_numbers = more.numbers[~known]
        shift = np.searchsorted(new_numbers, total.numbers)
        new_places = places[~known] + np.arange(len(new_numbers))
        old_places = np.arange(len(total)) + shift
        size = len(total) + len(new_numbers)
        numbers = np.empty(size, np.int64)
        values = np.empty((size, total.values.shape[1]), total.values.dtype)
        numbers[old_places], numbers[new_places] = total.numbers, new_numbers
        values[old_places], values[new_places] = total.values, more.values[~known]
        values[old_places[places[known]]] += more.values[known]
    return Rows(numbers, values)


def encode_rows(rows: Rows) -> bytearray:
    """Return rows, at least one, as a payload."""
    size = rows.values.size * rows.values.itemsize
    payload = bytearray(size + len(rows) * _ON_WIRE.itemsize)
    values = np.frombuffer(payload, rows.values.dtype, rows.values.size)
    values.reshape(rows.values.shape)[:] = rows.values
    np.frombuffer(payload, _ON_WIRE, offset=size)[:] = rows.numbers
    return payload


def decode_rows(payload: bytes | bytearray | memoryview, length: int, dtype: np.dtype[np.generic]) -> Rows:
    """Return the rows of a payload that has no `problem`, as views: writable if the payload is.

    Args:
        payload: of `encode`.
        length: values of a row.
        dtype: of the values.
    """
    count = memoryview(payload).nbytes // (length * dtype.itemsize + _ON_WIRE.itemsize)
    values = np.frombuffer(payload, dtype, count * length)
    numbers = np.frombuffer(payload, _ON_WIRE, count, offset=values.nbytes)
    return Rows(numbers.astype(np.int64), values.reshape(count, length))


def rows_problem(
    payload: bytes | bytearray | memoryview, length: int, dtype: np.dtype[np.generic], count: int
) -> str | None:
    """Return what is wrong with a payload for `count` rows of `length` values; None: it may be decoded."""
    size, row = memoryview(payload).nbytes, length * dtype.itemsize + _ON_WIRE.itemsize
    if size == 0 or size % row:
        return f"has {size} bytes, not {row} for each row"
    rows = size // row
    numbers = np.frombuffer(payload, _ON_WIRE, rows, offset=rows * length * dtype.itemsize)
    if not (numbers[1:] > numbers[:-1]).all():
        return "has rows that are not in order, or one twice"
    return None if numbers[-1] < count else f"has row number {numbers[-1]}, of {count} rows"


def joined_rows(parts: list[tuple[int, Rows]], length: int, dtype: np.dtype[np.generic]) -> Rows:
    """Return the rows of several parts of a matrix, each given with the number of its first row."""
    parts = sorted(parts, key=lambda part: part[0])
    return Rows(
        np.concatenate([np.empty(0, np.int64), *(first + rows.numbers for first, rows in parts)]),
        np.concatenate([np.empty((0, length), dtype), *(rows.values for _, rows in parts)]),
    )
