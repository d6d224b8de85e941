"""Rounds of a key of which some rows travel, as operations of MXNet's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from netstorm.compression.sparse import Rows
from netstorm.frontends.mxnet.arrays.row_memory import rows_of
from netstorm.frontends.mxnet.arrays.staging import memory_of
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.frontends.mxnet.store.row_arrays import sorted_rows, write_rows
from netstorm.kvstore.forms import Key, RowParts
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.codecs import ROW_SPARSE

__all__ = ["Follow", "RowRounds"]

Follow = Callable[[Operation], None]


class RowRounds:
    """Rounds of one key. All methods queue operations and return at once."""

    __slots__ = ("_on_skipped", "_runtime", "key")

    def __init__(self, runtime: Runtime, key: Key, on_skipped: Callable[[NDArray], None]) -> None:
        """Prepare.

        Args:
            runtime: of this process.
            key: registered, after `check_rows`; dense or row-sparse.
            on_skipped: called with the array of a round that was skipped, because an operation of the
                script's has failed. Reading that array raises that failure. Called in a thread of the engine.
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
        from_lowest: bool = False,
        follow: Follow | None = None,
    ) -> None:
        """Queue the network operation: `target` gets the sum of the `source`s of all ranks.

        Args:
            source: a result of `sum_rows`; None: this rank has no rows.
            target: a row-sparse array of ours.
            priority: larger goes first on every link.
            rule: fingerprint of what will be done with the sum.
            all_rows: `target` gets all rows, zeros where no rank has one.
            from_lowest: only the lowest rank of the job contributes its rows.
            follow: called with the operation before it begins, in a thread of the engine.
        """
        key, runtime = self.key, self._runtime
        round = key.take_round()

        def start(completion: Completion) -> None:
            try:
                rows = None if source is None else sorted_rows(source, key)
            except Exception as error:  # the other ranks wait for what this rank cannot send
                runtime.fail(f"round {round} of key {key.name!r}: {error}")
                raise
            parts: RowParts = []
            operation = Operation(
                key=key,
                round=round,
                source=rows,
                destination=parts,
                done=_write_when_done(completion, target, parts, key, all_rows=all_rows),
                priority=priority,
                rule=rule,
                form=key.forms[ROW_SPARSE],
                from_lowest=from_lowest,
            )
            if follow is not None:
                follow(operation)
            runtime.submit(operation)

        push_async(
            start,
            reads=() if source is None else (source,),
            writes=(target,),
            name="netstorm_allreduce_rows",
            priority=priority,
            skipped=lambda: self._skipped(target, round),
        )

    def _skipped(self, target: NDArray, round: int) -> None:
        """End the job: what a round depends on has failed, and the other ranks wait for it."""
        self._on_skipped(target)
        self._runtime.fail(
            f"round {round} of key {self.key.name!r} has nothing to send: an operation that it depends on "
            "has failed"
        )

    def fill(self, array: NDArray) -> None:
        """Queue that `array`, a row-sparse one of ours, gets all rows, zeros where it has none."""
        key = self.key

        def fill(completion: Completion) -> None:
            rows = rows_of(array)
            if len(rows) < key.spec.shape[0]:
                write_rows(array, [(0, Rows(rows.numbers, rows.values))], key, all_rows=True)
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


def _write_when_done(
    completion: Completion, target: NDArray, parts: RowParts, key: Key, *, all_rows: bool
) -> Callable[[Exception | None], None]:
    """Return the `done` of a network operation: it writes the result to `target` and ends the round."""

    def done(error: Exception | None) -> None:
        try:
            if error is None and not completion.done:
                write_rows(target, parts, key, all_rows=all_rows)
        except Exception as problem:  # noqa: BLE001 -- no memory, most likely; the engine must hear of it
            error = problem
        completion.end(error)

    return done
