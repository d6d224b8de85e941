"""One row-sparse key of a store, on this node: its value, all of its rows, and its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.arrays.row_memory import empty_rows
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.store.row_rounds import RowRounds, check_rows, picked_rows, summed_rows
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Key
from netstorm.protocol.chunks import ROW_SPARSE

__all__ = ["RowEntry", "RowPushes"]


class RowEntry:
    """A row-sparse key's value. What `Entry` is for dense ones; all methods queue, and return at once."""

    __slots__ = ("_full", "_merged", "_rounds", "_runtime", "_stored", "skipped", "user_key")

    def __init__(
        self, runtime: Runtime, namespace: int, user_key: int | str, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Register the key; see `check_rows` for the errors."""
        check_rows(runtime, str(user_key), shape)
        self.user_key: Final = user_key
        self._runtime: Final = runtime
        self.skipped: NDArray | None = None
        """See `RowRounds`."""
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

    def begin_with(self, value: NDArray | None) -> None:
        """Give all ranks the value of the one that has one; rows that it has not are zeros."""
        source = None if value is None else summed_rows([value], self.key)
        self._rounds.sum(source, self._stored, all_rows=True)

    def push(
        self,
        values: Sequence[NDArray],
        *,
        priority: int,
        rule: UpdateRule | None,
        said: str,
        compression: object = None,
    ) -> None:
        """Sum `values` over devices and ranks; `update` belongs behind it.

        Args:
            rule: what `update` will be given; None: the sum replaces the value.
            said: its fingerprint.
            compression: None; rows are not compressed.
        """
        source = summed_rows(values, self.key)
        if rule is None:
            self._full = False
            target = self._stored
        else:
            target = self._merged = empty_rows(self.key.spec.shape, self.key.dtype)
        self._rounds.sum(source, target, priority=priority, rule=said)

    def update(self, rule: UpdateRule) -> None:
        """Update the value with the sum of the last push: its rows, if the optimiser is lazy."""
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

    def settle(self) -> None:
        """Updates of rows are queued by the script's thread: the optimiser's state is known."""

    def pull(self, outs: Sequence[NDArray]) -> None:
        """Copy the whole value, as it is after all that was pushed before, to dense or row-sparse arrays."""
        dense = None
        with mx.autograd.pause():
            for out in outs:
                if out.stype == "default":
                    dense = mx.nd.cast_storage(self._stored, "default") if dense is None else dense
                queue_copy(dense if out.stype == "default" else self._stored, out)

    def pull_rows(self, out: NDArray, row_ids: NDArray) -> None:
        """Copy some rows of the value to a row-sparse array; see `picked_rows`."""
        picked = picked_rows(self._stored, row_ids)
        with mx.autograd.pause():
            queue_copy(picked, out)

    def _note_skipped(self, array: NDArray) -> None:
        self.skipped = array


class RowPushes:
    """Row-sparse pushes to a dense key, such as the gradients of an embedding with `sparse_grad=True`.

    They are rounds of that key in another form. Their fingerprint says so: a rank that pushes a dense array
    in the same round is an error, which the scheduler finds.
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

    def push(self, values: Sequence[NDArray], *, priority: int, rule: UpdateRule | None, said: str) -> None:
        """Sum `values`, all row-sparse, over devices and ranks. Without a rule the sum replaces the value."""
        key = self._rounds.key
        merged = empty_rows(key.spec.shape, key.dtype)
        self._rounds.sum(
            summed_rows(values, key),
            merged,
            priority=priority,
            rule=f"{said or 'sums'} of row_sparse arrays",
        )
        if rule is None:
            with mx.autograd.pause():
                mx.nd.cast_storage(merged, "default", out=self._stored)
        else:
            self._merged = merged

    def take(self) -> NDArray | None:
        """Return the sum of the push before, once; None: that push was not row-sparse."""
        merged, self._merged = self._merged, None
        return merged
