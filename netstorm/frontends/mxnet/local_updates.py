"""One dense key whose value this rank updates alone, and averages now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from netstorm import clock
from netstorm.compression.codec import Codec, Floats, Place, Rounds
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import is_dense
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.frontends.mxnet.local_updates.changes import (
    Changes,
    divide_by_contributors,
    forget_the_past,
)
from netstorm.frontends.mxnet.local_updates.schedule import Average
from netstorm.frontends.mxnet.store.entry import Entry
from netstorm.frontends.mxnet.store.row_arrays import sum_rows
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.calls import EncodedSum, Sites, SiteSums, TensorCalls, run_in_turn, set_memory
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Done, Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.codecs import COLLECTIVE

__all__ = ["DueAverage", "LocalEntry", "check_averages", "site_sums"]

Memory: TypeAlias = npt.NDArray[Any]

Begin: TypeAlias = Callable[[Memory, Done], None]
"""Begins an average in the memory of the value, flat, and calls `Done` when it is there."""


def _nothing() -> None:
    """Stand in for what nobody has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueAverage:
    """An average that is due after a step."""

    over: Average
    """The ranks."""
    sites: Sites
    """Of the job."""
    rule: str
    """Of the schedule, the codec and the optimizer; ranks must agree."""
    hierarchical: bool
    """An average of all is formed within sites first, and crosses the WAN once a site."""
    is_newcomer: bool = False
    """This rank has joined an elastic job later: it is in no average of a site."""
    priority: int = 0
    """Larger goes first on every link."""
    codec: Codec | None = None
    """How changes travel; None: values do, as they are."""
    begins: Callable[[], None] = _nothing
    """Called when this rank's value is there, on a thread of the engine."""
    ends: Callable[[], None] = _nothing
    """Called when the average is there, on any thread."""


def check_averages(store: str, key: object, value: object) -> None:
    """Check that new keys have values that ranks of a site can sum.

    Args:
        store: the class, for the message.
        key: of the call.
        value: an array, or one for each key.

    Raises:
        UsageError: an array is sparse, or of whole numbers.
    """
    for given in value if isinstance(value, (list, tuple)) else [value]:
        array = cast("Any", given)
        if isinstance(array, mx.nd.NDArray) and (
            array.stype != "default" or not np.issubdtype(array.dtype, np.floating)
        ):
            raise UsageError(
                f"init of key {key!r} with a {array.stype} array of {np.dtype(array.dtype)}: {store} takes "
                "dense values of float16, float32 and float64"
            )


def site_sums(runtime: Runtime, key: Key, sites: Sites) -> SiteSums:
    """Return the sums of a key's tensor within a site and across sites; all ranks ask for them alike. In an
    elastic job only those that have begun it do.
    """

    def register(name: str, elements: int, members: tuple[int, ...]) -> Key:
        return runtime.register(
            key.spec.namespace, name, (elements,), "float32", form=COLLECTIVE, members=members
        )

    of_all = not runtime.node.requests.live.is_elastic
    return SiteSums(key.name, key.elements, key.dtype, sites, register=register, of_all=of_all)


class LocalEntry(Entry):
    """A key's value on this rank. Its own rounds are averages, not sums of gradients."""

    __slots__ = ("_across", "_changes", "_gradient", "_knows_base", "_sums")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._gradient: StagingBuffer | None = None
        self._sums: SiteSums | None = None
        self._across: TensorCalls | None = None
        """Of the leaders' sums under a codec."""
        self._changes: Final = Changes()
        self._knows_base = False
        """All ranks have had the same value, which `Changes` remembers."""

    def step(self, values: Sequence[NDArray], rule: UpdateRule) -> None:
        """Sum gradients over this rank's devices, and update the value with the sum."""
        if all(is_dense(value) for value in values):
            if self._gradient is None:
                self._gradient = StagingBuffer(self.key.spec.shape, self.key.dtype)
            self._gradient.sum_of(values, self.last)
            total = self._gradient.array
        else:
            total = sum_rows(values, self.key)
        rule.update(self.user_key, total, self._stored.array, round="", rank=self._runtime.rank)

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over what a checkpoint or the other ranks have; a value is one that all ranks get."""
        super().restore(value, residual, rounds)
        if value is not None and self._knows_base:
            self.remember()

    def remember(self) -> None:
        """Have changes count from the value as it is after all that is queued now: all ranks have it."""
        self._knows_base = True
        stored, changes = self._stored, self._changes

        def start(completion: Completion) -> None:
            changes.remember(np.frombuffer(stored.memory(), np.float32))
            completion.succeed()

        push_async(start, reads=(stored.array,), writes=(self.kept.array,), name="netstorm_remember")

    def average(self, due: DueAverage) -> None:
        """Queue the replacement of the value by an average."""
        sites, over_all = due.sites, due.over is Average.ALL
        if self.key.elements == 0:
            return
        across = due.hierarchical and self.elastic is None and len(sites.leaders) < sites.size
        if not over_all:
            if due.is_newcomer:
                return
            name = f"{self.key.name} under {due.rule}"
            operations = self._of_sites(sites).average_within(name, due.priority)
            if operations:
                self._queue(due, self._in_turn(operations), operations[0].round)
            return
        if self.elastic is None and sites.size == 1:
            return
        # Changes count from a value that all ranks have. Before the first such average there is none.
        leaders = len(sites.leaders) if across else sites.size
        encodes = due.codec is not None and self._knows_base and (leaders > 1 or self.elastic is not None)
        if across:
            begin, round = self._across_sites(due, due.codec if encodes else None)
        elif encodes:
            begin, round = self._encoded_average(due)
        else:
            begin, round = self._plain_average(due)
        self._knows_base = encodes
        self._queue(due, begin, round)
        if due.codec is not None and not encodes:
            self.remember()

    # ------------------------------------------------------------------------------------ ways to average

    def _plain_average(self, due: DueAverage) -> tuple[Begin, int]:
        """Return the average of values along the job's trees, and the number of its round."""
        operation = Operation(
            key=self.key,
            round=self.key.take_round(),
            source=None,
            destination=None,
            done=_ignore,
            priority=due.priority,
            rule=due.rule,
        )
        runtime = self._runtime

        def begin(memory: Memory, done: Done) -> None:
            def divide() -> None:
                divide_by_contributors(operation, memory)
                self._note_contributors(operation.contributors)
                done(None)

            operation.source = operation.destination = memory
            operation.done = lambda error: runtime.computing.run(divide) if error is None else done(error)
            runtime.submit(operation)

        return begin, operation.round

    def _encoded_average(self, due: DueAverage) -> tuple[Begin, int]:
        """Return the average of changes along the job's trees, and the number of its first round."""
        assert due.codec is not None
        encoded, changes, rank = self._encoded_by(due.codec), self._changes, self._runtime.rank
        total = encoded.next_sum(due.priority, due.rule)
        state = self.kept.state

        def begin(memory: Memory, done: Done) -> None:
            def rounds() -> Rounds:
                yield from changes.rounds(memory, total, lambda change: encoded.rounds(change, total, None))
                counted = [ranks for _, ranks in total.counted(len(memory))]
                self._note_contributors(counted)
                if not any(ranks >> rank & 1 for ranks in counted):
                    forget_the_past(state)

            total.begin(rounds(), done)

        return begin, total.number

    def _across_sites(self, due: DueAverage, codec: Codec | None) -> tuple[Begin, int]:
        """Return the average that is formed within sites first, and the number of its first round."""
        sites, runtime, changes = due.sites, self._runtime, self._changes
        sums, name = self._of_sites(sites), f"{self.key.name} under {due.rule}"
        if codec is None:
            operations = sums.across(name, due.priority)
            summed = self._in_turn(operations)

            def begin_plain(memory: Memory, done: Done) -> None:
                def divide() -> None:
                    with np.errstate(all="ignore"):
                        memory[:] /= memory.dtype.type(sites.size)
                    done(None)

                summed(
                    memory,
                    lambda error: runtime.computing.run(divide) if error is None else done(error),
                )

            return begin_plain, operations[0].round
        within, after = sums.within(name, due.priority), sums.from_leader(name, due.priority)
        total = self._leaders_sum(due, codec) if sites.is_leader else None
        gathered, given = self._in_turn(within), self._in_turn(after)

        def begin(memory: Memory, done: Done) -> None:
            def keep(error: Exception | None) -> None:
                if error is None and not sites.is_leader:
                    changes.remember(memory)
                done(error)

            def give(error: Exception | None) -> None:
                if error is not None:
                    done(error)
                else:
                    given(memory, keep)

            def add_up() -> None:
                if total is None:
                    given(memory, keep)
                else:
                    total.begin(self._leaders_rounds(memory, total, codec, sites), give)

            gathered(memory, lambda error: runtime.computing.run(add_up) if error is None else done(error))

        first = within[0].round if within else total.number if total is not None else 0
        return begin, first

    def _leaders_sum(self, due: DueAverage, codec: Codec) -> EncodedSum:
        """Return the next sum of sites' changes, among one rank of each."""
        runtime, key = self._runtime, self.key

        def register(name: str, shape: tuple[int, ...], form: int, members: tuple[int, ...]) -> Key:
            return runtime.register(key.spec.namespace, name, shape, "float32", form=form, members=members)

        if self._across is None:
            self._across = TensorCalls(f"{key.name}/leaders", due.sites.leaders, size=-1, register=register)
        return EncodedSum(
            self._across.keys_of(codec.fingerprint, key.spec.shape, codec),
            submit=runtime.submit,
            later=runtime.computing.run,
            fail=runtime.fail,
            priority=due.priority,
            rule=due.rule,
        )

    def _leaders_rounds(self, memory: Floats, total: EncodedSum, codec: Codec, sites: Sites) -> Rounds:
        place = Place(
            self.key.spec.shape, len(sites.leaders), self._runtime.rank, total.number, clock.monotonic
        )
        state = self.kept.state
        yield from self._changes.rounds(
            memory,
            total,
            lambda change: codec.rounds(change, state, place),
            weight=len(sites.local),
            count=sites.size,
        )

    # --------------------------------------------------------------------------------------------- helpers

    def _queue(self, due: DueAverage, begin: Begin, round: int) -> None:
        stored, residual, dtype = self._stored, self.kept, self.key.dtype

        def start(completion: Completion) -> None:
            due.begins()

            def done(error: Exception | None) -> None:
                due.ends()
                completion.end(error)

            begin(np.frombuffer(stored.memory(), dtype), done)

        push_async(
            start,
            reads=(),
            writes=(stored.array, residual.array),
            name="netstorm_average",
            priority=due.priority,
            skipped=lambda: self._skip(stored, round),
        )

    def _in_turn(self, operations: Sequence[Operation]) -> Begin:
        """Return what runs operations of sites one after the other."""
        submit = self._runtime.submit

        def begin(memory: Memory, done: Done) -> None:
            set_memory(operations, memory)
            run_in_turn(operations, submit, done)

        return begin

    def _of_sites(self, sites: Sites) -> SiteSums:
        if self._sums is None:
            self._sums = site_sums(self._runtime, self.key, sites)
        return self._sums

    def _note_contributors(self, parts: Iterable[int]) -> None:
        """Record who is in all parts of an average."""
        found = -1
        for ranks in parts:
            found &= ranks
        self.contributors = max(found, 0)


_ignore: Final[Done] = lambda _: None  # noqa: E731 -- replaced before the operation is submitted
