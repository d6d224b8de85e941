"""One row-sparse key of a store on this node: its value with all of its rows, and its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.arrays.last_arrays import LastArrays
from netstorm.frontends.mxnet.arrays.row_memory import empty_rows
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic.round_results import RoundResults
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.store.row_arrays import check_rows, gather_rows, sum_rows
from netstorm.frontends.mxnet.store.row_rounds import Follow, RowRounds
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.codecs import ROW_SPARSE

__all__ = ["RowEntry", "RowPushes"]


class RowEntry:
    """A row-sparse key's value. It does what `Entry` does for dense keys; all methods return at once."""

    __slots__ = (
        "_full",
        "_merged",
        "_rounds",
        "_rounds_before",
        "_runtime",
        "_stored",
        "contributors",
        "elastic",
        "first_rounds",
        "holds_sum",
        "last",
        "pushed_in",
        "skipped",
        "user_key",
    )

    def __init__(
        self, runtime: Runtime, namespace: int, user_key: int | str, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Register the key, after `check_rows`."""
        self.user_key: Final = user_key
        self._runtime: Final = runtime
        self.last: Final = LastArrays()
        """Their arrays may be dense or row-sparse."""
        self.skipped: NDArray | None = None
        """See `Entry`, as for the next four."""
        self.elastic: RoundResults | None = None
        self.contributors = 0
        self.first_rounds: Mapping[str, int] = {}
        self.pushed_in = -1
        self.holds_sum = False
        key = runtime.register(namespace, str(user_key), shape, dtype, form=ROW_SPARSE)
        self._rounds: Final = RowRounds(runtime, key, self._note_skipped)
        self._stored: Final = empty_rows(shape, self.key.dtype)
        self._merged: NDArray | None = None
        """The sum of the last push, for an updater."""
        self._full = True
        """The value has all rows, as optimizers want it."""
        self._rounds_before = 0
        """See `Entry`."""

    @property
    def value(self) -> NDArray:
        """The value, as it is after all that was pushed before; not to be changed."""
        return self._stored

    @property
    def further_keys(self) -> list[Key]:
        """None: rows are not compressed."""
        return []

    @property
    def kept(self) -> None:
        """None: rows are not compressed."""

    @property
    def tensor_name(self) -> str:
        """What rules of compression name."""
        return self.key.name

    @property
    def residual(self) -> dict[str, NDArray] | None:
        """None: rows are not compressed."""
        return None

    @property
    def rounds(self) -> int:
        """The number of the last round, counted on from a checkpoint."""
        return self._rounds_before + self.key.last_taken

    @property
    def key(self) -> Key:
        """The network's key."""
        return self._rounds.key

    @property
    def has_deferred(self) -> bool:
        """False: the script's thread queues all updates of rows."""
        return False

    def initialise(self, value: NDArray | None) -> None:
        """Give all ranks the value of the one rank that has one (see `Entry`). Rows that it does not have are
        zeros.
        """
        source = None if value is None else sum_rows([value], self.key)
        self._rounds.sum(source, self._stored, all_rows=True, from_lowest=self.elastic is not None)

    def push(
        self,
        values: Sequence[NDArray],
        *,
        priority: int,
        rule: UpdateRule | None,
        fingerprint: str,
        compression: object = None,
        loss: object = None,
    ) -> None:
        """Sum `values` over devices and ranks. Call `update` afterwards if there is a rule.

        Args:
            values: arrays that fit the key, one for each device.
            priority: larger goes first on every link.
            rule: what `update` will be given; None: the sum replaces the value.
            fingerprint: of the rule.
            compression: None; rows are not compressed.
            loss: ignored: rows are always waited for.
        """
        if len(values) == 1:
            self.last.pushed = values[0].handle
        source = sum_rows(values, self.key)
        if rule is None:
            self._full = False
            target = self._stored
        else:
            target = self._merged = empty_rows(self.key.spec.shape, self.key.dtype)
        self._rounds.sum(source, target, priority=priority, rule=fingerprint, follow=self._follow)

    def update(self, rule: UpdateRule) -> None:
        """Update the value with the sum of the last push. A lazy optimizer updates only the sum's rows."""
        assert self._merged is not None
        if not self._full:
            self._rounds.fill(self._stored)
            self._full = True
        round, runtime = self.key.last_taken, self._runtime
        rule.update(
            self.user_key,
            self._merged,
            self._stored,
            round=f"round {self.rounds} of {self.key.name} in store {self.key.spec.namespace}",
            rank=runtime.rank,
        )
        self._merged = None
        every = runtime.settings.compare_rounds
        if every and round % every == 0:
            self._rounds.compare(self._stored)

    def wait_for_updates(self) -> None:
        """Do nothing: the script's thread queues updates of rows, so the optimizer's state is known."""

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over what a checkpoint has: the value (None: leave it), and the number of the last round."""
        if value is not None:
            with mx.autograd.pause():
                queue_copy(value, self._stored)
            self._full = False
        self._rounds_before = rounds - self.key.last_taken

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

    def _follow(self, operation: Operation) -> None:
        if self.elastic is not None:
            self.elastic.follow(operation, self)

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
        self,
        values: Sequence[NDArray],
        *,
        priority: int,
        rule: UpdateRule | None,
        fingerprint: str,
        follow: Follow | None = None,
    ) -> None:
        """Sum `values`, all row-sparse, over devices and ranks. Without a rule the sum replaces the value.
        `follow` is called with the operation before it begins.
        """
        key = self._rounds.key
        merged = empty_rows(key.spec.shape, key.dtype)
        self._rounds.sum(
            sum_rows(values, key),
            merged,
            priority=priority,
            rule=f"{fingerprint or 'sums'} of row_sparse arrays",
            follow=follow,
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
