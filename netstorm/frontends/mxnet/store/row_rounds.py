"""Rounds of a row-sparse key, through MXNet's engine: queued like any other, and none of it blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from netstorm.compression.rows import Array, Numbers, Rows, tidy
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.arrays.row_memory import empty_rows, replace_rows, rows_of, supported
from netstorm.frontends.mxnet.arrays.staging import memory_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.row_sparse import RowParts
from netstorm.protocol.chunks import ROW_SPARSE, row_length

__all__ = [
    "RowRounds",
    "check_rows",
    "contents",
    "picked_rows",
    "private_ids",
    "row_numbers",
    "summed_rows",
]


def check_rows(runtime: Runtime, name: str, shape: tuple[int, ...]) -> None:
    """Make sure that rows of an array can travel.

    Raises:
        UsageError: a row is too long, or this MXNet's sparse arrays cannot be read.
    """
    supported()
    most = runtime.settings.max_message_bytes
    if 8 * (row_length(shape) + 2) > most:
        raise UsageError(
            f"key {name!r} has rows of {row_length(shape)} elements, more than fit into a message of "
            f"NETSTORM_MAX_MESSAGE={most} bytes; raise it on all nodes, or push dense arrays"
        )


def summed_rows(sources: Sequence[NDArray], key: Key) -> NDArray:
    """Queue the sum of arrays, one a device, from left to right; return the private array that it will be in.

    It is row-sparse if all of them are, and else dense, since then every row counts. An array that has one
    row several times, or rows out of order, stays so.
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


class RowRounds:
    """Rounds of a key of which some rows travel. All methods queue, and return at once."""

    __slots__ = ("_on_skipped", "_runtime", "key")

    def __init__(self, runtime: Runtime, key: Key, on_skipped: Callable[[NDArray], None]) -> None:
        """Make them.

        Args:
            runtime: of this process.
            key: registered, after `check_rows`; dense or row-sparse.
            on_skipped: told of the array that a round could not be made of, because an operation of the
                script's has failed: to read it raises that failure. Called in a thread of the engine.
        """
        self._runtime: Final = runtime
        self._on_skipped: Final = on_skipped
        self.key: Final = key

    def sum(
        self,
        source: NDArray | None,
        target: NDArray,
        *,
        priority: int = 0,
        rule: str = "",
        all_rows: bool = False,
    ) -> None:
        """Queue the network's part: `target` gets the sum of the `source`s of all ranks.

        Args:
            source: what `summed_rows` has returned; None: this rank has no rows.
            target: a row-sparse array of ours.
            priority: larger goes first on every link.
            rule: fingerprint of what will be done with the sum.
            all_rows: `target` gets all rows, zeros where nobody has any.
        """
        key, runtime = self.key, self._runtime
        round = key.take_round()

        def start(completion: Completion) -> None:
            try:
                rows = None if source is None else contents(source, key)
            except Exception as error:  # the others wait for what this rank cannot give
                runtime.fail(f"round {round} of key {key.name!r}: {error}")
                raise
            parts: RowParts = []

            def done(error: Exception | None) -> None:
                try:
                    if error is None and not completion.done:
                        _write(target, parts, key, all_rows=all_rows)
                except Exception as problem:  # noqa: BLE001 -- memory, most likely; the engine must hear of it
                    error = problem
                completion.end(error)

            runtime.submit(
                Operation(
                    key=key,
                    round=round,
                    source=rows,
                    destination=parts,
                    done=done,
                    priority=priority,
                    rule=rule,
                    form=key.forms[ROW_SPARSE],
                )
            )

        def skipped() -> None:
            self._on_skipped(target)
            runtime.fail(
                f"round {round} of key {key.name!r} has nothing to send: an operation that it depends on "
                "has failed"
            )

        push_async(
            start,
            reads=() if source is None else (source,),
            writes=(target,),
            name="netstorm_allreduce_rows",
            priority=priority,
            skipped=skipped,
        )

    def fill(self, array: NDArray) -> None:
        """Queue that `array`, row-sparse and ours, gets all rows, zeros where it has none."""
        key = self.key

        def fill(completion: Completion) -> None:
            rows = rows_of(array)
            if len(rows) < key.spec.shape[0]:
                _write(array, [(0, Rows(rows.numbers, rows.values))], key, all_rows=True)
            completion.succeed()

        push_async(fill, reads=(), writes=(array,), name="netstorm_fill_rows")

    def compare(self, array: NDArray) -> None:
        """Have the ranks' values in `array`, which has all rows, compared behind what is queued for it."""
        key, round, runtime = self.key, self.key.last_taken, self._runtime

        def start(completion: Completion) -> None:
            values = np.ascontiguousarray(rows_of(array).values) if array.stype != "default" else None
            memory = memory_of(array) if values is None else values.reshape(-1).view(np.uint8)
            runtime.report_replica(key, round, memory)
            completion.succeed()

        push_async(start, reads=(array,), writes=(), name="netstorm_compare")


def picked_rows(stored: NDArray, row_ids: NDArray) -> NDArray:
    """Queue the choice of rows of `stored`, row-sparse and ours; return the private array they will be in.

    It has each row once that `row_ids` has, in order, zeros where there is none. Whoever reads it gets a
    `UsageError` if there is no row of such a number.

    Args:
        row_ids: a dense array of any type and shape, on any device; numbers may be in any order and repeated.
    """
    shape, dtype = tuple(stored.shape), np.dtype(stored.dtype)
    picked, ids = empty_rows(shape, dtype), private_ids(row_ids)

    def start(completion: Completion) -> None:
        wanted = row_numbers(ids, shape[0])
        have = rows_of(stored)
        made = empty_rows(shape, dtype, len(wanted))
        _fill(made, wanted, lambda values: _pick(have, wanted, values))
        replace_rows(picked, made)
        completion.succeed()

    push_async(start, reads=(stored, ids), writes=(picked,), name="netstorm_pick_rows")
    return picked


def private_ids(row_ids: NDArray) -> NDArray:
    """Queue a copy of row numbers; return the private array that it will be in."""
    with mx.autograd.pause(), mx.util.np_shape(True):
        ids = mx.nd.empty(row_ids.shape, ctx=mx.cpu(), dtype=row_ids.dtype)
        queue_copy(row_ids, ids)
    return ids


def row_numbers(ids: NDArray, count: int) -> Numbers:
    """Return the numbers in `private_ids`, rising and each once; within an operation that reads them.

    Raises:
        UsageError: there is no row of such a number among `count`.
    """
    numbers = np.unique(np.frombuffer(memory_of(ids), ids.dtype).astype(np.int64))
    return tidy(numbers, np.empty((len(numbers), 0)), count).numbers


def _pick(have: Rows, wanted: Numbers, values: Array) -> None:
    if len(have) == 0:
        values[:] = 0
        return
    places = np.minimum(np.searchsorted(have.numbers, wanted), len(have) - 1)
    np.take(have.values, places, axis=0, out=values)
    values[have.numbers[places] != wanted] = 0


def contents(source: NDArray, key: Key) -> Rows:
    """Return the rows of a private array, in order and each once; within an operation that reads it.

    Raises:
        UsageError: there is no row of such a number.
    """
    if source.stype == "default":
        rows = key.spec.shape[0]
        return Rows(np.arange(rows), np.frombuffer(memory_of(source), key.dtype).reshape(rows, -1))
    found = rows_of(source)
    return tidy(found.numbers, found.values, key.spec.shape[0])


def _write(target: NDArray, parts: RowParts, key: Key, *, all_rows: bool) -> None:
    """Give `target` the rows of a result."""
    parts.sort(key=lambda part: part[0])
    numbers = np.concatenate([np.empty(0, np.int64), *(first + rows.numbers for first, rows in parts)])
    if not (numbers[1:] > numbers[:-1]).all() or (len(numbers) and numbers[-1] >= key.spec.shape[0]):
        raise ProtocolViolation(
            f"a sum of key {key.name!r} has rows that are not in order, or that it has not"
        )

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
