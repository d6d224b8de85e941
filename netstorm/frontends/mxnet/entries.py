"""The keys of a store on this node, dense and row-sparse: values, and rounds as engine operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm import clock
from netstorm.compression.auto import Auto
from netstorm.compression.codec import AGREED, AnyArray, Codec, GradientPlace, Rounds, State, Uncompressed
from netstorm.compression.quantised import Signs, TwoBit, quantised
from netstorm.compression.registry import CODECS, CodecRules, rules_of
from netstorm.compression.sparse import Array, BySize, Numbers, Rows, tidy
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays import (
    LastArrays,
    StagingBuffer,
    check_supported,
    empty_rows,
    is_dense,
    memory_of,
    queue_copy,
    replace_rows,
    rows_of,
)
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import RUNS_INLINE, Completion, NDArray, Operands, push_async, push_on
from netstorm.frontends.mxnet.updates import CalledUpdater, DeferredUpdate, UpdatedArrays
from netstorm.kvstore.calls import Agreed, EncodedSum, TensorKeys, encoded_keys
from netstorm.kvstore.forms import Key, RowParts, Values
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime, describe_compression
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.messages import LossTerms
from netstorm.training.round_results import StoreRoundResults

__all__ = [
    "AnyEntry",
    "EncodedKey",
    "Entry",
    "GradientCompression",
    "KeyState",
    "RowEntry",
    "check_rows",
    "compression_of",
    "gather_rows",
    "sorted_row_ids",
    "sorted_rows",
    "staged_row_ids",
    "sum_rows",
]


# What dense and row-sparse keys of a store have in common.


class KeyState:
    """A key on this node: what is known of its rounds."""

    __slots__ = (
        "_register",
        "_rounds_before",
        "_runtime",
        "contributors",
        "elastic",
        "first_rounds",
        "has_deferred",
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
        self.skipped: NDArray | None = None
        """The array of a round that was skipped, because an operation of the script's has failed. Reading it
        raises that failure."""
        self.elastic: StoreRoundResults | None = None
        """Of an elastic job."""
        self.contributors = 0
        """In an elastic job: bit set of the ranks whose values are in the last complete round."""
        self.first_rounds: Mapping[str, int] = {}
        """In an elastic job: the first rounds, by name, of all keys that there were before this rank came."""
        self.pushed_in = -1
        """The step in which the key was last pushed, if the job is elastic."""
        self.holds_sum = False
        """In an elastic job: the value is the last sum, since there is no updater."""
        self.has_deferred = False
        """There may be rounds whose update another thread has yet to queue."""
        self._register: Final = functools.partial(runtime.register, key.spec.namespace)
        """Makes another key of the store known to the job."""
        self._runtime: Final = runtime
        self._rounds_before = 0
        """Rounds before a checkpoint that are not counted by the key."""

    @property
    def rounds(self) -> int:
        """The number of the last round, counted on from a checkpoint."""
        return self._rounds_before + self._last_push

    @property
    def _last_push(self) -> int:
        """The number of the last push."""
        return self.key.last_taken

    def _update(self, rule: CalledUpdater, total: NDArray, stored: NDArray) -> None:
        rule.update(
            self.user_key,
            total,
            stored,
            round=f"round {self.rounds} of {self.key.name} in store {self.key.spec.namespace}",
            rank=self._runtime.rank,
        )

    @property
    def _is_compared(self) -> bool:
        """Whether the ranks' values after this round are to be compared."""
        every = self._runtime.settings.compare_rounds
        return bool(every) and self._last_push % every == 0

    def _follow(self, operation: Operation) -> None:
        if self.elastic is not None:
            self.elastic.follow(operation, self)

    def _skip(self, array: NDArray, round: int) -> None:
        """End the job: this rank cannot take part in a round."""
        self.skipped = array
        self._runtime.fail(
            f"round {round} of key {self.key.name!r} has nothing to send: an operation that it depends on "
            "has failed"
        )

    def _sum_rows(
        self,
        source: NDArray | None,
        target: NDArray,
        *,
        priority: int = 0,
        rule: str = "",
        all_rows: bool = False,
        from_lowest: bool = False,
    ) -> None:
        """Queue the network operation: `target` gets the sum of the `source`s of all ranks.

        Args:
            source: a result of `sum_rows`; None: this rank has no rows.
            target: a row-sparse array of ours.
            priority: larger goes first on every link.
            rule: fingerprint of what will be done with the sum.
            all_rows: `target` gets all rows, zeros where no rank has one.
            from_lowest: only the lowest rank of the job contributes its rows.
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

            def done(error: Exception | None) -> None:
                try:
                    if error is None and not completion.done:
                        write_rows(target, parts, key, all_rows=all_rows)
                except Exception as problem:  # noqa: BLE001 -- no memory, most likely; the engine must hear
                    error = problem
                completion.end(error)

            operation = Operation(
                key=key,
                round=round,
                source=rows,
                destination=parts,
                done=done,
                priority=priority,
                rule=rule,
                form=key.forms[ROW_SPARSE],
                from_lowest=from_lowest,
            )
            self._follow(operation)
            runtime.submit(operation)

        push_async(
            start,
            reads=() if source is None else (source,),
            writes=(target,),
            name="netstorm_allreduce_rows",
            priority=priority,
            skipped=lambda: self._skip(target, round),
        )

    def _fill_rows(self, array: NDArray) -> None:
        """Queue that `array`, a row-sparse one of ours, gets all rows, zeros where it has none."""
        key = self.key

        def fill(completion: Completion) -> None:
            rows = rows_of(array)
            if len(rows) < key.spec.shape[0]:
                write_rows(array, [(0, Rows(rows.numbers, rows.values))], key, all_rows=True)
            completion.succeed()

        push_async(fill, reads=(), writes=(array,), name="netstorm_fill_rows")

    def _compare(self, array: NDArray) -> None:
        """Have the ranks' values in `array`, which has all rows, compared behind what is queued for it."""
        key, round, runtime = self.key, self.key.last_taken, self._runtime

        def start(completion: Completion) -> None:
            values = np.ascontiguousarray(rows_of(array).values) if array.stype != "default" else None
            memory = memory_of(array) if values is None else values.reshape(-1).view(np.uint8)
            runtime.report_replica(key, round, memory)
            completion.succeed()

        push_async(start, reads=(array,), writes=(), name="netstorm_compare")


# One dense key of a store on this node: its value, and its rounds as operations of MXNet's engine.


class Entry(KeyState):
    """A key's value, and the array that its sums arrive in.

    All methods but `wait_for_updates` queue operations and return at once. Two kinds of push wait for earlier
    updates: the first row-sparse one, and the first under another update rule.
    """

    __slots__ = (
        "_arrays",
        "_encoded",
        "_has_row_pushes",
        "_may_defer",
        "_merged",
        "_residual",
        "_stored",
        "_total",
    )

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._stored: Final = StagingBuffer(key.spec.shape, key.dtype, runtime.staging)
        self._may_defer: Final = not RUNS_INLINE and self._stored.may_have_alias
        """Another thread may queue its updates."""
        self._merged: StagingBuffer | None = None
        """The sum, for an updater. Made at the first push: a key of a frozen layer never has one."""
        self._total: NDArray | None = None
        """The sum that `update` is to use; None if another thread queues the update."""
        self._arrays: UpdatedArrays | None = None
        """Made for the first update that another thread queues."""
        self._residual: Residual | None = None
        """Made at the first push under gradient compression, or without late gradients."""
        self._encoded: EncodedKey | None = None
        """Made at the first push under gradient compression."""
        self._has_row_pushes = False
        """There has been a row-sparse push."""

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
    def further_keys(self) -> list[Key]:
        """The keys that a codec needs besides this one, in each push."""
        return [] if self._encoded is None else self._encoded.further

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
        rule: CalledUpdater | None,
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
                self._push_rows(values, priority, rule, fingerprint)
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
            self._merged = StagingBuffer(self.key.spec.shape, self.key.dtype, self._runtime.staging)
        merged = self._merged
        merged.sum_of(values, last)
        # Where both are pushed, updates with dense sums are queued at once, as those with rows are.
        captured = rule.capture(self.user_key) if self._may_defer and not self._has_row_pushes else None
        if captured is None:
            self._allreduce(merged, priority=priority, rule=fingerprint, compression=compression, loss=loss)
            self._total = merged.array
            return
        if self._arrays is None:
            self._arrays = UpdatedArrays(merged, self._stored)
        update = DeferredUpdate(self._runtime, rule, captured, self._arrays, self.key.name)
        self.has_deferred = True
        self._allreduce(
            merged, priority=priority, rule=fingerprint, compression=compression, loss=loss, update=update
        )

    def update(self, rule: CalledUpdater) -> None:
        """Update the value with the sum of the last push."""
        total, self._total = self._total, None
        if total is not None:
            self.wait_for_updates()
            self._update(rule, total, self._stored.array)
        if self._is_compared:
            self._compare(self._stored.array)

    def wait_for_updates(self) -> None:
        """Wait until another thread has queued all updates, and they are made: the state is then known."""
        if self.has_deferred:
            self._stored.array.wait_to_read()
            self.has_deferred = False

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

    def _push_rows(
        self, values: Sequence[NDArray], priority: int, rule: CalledUpdater | None, fingerprint: str
    ) -> None:
        """Sum row-sparse arrays, such as the gradients of an embedding with `sparse_grad=True`.

        That is a round of the key in another form, which is part of its fingerprint: if another rank pushes a
        dense array in the same round, the scheduler finds the difference and the job fails.
        """
        key = self.key
        if not self._has_row_pushes:
            check_rows(self._runtime, key.name, key.spec.shape)
            self._has_row_pushes = True
        merged = empty_rows(key.spec.shape, key.dtype)
        form = f"{fingerprint or 'sums'} of row_sparse arrays"
        self._sum_rows(sum_rows(values, key), merged, priority=priority, rule=form)
        if rule is None:
            with mx.autograd.pause():
                mx.nd.cast_storage(merged, "default", out=self._stored.array)
        else:
            self._total = merged

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
        codec = None if compression is None else compression.codec_of(self.tensor_name, key.spec.shape)
        if codec is not None:
            self._push_encoded(array, codec, priority=priority, rule=rule, update=update)
            return
        round = key.take_round()
        uncounted = None if loss is None else self.kept

        def start(completion: Completion) -> None:
            memory = array.values()
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

        push_on(
            self._operands(array, uncounted, update),
            start,
            name="netstorm_allreduce",
            priority=priority,
            skipped=lambda: self._skip(array.array, round),
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
            skipped=lambda: self._skip(array.array, total.number),
        )

    def _encoded_by(self, codec: Codec) -> EncodedKey:
        """Return the key with the further ones that a codec needs, which is used from now on."""
        if self._encoded is None or self._encoded.codec is not codec:
            rounds = self.rounds
            self._encoded = EncodedKey(self._runtime, self.key, codec, self.kept, self.first_rounds)
            self._rounds_before += rounds - self.rounds
        return self._encoded

    def _operands(
        self, array: StagingBuffer, residual: Residual | None, update: DeferredUpdate | None
    ) -> Operands:
        if update is not None and residual is None:
            return update.arrays.operands
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


# `set_gradient_compression`: which key travels how, and what that keeps of each key.

Floats = npt.NDArray[np.float32]


class GradientCompression:
    """How the pushes of a store travel: a codec for each key."""

    def __init__(self, rules: CodecRules) -> None:
        self._rules: Final = rules
        self._codecs: Final[dict[tuple[str, tuple[int, ...]], Codec | None]] = {}
        self.measures: Final = any(isinstance(codec, Auto) for codec in rules.codecs)
        """Which codec a gradient has depends on what is measured."""
        text = rules.fingerprint.removeprefix("*: ") if len(rules.codecs) == 1 else rules.fingerprint
        self.description: Final = text + (", which measures first" if self.measures else "")
        """For a person."""
        self.fingerprint: Final = f" compression={rules.fingerprint}"
        """Part of the fingerprint of a round: all ranks must compress alike."""

    def codec_of(self, name: str, shape: tuple[int, ...]) -> Codec | None:
        """Return the codec of a key; None: it travels as it is.

        Args:
            name: of the key, or of the parameter that it holds.
            shape: of its value.

        Raises:
            UsageError: no pattern matches it.
        """
        if (name, shape) not in self._codecs:
            codec = self._rules.of(name)
            if isinstance(codec, BySize):
                codec = codec.of(shape)
            self._codecs[name, shape] = None if type(codec) is Uncompressed else codec
        return self._codecs[name, shape]

    def form(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the codec of most rounds of a key."""
        codec = self.codec_of(name, shape)
        return 0 if codec is None else codec.form(shape) or 0

    def check_key(self, key: Key, what: str, name: str | None = None) -> None:
        """Check that a key can be compressed; MXNet has the same limit.

        Raises:
            UsageError: its type is not float32.
        """
        if self.codec_of(name or key.name, key.spec.shape) is not None and (
            key.dtype != np.float32 or key.spec.form == ROW_SPARSE
        ):
            raise UsageError(
                f"{what} of key {key.name!r}, which is {key.spec.dtype}: gradient compression is for dense "
                "float32 only, as MXNet's is; exempt such keys by a rule such as "
                "{'NAME': 'none', '*': …}, or keep them in a store without it"
            )

    def check_for_owners(self) -> None:
        """Check that an asynchronous store, which applies pushes one by one, can use these codecs.

        Raises:
            UsageError: there is another one than 2bit.
        """
        for codec in self._rules.codecs:
            if not isinstance(codec, TwoBit):
                raise UsageError(
                    f"gradient compression {codec.name!r} in an asynchronous store, which knows '2bit' only"
                )

    def two_bit_of(self, name: str, shape: tuple[int, ...]) -> TwoBit:
        """Return the codec of a key of an asynchronous store."""
        codec = self.codec_of(name, shape)
        assert isinstance(codec, TwoBit), f"{name} has {codec}"
        return codec


class Residual:
    """What compression keeps of a key on this node from one push to the next."""

    def __init__(self) -> None:
        self.array: Final[NDArray] = mx.nd.zeros((1,))
        """Written by each operation that changes what is kept, so that MXNet's engine keeps their order."""
        self.state: Final[State] = {}
        """Of the codec; to be used by those operations."""
        self.keys: TensorKeys | None = None
        """Those of the codec."""

    def values(self) -> dict[str, NDArray] | None:
        """Return what is kept, after all that is queued; None: nothing."""
        self.array.wait_to_read()
        with mx.util.np_shape(True):
            return {name: mx.nd.array(kept, dtype=kept.dtype) for name, kept in self.state.items()} or None

    def restore(self, values: Mapping[str, NDArray]) -> None:
        """Begin with what was kept before."""
        self.array.wait_to_read()
        self.state.update({name: np.array(kept.asnumpy(), order="C") for name, kept in values.items()})

    def agreed(self) -> Agreed | None:
        """Return what the codec has agreed on with the other ranks; None: nothing. No push may be under
        way.
        """
        return None if self.keys is None else Agreed.of(self.keys, self.state)

    def begin_agreed(self, state: AnyArray) -> None:
        """Begin with what the other ranks have agreed on, before the first push."""
        self.state[AGREED] = np.array(state)

    def with_uncounted(self, gradient: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a gradient and what came too late of those before. What is counted becomes zero."""
        kept = self.state.get("uncounted")
        if kept is None:
            kept = self.state["uncounted"] = np.zeros_like(gradient)
        kept += gradient
        return kept

    def quantise(self, gradient: Floats, codec: TwoBit) -> Signs:
        """Return what a push to owners sends of a gradient, and keep the rest."""
        rest = self.state.get("residual")
        if rest is None:
            rest = self.state["residual"] = np.zeros(gradient.size, np.float32)
        return quantised(gradient, rest, codec.threshold)


class EncodedKey:
    """A key whose gradients travel under a codec, and its further keys."""

    def __init__(
        self, runtime: Runtime, key: Key, codec: Codec, residual: Residual, first: Mapping[str, int]
    ) -> None:
        """Register the further keys.

        Args:
            runtime: of this process.
            key: the key itself.
            codec: how its gradients travel.
            residual: what that keeps.
            first: the first rounds of further keys that the job has had before this rank came, by name.
        """

        def register(name: str, shape: tuple[int, ...], form: int) -> Key:
            further = runtime.register(key.spec.namespace, name, shape, "float32", form=form)
            if name in first:
                further.begin_at(first[name])
            return further

        self.codec: Final = codec
        self.residual: Final = residual
        self._runtime: Final = runtime
        self._shape: Final = key.spec.shape
        self._keys: Final = encoded_keys(codec, key, register)
        residual.keys = self._keys

    @property
    def counted_by(self) -> Key:
        """The key whose rounds count the pushes: the key's own, or a further one."""
        return self._keys.counting

    @property
    def further(self) -> list[Key]:
        """The further keys that each push has a round of."""
        occasional = self._keys.occasional
        return [key for key in self._keys.keys[1:] if key is not None and key not in occasional]

    def next_sum(self, priority: int, rule: str) -> EncodedSum:
        """Take the numbers of the rounds of the next push, on the thread that pushes."""
        return EncodedSum(
            self._keys,
            submit=self._runtime.submit,
            later=self._runtime.computing.run,
            fail=self._runtime.fail,
            priority=priority,
            rule=rule,
        )

    def rounds(
        self, gradient: Floats, total: EncodedSum, then: Callable[[Floats, int], None] | None
    ) -> Rounds:
        """Return the rounds that make a gradient the sum, in place.

        Args:
            gradient: flat.
            total: the sum.
            then: called with the sum and the bit set of its ranks.
        """
        runtime = self._runtime
        places = runtime.settings.places
        place = GradientPlace(self._shape, places, runtime.rank, total.number, clock.monotonic)
        yield from self.codec.rounds(gradient, self.residual.state, place)
        if isinstance(self.codec, Auto) and (news := self.codec.take_news()):
            describe_compression(runtime, f"auto: {news}")
        if then is not None:
            then(gradient, total.contributors)


def compression_of(parameters: object, *, size_lower_bound: int) -> GradientCompression:
    """Return the compression that the parameters of `set_gradient_compression` describe.

    Args:
        parameters: a dictionary with `type` and the parameters of that codec; or one with patterns of keys'
            names, and the codec of each. Further parameters of 2bit are ignored, as MXNet does.
        size_lower_bound: of bsc and mpq, unless they are given one.

    Raises:
        UsageError: another type, or a bad parameter.
    """
    if not isinstance(parameters, dict):
        raise UsageError(
            f"gradient compression takes a dictionary such as {{'type': '2bit', 'threshold': 0.5}}, "
            f"not {parameters!r}"
        )
    known = ", ".join(f"'{name}'" for name in CODECS)
    if "type" in parameters and str(parameters["type"]) not in CODECS:
        raise UsageError(
            f"Unknown type for gradient compression {parameters['type']!r}; NetStorm knows {known}"
        )
    if "type" not in parameters and not (
        parameters and all(isinstance(described, (str, Mapping)) for described in parameters.values())
    ):
        raise UsageError(f"gradient compression {parameters!r} has no type; NetStorm knows {known}")
    if "type" in parameters:
        described = _tidied(parameters, size_lower_bound)
    else:
        described = {pattern: _tidied(codec, size_lower_bound) for pattern, codec in parameters.items()}
    return GradientCompression(rules_of(described))


def _tidied(codec: str | Mapping[str, Any], size_lower_bound: int) -> dict[str, Any]:
    """Return the description of one codec as the registry takes it."""
    described = {"type": codec} if isinstance(codec, str) else dict(codec)
    name = str(described.get("type"))
    if name in {"bsc", "mpq"}:
        return {"size_lower_bound": size_lower_bound, **described}
    if name != "2bit":
        return described
    return {name: given for name, given in described.items() if name in {"type", "threshold"}}


# Row-sparse values as operations of MXNet's engine: summing, choosing, reading and writing rows.


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
        count = key.spec.shape[0]
        return Rows(np.arange(count), np.frombuffer(memory_of(source), key.dtype).reshape(count, -1))
    rows = rows_of(source)
    return tidy(rows.numbers, rows.values, key.spec.shape[0])


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


# One row-sparse key of a store on this node: its value with all of its rows, and its rounds.


class RowEntry(KeyState):
    """A row-sparse key's value. It does what `Entry` does for dense keys; all methods return at once."""

    __slots__ = ("_full", "_merged", "_stored")

    # Rows are not compressed.
    kept: Final = None
    residual: Final = None
    further_keys: Final[tuple[Key, ...]] = ()

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        """Begin with a key that was registered after `check_rows`."""
        super().__init__(runtime, key, user_key)
        self._stored: Final = empty_rows(key.spec.shape, key.dtype)
        self._merged: NDArray | None = None
        """The sum of the last push, for an updater."""
        self._full = True
        """The value has all rows, as optimizers want it."""

    @property
    def value(self) -> NDArray:
        """The value, as it is after all that was pushed before; not to be changed."""
        return self._stored

    def initialise(self, value: NDArray | None) -> None:
        """Give all ranks the value of the one rank that has one (see `Entry`). Rows that it does not have are
        zeros.
        """
        source = None if value is None else sum_rows([value], self.key)
        self._sum_rows(source, self._stored, all_rows=True, from_lowest=self.elastic is not None)

    def push(
        self,
        values: Sequence[NDArray],
        *,
        priority: int,
        rule: CalledUpdater | None,
        fingerprint: str,
        compression: object = None,
        loss: object = None,
    ) -> None:
        """Sum `values` over devices and ranks; see `Entry.push`. Rows are not compressed, and always waited
        for.
        """
        if len(values) == 1:
            self.last.pushed = values[0].handle
        source = sum_rows(values, self.key)
        if rule is None:
            self._full = False
            target = self._stored
        else:
            target = self._merged = empty_rows(self.key.spec.shape, self.key.dtype)
        self._sum_rows(source, target, priority=priority, rule=fingerprint)

    def update(self, rule: CalledUpdater) -> None:
        """Update the value with the sum of the last push. A lazy optimizer updates only the sum's rows."""
        assert self._merged is not None
        if not self._full:
            self._fill_rows(self._stored)
            self._full = True
        self._update(rule, self._merged, self._stored)
        self._merged = None
        if self._is_compared:
            self._compare(self._stored)

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


AnyEntry: TypeAlias = Entry | RowEntry
