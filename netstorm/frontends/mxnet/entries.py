"""One dense key of a store on this node: its value, and its rounds as operations of MXNet's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.codec import Codec
from netstorm.frontends.mxnet.arrays.gil_calls import is_dense, queue_copy
from netstorm.frontends.mxnet.arrays.last_arrays import LastArrays
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic.round_results import RoundResults
from netstorm.frontends.mxnet.engine.operations import (
    Completion,
    NDArray,
    Operands,
    push_async,
    push_on,
)
from netstorm.frontends.mxnet.engine.startup import RUNS_INLINE
from netstorm.frontends.mxnet.store.gradient_compression import EncodedKey, GradientCompression, Residual
from netstorm.frontends.mxnet.store.row_arrays import sum_rows
from netstorm.frontends.mxnet.store.row_entry import RowPushes
from netstorm.frontends.mxnet.updates.deferred_update import DeferredUpdate, UpdatedArrays
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.forms import Key, Values
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.messages import LossTerms

__all__ = ["Entry"]


class Entry:
    """A key's value, and the array that its sums arrive in.

    All methods but `wait_for_updates` queue operations and return at once. Two kinds of push wait for earlier
    updates: the first row-sparse one, and the first under another update rule.
    """

    __slots__ = (
        "_arrays",
        "_encoded",
        "_has_deferred",
        "_may_defer",
        "_merged",
        "_residual",
        "_rounds_before",
        "_rows",
        "_runtime",
        "_stored",
        "_total",
        "contributors",
        "elastic",
        "first_rounds",
        "holds_sum",
        "key",
        "last",
        "pushed_in",
        "skipped",
        "tensor_name",
        "user_key",
    )

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        self.key: Final = key
        self.user_key: Final = user_key
        self.tensor_name = key.name
        """Of the parameter that the key holds, if the optimizer knows it: what rules of compression name."""
        self.last: Final = LastArrays()
        """Their arrays are dense."""
        self.skipped: NDArray | None = None
        """The array of a round that was skipped, because an operation of the script's has failed. Reading it
        raises that failure."""
        self.elastic: RoundResults | None = None
        """Of an elastic job."""
        self.contributors = 0
        """In an elastic job: bit set of the ranks whose values are in the last complete round."""
        self.first_rounds: Mapping[str, int] = {}
        """In an elastic job: the first rounds, by name, of all keys that there were before this rank came."""
        self.pushed_in = -1
        """In an elastic job: the step in which the key was last pushed."""
        self.holds_sum = False
        """In an elastic job: the value is the last sum, since there is no updater."""
        self._runtime: Final = runtime
        self._stored: Final = StagingBuffer(key.spec.shape, key.dtype)
        self._may_defer: Final = not RUNS_INLINE and self._stored.may_have_alias
        """Another thread may queue its updates."""
        self._merged: StagingBuffer | None = None
        """The sum, for an updater. Made at the first push: a key of a frozen layer never has one."""
        self._total: NDArray | None = None
        """The sum that `update` is to use; None if another thread queues the update."""
        self._has_deferred = False
        """There may be rounds whose update another thread has yet to queue."""
        self._arrays: UpdatedArrays | None = None
        """Made for the first update that another thread queues."""
        self._residual: Residual | None = None
        """Made at the first push under gradient compression, or without late gradients."""
        self._encoded: EncodedKey | None = None
        """Made at the first push under gradient compression."""
        self._rows: RowPushes | None = None
        """Made at the first row-sparse push."""
        self._rounds_before = 0
        """Rounds before a checkpoint that are not counted by the key."""

    @property
    def value(self) -> NDArray:
        """The value, as it is after all that was pushed before; not to be changed."""
        return self._stored.array

    @property
    def residual(self) -> dict[str, NDArray] | None:
        """What gradient compression keeps of the key, by name; None: nothing. Waits for the last push."""
        return None if self._residual is None else self._residual.values()

    @property
    def kept(self) -> Residual:
        """What compression keeps, or would."""
        if self._residual is None:
            self._residual = Residual()
        return self._residual

    @property
    def rounds(self) -> int:
        """The number of the last round, counted on from a checkpoint."""
        return self._rounds_before + self._last_push

    @property
    def further_keys(self) -> list[Key]:
        """The keys that a codec needs besides this one, in each push."""
        return [] if self._encoded is None else self._encoded.further

    @property
    def has_deferred(self) -> bool:
        """Whether there may be rounds whose update another thread has yet to queue."""
        return self._has_deferred

    def initialise(self, value: NDArray | None) -> None:
        """Give all ranks the value of the one rank that has one; the others contribute zeros. In an elastic
        job all have one, and get that of the lowest rank: it may die.
        """
        if value is not None:
            self._stored.copy_from(value)
        self._allreduce(self._stored, contributes=value is not None, from_lowest=self.elastic is not None)

    def push(
        self,
        values: Sequence[NDArray],
        *,
        priority: int,
        rule: UpdateRule | None,
        fingerprint: str,
        compression: GradientCompression | None = None,
        loss: LossTerms | None = None,
    ) -> None:
        """Sum `values` over devices and ranks. Call `update` afterwards if there is a rule.

        Args:
            values: arrays that fit the key, one for each device.
            priority: larger goes first on every link.
            rule: what `update` will be given; None: the sum replaces the value.
            fingerprint: of the rule and the compression.
            compression: of what this node sends; None: none.
            loss: how late gradients are treated; None: all are waited for. Rows, compressed gradients and
                whole numbers are waited for in any case.
        """
        if compression is not None or not np.issubdtype(self.key.dtype, np.floating):
            loss = None
        last = self.last
        if len(values) != 1 or values[0].handle is not last.pushed:
            dense = [is_dense(value) for value in values]
            if not any(dense):
                if self._rows is None:
                    self._rows = RowPushes(self._runtime, self.key, self._stored.array, self._note_skipped)
                self._rows.push(
                    values, priority=priority, rule=rule, fingerprint=fingerprint, follow=self._follow
                )
                self._total = self._rows.take_sum()
                return
            if not all(dense):
                values = [sum_rows(values, self.key)]
        if rule is None:
            # The sum replaces the stored value: it travels there, and is not copied again.
            self._stored.sum_of(values, last)
            self._allreduce(
                self._stored, priority=priority, rule=fingerprint, compression=compression, loss=loss
            )
            return
        if self._merged is None:
            self._merged = StagingBuffer(self.key.spec.shape, self.key.dtype)
        merged = self._merged
        merged.sum_of(values, last)
        # Where both are pushed, updates with dense sums are queued at once, as those with rows are.
        captured = rule.capture(self.user_key) if self._may_defer and self._rows is None else None
        if captured is None:
            self._allreduce(merged, priority=priority, rule=fingerprint, compression=compression, loss=loss)
            self._total = merged.array
            return
        if self._arrays is None:
            self._arrays = UpdatedArrays(merged, self._stored)
        update = DeferredUpdate(self._runtime, rule, captured, self._arrays, self.key.name)
        self._has_deferred = True
        self._allreduce(
            merged, priority=priority, rule=fingerprint, compression=compression, loss=loss, update=update
        )

    def update(self, rule: UpdateRule) -> None:
        """Update the value with the sum of the last push."""
        key = self.key
        round, runtime = self._last_push, self._runtime
        total, self._total = self._total, None
        if total is not None:
            self.wait_for_updates()
            rule.update(
                self.user_key,
                total,
                self._stored.array,
                round=f"round {self.rounds} of {key.name} in store {key.spec.namespace}",
                rank=runtime.rank,
            )
        every = runtime.settings.compare_rounds
        if every and round % every == 0:
            self._compare_replicas(key)

    def wait_for_updates(self) -> None:
        """Wait until another thread has queued all updates, and they are made: the state is then known."""
        if self._has_deferred:
            self._stored.array.wait_to_read()
            self._has_deferred = False

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over what a checkpoint has: the value (None: leave it), what compression had kept, the last
        round.
        """
        if value is not None:
            self._stored.copy_from(value)
        if residual is not None:
            self.kept.restore(residual)
        self._rounds_before = rounds - self._last_push

    def pull(self, outs: Sequence[NDArray]) -> None:
        """Copy the value, as it is after all that was pushed before."""
        last = self.last
        for out in outs:
            if out.handle is last.pulled or is_dense(out):
                last.pulled = out.handle
                self._stored.copy_to(out)
            else:
                with mx.autograd.pause():
                    queue_copy(mx.nd.cast_storage(self._stored.array, "row_sparse"), out)

    def _allreduce(
        self,
        array: StagingBuffer,
        *,
        priority: int = 0,
        rule: str = "",
        contributes: bool = True,
        from_lowest: bool = False,
        compression: GradientCompression | None = None,
        loss: LossTerms | None = None,
        update: DeferredUpdate | None = None,
    ) -> None:
        """Queue the network operation: `array` becomes the sum of the `array`s of all ranks that contribute.

        With `update` the value is updated with the sum, in the same round.
        """
        key, runtime = self.key, self._runtime
        codec = None if compression is None else compression.codec_of(self.tensor_name)
        if codec is not None:
            self._push_encoded(array, codec, priority=priority, rule=rule, update=update)
            return
        round = key.take_round()
        uncounted = None if loss is None else self.kept

        def start(completion: Completion) -> None:
            memory = np.frombuffer(array.memory(), key.dtype)
            source: Values | None = memory if contributes else None
            if uncounted is not None:
                source = uncounted.with_uncounted(memory)
            if update is not None:
                update.begin(completion)

            operation = Operation(
                key=key,
                round=round,
                source=source,
                destination=memory,
                done=completion.end if update is None else update.sum_arrived,
                priority=priority,
                rule=rule,
                from_lowest=from_lowest,
                loss=loss,
            )
            self._follow(operation)
            runtime.submit(operation)

        def skipped() -> None:
            self._skip(array, round)

        push_on(
            self._operands(array, uncounted, update),
            start,
            name="netstorm_allreduce",
            priority=priority,
            skipped=skipped,
        )

    def _push_encoded(
        self,
        array: StagingBuffer,
        codec: Codec,
        *,
        priority: int,
        rule: str,
        update: DeferredUpdate | None,
    ) -> None:
        """Queue the rounds of a codec: `array` becomes the sum of the `array`s of all ranks."""
        encoded, residual, elastic = self._encoded_by(codec), self.kept, self.elastic
        total = encoded.next_sum(priority, rule)

        def follow(gradient: npt.NDArray[np.float32], contributors: int) -> None:
            if elastic is not None:
                elastic.follow_sum(gradient, contributors, self)

        def start(completion: Completion) -> None:
            if update is not None:
                update.begin(completion)
            gradient = np.frombuffer(array.memory(), np.float32)
            total.begin(
                encoded.rounds(gradient, total, follow),
                completion.end if update is None else update.sum_arrived,
            )

        push_on(
            self._operands(array, residual, update),
            start,
            name="netstorm_allreduce",
            priority=priority,
            skipped=lambda: self._skip(array, total.number),
        )

    def _encoded_by(self, codec: Codec) -> EncodedKey:
        """Return the key with the further ones that a codec needs, which is used from now on."""
        if self._encoded is None or self._encoded.codec is not codec:
            rounds = self.rounds
            self._encoded = EncodedKey(self._runtime, self.key, codec, self.kept, self.first_rounds)
            self._rounds_before += rounds - self.rounds
        return self._encoded

    def _skip(self, array: StagingBuffer, round: int) -> None:
        """End the job: this rank cannot take part in a round."""
        self.skipped = array.array
        self._runtime.fail(
            f"round {round} of key {self.key.name!r} has nothing to send: an operation that it depends on "
            "has failed"
        )

    def _operands(
        self, array: StagingBuffer, residual: Residual | None, update: DeferredUpdate | None
    ) -> Operands:
        if update is not None and residual is None:
            return update.operands
        writes = [array.array]
        if residual is not None:
            writes.append(residual.array)
        if update is not None:
            writes.append(self._stored.array)
        return Operands((), writes)

    @property
    def _last_push(self) -> int:
        """The number of the last push."""
        counted_by = self.key if self._encoded is None else self._encoded.counted_by
        return self.key.last_taken if counted_by is self.key else counted_by.last_taken + 1

    def _follow(self, operation: Operation) -> None:
        if self.elastic is not None:
            self.elastic.follow(operation, self)

    def _note_skipped(self, array: NDArray) -> None:
        self.skipped = array

    def _compare_replicas(self, key: Key) -> None:
        """Have the ranks' values after this round compared, behind the update that is queued."""
        round, runtime, stored = key.last_taken, self._runtime, self._stored

        def start(completion: Completion) -> None:
            runtime.report_replica(key, round, np.frombuffer(stored.memory(), np.uint8))
            completion.succeed()

        push_async(start, reads=(stored.array,), writes=(), name="netstorm_compare")
