"""One key of an asynchronous store on this node: its value as it was pulled last, and its pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from netstorm.compression.quantised import Signs
from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.arrays.row_memory import empty_rows, replace_rows, rows_of
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.asynchronous.calls import Freshness, Number, OwnerCalls, Target
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.store.entry import Entry
from netstorm.frontends.mxnet.store.gradient_compression import GradientCompression
from netstorm.frontends.mxnet.store.row_arrays import (
    check_rows,
    sorted_row_ids,
    sorted_rows,
    staged_row_ids,
    sum_rows,
)
from netstorm.frontends.mxnet.store.row_entry import RowEntry
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.codecs import QUANTISED, ROW_SPARSE

__all__ = ["AsyncEntry", "AsyncRowEntry"]


class AsyncEntry(Entry):
    """A dense key. Row-sparse arrays may be pushed to it, too."""

    __slots__ = ("_gradient", "calls")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self.calls: Final = OwnerCalls(runtime, key, self._note_skipped)
        self._gradient: StagingBuffer | None = None

    def own(self, owner: Owner) -> None:
        """Own this rank's blocks of the initial value, which is here. Called before any pull from owners."""
        stored = self._stored
        self.calls.own(owner, self.user_key, stored.array, lambda: self._flat(stored))

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: GradientCompression | None = None,
    ) -> None:
        """Sum `values` over devices, and have the owners update their blocks with it."""
        if len(values) != 1 or values[0].handle is not self.last.pushed:
            sparse = [value.stype == "row_sparse" for value in values]
            if any(sparse):
                check_rows(self._runtime, self.key.name, self.key.spec.shape)
                summed = sum_rows(values, self.key)
                if all(sparse):
                    _push_rows(self.calls, summed, owner, clock, priority)
                    return
                values = [summed]
        if self._gradient is None:
            self._gradient = StagingBuffer(self.key.spec.shape, self.key.dtype)
        gradient = self._gradient
        gradient.sum_of(values, self.last)
        number = self._number_of(gradient, owner, priority)
        if compression is None:
            self.calls.push(
                gradient.array,
                lambda: self._flat(gradient),
                owner,
                clock=clock,
                priority=priority,
                number=number,
            )
            return
        residual, codec = self.kept, compression.two_bit_of(self.tensor_name)

        def quantised() -> Signs:
            return residual.quantise(self._flat(gradient).view(np.float32), codec)

        self.calls.push(
            gradient.array,
            quantised,
            owner,
            clock=clock,
            priority=priority,
            codec=QUANTISED,
            threshold=float(codec.threshold),
            also=(residual.array,),
            number=number,
        )

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Copy the newest value to `outs`. `owner` is None if this rank does not know who owns what."""
        stored = self._stored
        self.calls.pull((stored.array,), lambda: Target(self._flat(stored)), owner, freshness)
        self.pull(outs)

    def pull_states(self, owner: Owner) -> tuple[NDArray, dict[int, bytes]]:
        """Return an array, and a dictionary that has the owners' states by block once it may be read."""
        array = mx.nd.zeros((1,))
        return array, self.calls.pull_states(array, owner)

    def _number_of(self, gradient: StagingBuffer, owner: Owner, priority: int) -> Number | None:
        """Return the number of a push of `gradient`, if that is not the next one."""
        return None

    def _flat(self, array: StagingBuffer) -> Array:
        return np.frombuffer(array.memory(), self.key.dtype)


class AsyncRowEntry(RowEntry):
    """A row-sparse key."""

    __slots__ = ("calls",)

    def __init__(
        self, runtime: Runtime, namespace: int, user_key: int | str, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Register the key; see `RowEntry`."""
        super().__init__(runtime, namespace, user_key, shape, dtype)
        self.calls: Final = OwnerCalls(runtime, self.key, self._note_skipped)

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over a value, with all its rows: a pull writes those of owners there. See `RowEntry`."""
        super().restore(value, residual, rounds)
        self._rounds.fill(self._stored)

    def own(self, owner: Owner) -> None:
        """Own this rank's blocks of the initial value, which is here. Called before any pull from owners."""
        stored = self._stored
        self.calls.own(owner, self.user_key, stored, lambda: rows_of(stored).values.reshape(-1))

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: object = None,
    ) -> None:
        """Sum `values` over devices, and have the owners update the rows that they have with it."""
        _push_rows(self.calls, sum_rows(values, self.key), owner, clock, priority)

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Copy the newest value, all of its rows, to `outs`; see `AsyncEntry.pull_from_owners`."""
        stored = self._stored
        self.calls.pull((stored,), lambda: Target(rows_of(stored).values.reshape(-1)), owner, freshness)
        self.pull(outs)

    def pull_rows_from_owners(
        self, out: NDArray, row_ids: NDArray, owner: Owner, freshness: Freshness
    ) -> None:
        """Copy rows of the newest value to a row-sparse array; only these are sent. See `gather_rows`."""
        key = self.key
        picked, ids = empty_rows(key.spec.shape, key.dtype), staged_row_ids(row_ids)

        def target() -> Target:
            numbers = sorted_row_ids(ids, key.spec.shape[0])
            made = empty_rows(key.spec.shape, key.dtype, len(numbers))
            new = rows_of(made)
            new.numbers[:] = numbers
            return Target(new.values.reshape(-1), numbers, lambda: replace_rows(picked, made))

        self.calls.pull((picked,), target, owner, freshness, reads=(ids,))
        with mx.autograd.pause():
            queue_copy(picked, out)

    def pull_states(self, owner: Owner) -> tuple[NDArray, dict[int, bytes]]:
        """Return the owners' states; see `AsyncEntry.pull_states`."""
        array = mx.nd.zeros((1,))
        return array, self.calls.pull_states(array, owner)


def _push_rows(calls: OwnerCalls, summed: NDArray, owner: Owner, clock: int, priority: int) -> None:
    calls.push(
        summed,
        lambda: sorted_rows(summed, calls.key),
        owner,
        clock=clock,
        priority=priority,
        codec=ROW_SPARSE,
    )
