"""The pushes of a key to its owners, and pulls from them, as operations of MXNet's engine. None blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from netstorm.compression.sparse import Numbers
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.kvstore.forms import Array, Key, Values
from netstorm.kvstore.operations import Done, PullOperation, Pushes, PushOperation, StatesOperation
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["Freshness", "Number", "OwnerCalls", "Target"]

Number: TypeAlias = Callable[[], int | None]
"""Returns the number of a push, once its values are ready; None: another rank pushes them."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """Which pushes must be in a pulled value, in addition to all earlier ones of this rank."""

    least: int | None
    """Those of this many clocks of every rank; None: of any number."""
    counted: bool
    """The script counts the clocks."""
    priority: int
    """Larger goes first on every link."""


@dataclass(slots=True)
class Target:
    """Where the values of a pull are written."""

    destination: Array
    """Flat memory for them."""
    rows: Numbers | None = None
    """The numbers of the rows to pull; None: all."""
    finish: Callable[[], None] | None = None
    """Called when the values are there, before anybody may read them."""


class OwnerCalls:
    """The pushes and pulls of one key."""

    __slots__ = ("_gate", "_on_skipped", "_runtime", "called", "key", "pushes")

    def __init__(self, runtime: Runtime, key: Key, on_skipped: Callable[[NDArray], None]) -> None:
        """Prepare; `on_skipped` is that of `RowRounds`."""
        self.key: Final = key
        self.called = 0
        """How often the script has pushed the key."""
        self.pushes: Final = Pushes()
        self._runtime: Final = runtime
        self._on_skipped: Final = on_skipped
        self._gate: Final = StagingBuffer((1,), np.uint8)
        """Each push writes it, so that they are made one after the other. This bounds what other nodes buffer
        for this rank."""

    @property
    def applied(self) -> NDArray:
        """May be read once the owners have applied all pushes that were queued before."""
        return self._gate.array

    def own(self, owner: Owner, user_key: int | str, stored: NDArray, value: Callable[[], Array]) -> None:
        """Own this rank's blocks. `value` returns the initial value; called when `stored` may be read."""
        key = self.key

        def start(completion: Completion) -> None:
            owner.own(key, user_key, value())
            completion.succeed()

        push_async(start, reads=(stored,), writes=(), name="netstorm_own")

    def push(
        self,
        array: NDArray,
        source: Callable[[], Values],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        codec: int = 0,
        threshold: float = 0.0,
        also: Sequence[NDArray] = (),
        number: Number | None = None,
    ) -> None:
        """Have the owners update their blocks.

        Args:
            array: the values, in an array of ours.
            source: returns the values in the form of `codec`; called when `array` may be read.
            owner: this store's, on this rank.
            clock: this rank's.
            priority: larger goes first on every link.
            codec: the form.
            threshold: the value of a quantised 1.
            also: arrays that `source` changes.
            number: of the push; if not given, the next one is taken now.
        """
        key, rule, live = self.key, owner.rule, owner.rule.live()
        taken = self.take_number() if number is None else None
        self.called += 1

        def begin(done: Done) -> None:
            own = taken if number is None else number()
            if own is None:
                done(None)
                return
            self._runtime.submit(
                PushOperation(
                    key=key,
                    number=own,
                    source=source(),
                    rule=rule.fingerprint,
                    live=live,
                    clock=clock,
                    whole=rule.whole,
                    codec=codec,
                    threshold=threshold,
                    priority=priority,
                    done=done,
                )
            )

        owed = f"push {self.called - 1} of key {key.name!r}"
        self.queue(begin, (array, self._gate.array, *also), "netstorm_push", priority, owed=owed)

    def take_number(self) -> int:
        """Return the number of this rank's next push. The push must follow, and pushes in their order."""
        self.pushes.total += 1
        self.pushes.in_clock += 1
        return self.pushes.total - 1

    def pull(
        self,
        arrays: Sequence[NDArray],
        target: Callable[[], Target],
        owner: Owner | None,
        freshness: Freshness,
        *,
        reads: Sequence[NDArray] = (),
    ) -> None:
        """Get the newest value.

        Args:
            arrays: what is written; arrays of ours.
            target: returns where the values go; called when `arrays` may be written and `reads` read. An
                error that it raises is one of whoever reads `arrays`, and does not fail the job.
            owner: this store's, on this rank; None: it is not known yet who owns what, so all are asked.
            freshness: what must be in the value.
            reads: arrays that `target` reads.
        """
        pushed, number = self.pushes.total, self._next_pull()

        def begin(done: Done) -> None:
            self._submit_pull(target(), owner, freshness, done, pushed=pushed, number=number)

        self.queue(begin, arrays, "netstorm_pull", freshness.priority, reads=reads)

    def pull_now(self, target: Target, owner: Owner | None, freshness: Freshness, done: Done) -> None:
        """Get the newest value, with all pushes that have taken a number: within an operation of the engine,
        on any thread. Arguments are those of `pull`; `done` hears of the end.
        """
        pushed, number = self.pushes.total, self._next_pull()
        self._submit_pull(target, owner, freshness, done, pushed=pushed, number=number)

    def pull_states(self, array: NDArray, owner: Owner) -> dict[int, bytes]:
        """Return a dictionary that has the states of all blocks as soon as `array` of ours may be read."""
        found: dict[int, bytes] = {}
        key, whole, pushed, number = self.key, owner.rule.whole, self.pushes.total, self._next_pull()

        def begin(done: Done) -> None:
            self._runtime.submit(
                StatesOperation(
                    key=key, number=number, pushed=pushed, destination=found, whole=whole, done=done
                )
            )

        self.queue(begin, (array,), "netstorm_pull_states", 0)
        return found

    def queue(
        self,
        begin: Callable[[Done], None],
        arrays: Sequence[NDArray],
        name: str,
        priority: int,
        *,
        reads: Sequence[NDArray] = (),
        owed: str = "",
    ) -> None:
        """Queue an operation of the engine that writes `arrays`, of ours.

        Args:
            begin: begins what ends with a call of `Done`. It must not block.
            arrays: what it may use until then.
            name: for MXNet's profiler.
            priority: larger goes first on every link.
            reads: what it reads.
            owed: names the operation if other ranks wait for it: if it cannot begin, the job fails.
        """
        runtime, on_skipped = self._runtime, self._on_skipped

        def start(completion: Completion) -> None:
            try:
                begin(completion.end)
            except Exception as error:
                if owed:
                    runtime.fail(f"{owed}: {error}")
                raise

        def skipped() -> None:
            if owed:
                on_skipped(arrays[0])
                runtime.fail(f"{owed} cannot be made: an operation that it depends on has failed")

        push_async(start, reads=reads, writes=arrays, name=name, priority=priority, skipped=skipped)

    def _submit_pull(
        self,
        target: Target,
        owner: Owner | None,
        freshness: Freshness,
        done: Done,
        *,
        pushed: int,
        number: int,
    ) -> None:
        def ended(error: Exception | None) -> None:
            if error is None and target.finish is not None:
                target.finish()
            done(error)

        self._runtime.submit(
            PullOperation(
                key=self.key,
                number=number,
                pushed=pushed,
                destination=target.destination,
                least=freshness.least,
                counted=freshness.counted,
                whole=owner is not None and owner.rule.whole,
                of_all=owner is None,
                rows=target.rows,
                priority=freshness.priority,
                done=ended,
            )
        )

    def _next_pull(self) -> int:
        self.pushes.pulls += 1
        return self.pushes.pulls - 1
