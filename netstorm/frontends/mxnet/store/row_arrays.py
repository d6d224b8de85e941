"""Row-sparse values as operations of MXNet's engine: summing, choosing, reading and writing rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from netstorm.compression.sparse import Array, Numbers, Rows, tidy
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.arrays.row_memory import check_supported, empty_rows, replace_rows, rows_of
from netstorm.frontends.mxnet.arrays.staging import memory_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.kvstore.forms import Key, RowParts
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.codecs import row_length

__all__ = [
    "check_rows",
    "gather_rows",
    "sorted_row_ids",
    "sorted_rows",
    "staged_row_ids",
    "sum_rows",
    "write_rows",
]


def check_rows(runtime: Runtime, name: str, shape: tuple[int, ...]) -> None:
    """Make sure that single rows of an array can be sent.

    Raises:
        UsageError: a row is too long, or this MXNet's sparse arrays cannot be read.
    """
    check_supported()
    most = runtime.settings.max_message_bytes
    if 8 * (row_length(shape) + 2) > most:
        raise UsageError(
            f"key {name!r} has rows of {row_length(shape)} elements, more than fit into a message of "
            f"NETSTORM_MAX_MESSAGE={most} bytes; raise it on all nodes, or push dense arrays"
        )


def sum_rows(sources: Sequence[NDArray], key: Key) -> NDArray:
    """Queue the sum of arrays, one for each device, from left to right; return the new array of the sum.

    It is row-sparse if all of them are. Otherwise it is dense, since a dense array has all rows. The rows of
    a single array stay as they are: in any order, and perhaps repeated.
    """
    with mx.autograd.pause():
        shape, sparse = key.spec.shape, all(source.stype == "row_sparse" for source in sources)
        copies = []
        for source in sources:
            if source.stype == "row_sparse":
                copy = empty_rows(shape, key.dtype)
                queue_copy(source, copy)
                copies.append(copy if sparse else mx.nd.cast_storage(copy, "default"))
            else:
                copies.append(mx.nd.empty(shape, ctx=mx.cpu(), dtype=key.dtype))
                queue_copy(source, copies[-1])
        return copies[0] if len(copies) == 1 else mx.nd.add_n(*copies)


def gather_rows(stored: NDArray, row_ids: NDArray) -> NDArray:
    """Queue the choice of rows of `stored`; return the new row-sparse array that they will be in.

    It has the rows of `row_ids` in order and without repeats, zeros where `stored` has none. Whoever reads it
    gets a `UsageError` if a number is not that of a row.

    Args:
        stored: a row-sparse array of ours.
        row_ids: a dense array of any type and shape, on any device; numbers may be in any order and repeated.
    """
    shape, dtype = tuple(stored.shape), np.dtype(stored.dtype)
    picked, ids = empty_rows(shape, dtype), staged_row_ids(row_ids)

    def start(completion: Completion) -> None:
        chosen = sorted_row_ids(ids, shape[0])
        have = rows_of(stored)
        made = empty_rows(shape, dtype, len(chosen))
        _fill(made, chosen, lambda values: _pick(have, chosen, values))
        replace_rows(picked, made)
        completion.succeed()

    push_async(start, reads=(stored, ids), writes=(picked,), name="netstorm_pick_rows")
    return picked


def staged_row_ids(row_ids: NDArray) -> NDArray:
    """Queue a copy of row numbers to the host; return the new array that it will be in."""
    with mx.autograd.pause(), mx.util.np_shape(True):
        ids = mx.nd.empty(row_ids.shape, ctx=mx.cpu(), dtype=row_ids.dtype)
        queue_copy(row_ids, ids)
    return ids


def sorted_row_ids(ids: NDArray, count: int) -> Numbers:
    """Return the numbers in `staged_row_ids`, rising and without repeats; in an operation that reads them.

    Raises:
        UsageError: a number is not that of one of `count` rows.
    """
    numbers = np.unique(np.frombuffer(memory_of(ids), ids.dtype).astype(np.int64))
    return tidy(numbers, np.empty((len(numbers), 0)), count).numbers


def _pick(have: Rows, chosen: Numbers, values: Array) -> None:
    if len(have) == 0:
        values[:] = 0
        return
    places = np.minimum(np.searchsorted(have.numbers, chosen), len(have) - 1)
    np.take(have.values, places, axis=0, out=values)
    values[have.numbers[places] != chosen] = 0


def sorted_rows(source: NDArray, key: Key) -> Rows:
    """Return the rows of a result of `sum_rows`, in order and without repeats; in an operation that reads it.

    Raises:
        UsageError: it has a row number that the key does not have.
    """
    if source.stype == "default":
        rows = key.spec.shape[0]
        return Rows(np.arange(rows), np.frombuffer(memory_of(source), key.dtype).reshape(rows, -1))
    found = rows_of(source)
    return tidy(found.numbers, found.values, key.spec.shape[0])


def write_rows(target: NDArray, parts: RowParts, key: Key, *, all_rows: bool) -> None:
    """Give `target` the rows of a network operation's result; in an operation that writes it.

    Args:
        target: a row-sparse array of ours.
        parts: the rows of each chunk, with the number of the chunk's first row.
        key: the network's.
        all_rows: `target` gets all rows, zeros where `parts` has none.

    Raises:
        ProtocolViolation: the rows are not in order, or not the key's.
    """
    parts.sort(key=lambda part: part[0])
    numbers = np.concatenate([np.empty(0, np.int64), *(first + rows.numbers for first, rows in parts)])
    if not (numbers[1:] > numbers[:-1]).all() or (len(numbers) and numbers[-1] >= key.spec.shape[0]):
        raise ProtocolViolation(f"a sum of key {key.name!r} has rows out of order, or beyond the last row")

    def fill(values: Array) -> None:
        if all_rows:
            values[:] = 0
            for first, rows in parts:
                values[first + rows.numbers] = rows.values
            return
        begin = 0
        for _, rows in parts:
            values[begin : begin + len(rows)] = rows.values
            begin += len(rows)

    if all_rows:
        numbers = np.arange(key.spec.shape[0])
    made = empty_rows(key.spec.shape, key.dtype, len(numbers))
    _fill(made, numbers, fill)
    replace_rows(target, made)


def _fill(made: NDArray, numbers: Numbers, fill: Callable[[Array], None]) -> None:
    new = rows_of(made)
    new.numbers[:] = numbers
    fill(new.values)
