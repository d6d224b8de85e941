"""The pushes of a key to its owners, and pulls from them, as operations of MXNet's engine. None blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from netstorm.compression.rows import Numbers
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.asynchronous import (
    AsyncOperation,
    PullOperation,
    Pushes,
    PushOperation,
    StatesOperation,
)
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.form import Values
from netstorm.kvstore.values.key import Array, Key

__all__ = ["Freshness", "OwnerCalls", "Target"]


@dataclass(frozen=True, slots=True)
class Freshness:
    """Which pushes must be in a pulled value, in addition to all earlier ones of this rank."""

    least: int
    """Those of this many clocks of every rank."""
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

    __slots__ = ("_gate", "_on_skipped", "_runtime", "key", "pushes")

    def __init__(self, runtime: Runtime, key: Key, on_skipped: Callable[[NDArray], None]) -> None:
        """Prepare; `on_skipped` is that of `RowRounds`."""
        self.key: Final = key
        self.pushes: Final = Pushes()
        self._runtime: Final = runtime
        self._on_skipped: Final = on_skipped
        self._gate: Final = StagingBuffer((1,), np.uint8)
        """Each push writes it, so that they are made one after the other. This bounds what other nodes buffer
        for this rank."""

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
        """
        key, rule, live = self.key, owner.rule, owner.rule.live()
        number = self.pushes.total
        self.pushes.total += 1
        self.pushes.in_clock += 1

        def operation(done: Done) -> AsyncOperation:
            return PushOperation(
                key=key,
                number=number,
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

        arrays = (array, self._gate.array, *also)
        self._queue(operation, arrays, "netstorm_push", priority, owed=f"push {number} of key {key.name!r}")

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
        key, pushed, number = self.key, self.pushes.total, self._next_pull()
        whole = owner is not None and owner.rule.whole

        def operation(done: Done) -> AsyncOperation:
            found = target()

            def ended(error: Exception | None) -> None:
                if error is None and found.finish is not None:
                    found.finish()
                done(error)

            return PullOperation(
                key=key,
                number=number,
                pushed=pushed,
                destination=found.destination,
                least=freshness.least,
                counted=freshness.counted,
                whole=whole,
                of_all=owner is None,
                rows=found.rows,
                priority=freshness.priority,
                done=ended,
            )

        self._queue(operation, arrays, "netstorm_pull", freshness.priority, reads=reads)

    def pull_states(self, array: NDArray, owner: Owner) -> dict[int, bytes]:
        """Return a dictionary that has the states of all blocks as soon as `array` of ours may be read."""
        found: dict[int, bytes] = {}
        key, whole, pushed, number = self.key, owner.rule.whole, self.pushes.total, self._next_pull()

        def operation(done: Done) -> AsyncOperation:
            return StatesOperation(
                key=key, number=number, pushed=pushed, destination=found, whole=whole, done=done
            )

        self._queue(operation, (array,), "netstorm_pull_states", 0)
        return found

    def _next_pull(self) -> int:
        self.pushes.pulls += 1
        return self.pushes.pulls - 1

    def _queue(
        self,
        operation: Callable[[Done], AsyncOperation],
        arrays: Sequence[NDArray],
        name: str,
        priority: int,
        *,
        reads: Sequence[NDArray] = (),
        owed: str = "",
    ) -> None:
        """Queue a network operation that writes `arrays`.

        `owed` names the operation if other ranks wait for it: if it cannot be made, the job fails.
        """
        runtime, on_skipped = self._runtime, self._on_skipped

        def start(completion: Completion) -> None:
            try:
                made = operation(completion.end)
            except Exception as error:
                if owed:
                    runtime.fail(f"{owed}: {error}")
                raise
            runtime.submit(made)

        def skipped() -> None:
            if owed:
                on_skipped(arrays[0])
                runtime.fail(f"{owed} cannot be made: an operation that it depends on has failed")

        push_async(start, reads=reads, writes=arrays, name=name, priority=priority, skipped=skipped)
