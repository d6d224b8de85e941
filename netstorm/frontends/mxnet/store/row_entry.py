"""One row-sparse key of a store on this node: its value with all of its rows, and its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.arrays.last_arrays import LastArrays
from netstorm.frontends.mxnet.arrays.row_memory import empty_rows
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.store.row_arrays import check_rows, gather_rows, sum_rows
from netstorm.frontends.mxnet.store.row_rounds import RowRounds
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Key
from netstorm.protocol.chunks import ROW_SPARSE

__all__ = ["RowEntry", "RowPushes"]


class RowEntry:
    """A row-sparse key's value. It does what `Entry` does for dense keys; all methods return at once."""

    __slots__ = ("_full", "_merged", "_rounds", "_runtime", "_stored", "last", "skipped", "user_key")

    def __init__(
        self, runtime: Runtime, namespace: int, user_key: int | str, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Register the key, after `check_rows`."""
        self.user_key: Final = user_key
        self._runtime: Final = runtime
        self.last: Final = LastArrays()
        """Their arrays may be dense or row-sparse."""
        self.skipped: NDArray | None = None
        """See `Entry.skipped`."""
        key = runtime.register(namespace, str(user_key), shape, dtype, form=ROW_SPARSE)
        self._rounds: Final = RowRounds(runtime, key, self._note_skipped)
        self._stored: Final = empty_rows(shape, self.key.dtype)
        self._merged: NDArray | None = None
        """The sum of the last push, for an updater."""
        self._full = True
        """The value has all rows, as optimisers want it."""

    @property
    def key(self) -> Key:
        """The network's key."""
        return self._rounds.key

    def initialise(self, value: NDArray | None) -> None:
        """Give all ranks the value of the one rank that has one. Rows that it does not have are zeros."""
        source = None if value is None else sum_rows([value], self.key)
        self._rounds.sum(source, self._stored, all_rows=True)

    def push(
        self,
        values: Sequence[NDArray],
        *,
        priority: int,
        rule: UpdateRule | None,
        fingerprint: str,
        compression: object = None,
    ) -> None:
        """Sum `values` over devices and ranks. Call `update` afterwards if there is a rule.

        Args:
            values: arrays that fit the key, one for each device.
            priority: larger goes first on every link.
            rule: what `update` will be given; None: the sum replaces the value.
            fingerprint: of the rule.
            compression: None; rows are not compressed.
        """
        if len(values) == 1:
            self.last.pushed = values[0].handle
        source = sum_rows(values, self.key)
        if rule is None:
            self._full = False
            target = self._stored
        else:
            target = self._merged = empty_rows(self.key.spec.shape, self.key.dtype)
        self._rounds.sum(source, target, priority=priority, rule=fingerprint)

    def update(self, rule: UpdateRule) -> None:
        """Update the value with the sum of the last push. A lazy optimiser updates only the sum's rows."""
        assert self._merged is not None
        if not self._full:
            self._rounds.fill(self._stored)
            self._full = True
        round, runtime = self.key.last_taken, self._runtime
        rule.update(
            self.user_key,
            self._merged,
            self._stored,
            round=f"round {round} of {self.key.name} in store {self.key.spec.namespace}",
            rank=runtime.rank,
        )
        self._merged = None
        every = runtime.settings.compare_rounds
        if every and round % every == 0:
            self._rounds.compare(self._stored)

    def wait_for_updates(self) -> None:
        """Do nothing: the script's thread queues updates of rows, so the optimiser's state is known."""

    def pull(self, outs: Sequence[NDArray]) -> None:
        """Copy the whole value, as it is after all that was pushed before, to dense or row-sparse arrays."""
        dense: NDArray | None = None
        with mx.autograd.pause():
            for out in outs:
                self.last.pulled = out.handle
                if out.stype != "default":
                    queue_copy(self._stored, out)
                    continue
                if dense is None:
                    dense = mx.nd.cast_storage(self._stored, "default")
                queue_copy(dense, out)

    def pull_rows(self, out: NDArray, row_ids: NDArray) -> None:
        """Copy some rows of the value to a row-sparse array; see `gather_rows`."""
        picked = gather_rows(self._stored, row_ids)
        with mx.autograd.pause():
            queue_copy(picked, out)

    def _note_skipped(self, array: NDArray) -> None:
        self.skipped = array


class RowPushes:
    """Row-sparse pushes to a dense key, such as the gradients of an embedding with `sparse_grad=True`.

    They are rounds of that key in another form. The form is part of their fingerprint: if another rank pushes
    a dense array in the same round, the scheduler finds the difference and the job fails.
    """

    __slots__ = ("_merged", "_rounds", "_stored")

    def __init__(
        self, runtime: Runtime, dense: Key, stored: NDArray, on_skipped: Callable[[NDArray], None]
    ) -> None:
        """Prepare for row-sparse pushes to `dense`, whose value is `stored`; errors as `check_rows`."""
        check_rows(runtime, dense.name, dense.spec.shape)
        self._rounds: Final = RowRounds(runtime, dense, on_skipped)
        self._stored: Final = stored
        self._merged: NDArray | None = None

    def push(
        self, values: Sequence[NDArray], *, priority: int, rule: UpdateRule | None, fingerprint: str
    ) -> None:
        """Sum `values`, all row-sparse, over devices and ranks. Without a rule the sum replaces the value."""
        key = self._rounds.key
        merged = empty_rows(key.spec.shape, key.dtype)
        self._rounds.sum(
            sum_rows(values, key),
            merged,
            priority=priority,
            rule=f"{fingerprint or 'sums'} of row_sparse arrays",
        )
        if rule is None:
            with mx.autograd.pause():
                mx.nd.cast_storage(merged, "default", out=self._stored)
        else:
            self._merged = merged

    def take_sum(self) -> NDArray | None:
        """Return the sum of the last push, once; None: there was no rule, or it has been taken."""
        merged, self._merged = self._merged, None
        return merged
