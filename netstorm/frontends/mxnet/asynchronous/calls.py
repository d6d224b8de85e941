"""A key's pushes to its owners, and pulls from them, as operations of MXNet's engine. Nothing here blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
from netstorm.kvstore.values.key import Array, Key

__all__ = ["OwnerCalls", "Target", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pull must have in it, beside all that this rank has pushed before."""

    least: int
    """So many clocks of every rank."""
    counted: bool
    """Clocks are those that the script counts."""
    priority: int
    """Larger goes first on every link."""


@dataclass(slots=True)
class Target:
    """Where a pull's values go."""

    destination: Array
    """Flat memory for them."""
    rows: Numbers | None = None
    """The numbers of those that are wanted; None: all."""
    finish: Callable[[], None] | None = None
    """Called when the values are there, before anybody may read them."""


class OwnerCalls:
    """Those of one key."""

    __slots__ = ("_gate", "_on_skipped", "_runtime", "key", "pushes")

    def __init__(self, runtime: Runtime, key: Key, on_skipped: Callable[[NDArray], None]) -> None:
        """Begin with none; `on_skipped` as for `RowRounds`."""
        self.key: Final = key
        self.pushes: Final = Pushes()
        self._runtime: Final = runtime
        self._on_skipped: Final = on_skipped
        self._gate: Final = StagingBuffer((1,), np.uint8)
        """Written by each push: what nodes keep for a rank is bounded if it makes one after the other."""

    def own(self, owner: Owner, user_key: int | str, stored: NDArray, value: Callable[[], Array]) -> None:
        """Keep what this rank owns of the initial value, which `value` returns when `stored` may be read."""
        key = self.key

        def start(completion: Completion) -> None:
            owner.keep(key, user_key, value())
            completion.succeed()

        push_async(start, reads=(stored,), writes=(), name="netstorm_own")

    def push(
        self,
        array: NDArray,
        source: Callable[[], Any],
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
            array: what is pushed; ours.
            source: returns what the form of `codec` takes, when `array` may be read.
            owner: of this store on this rank.
            clock: of this rank.
            priority: larger goes first on every link.
            codec: the form.
            threshold: what a quantised 1 stands for.
            also: what `source` changes.
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
                rule=rule.text,
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
        owner: Owner,
        wanted: Wanted,
        *,
        reads: Sequence[NDArray] = (),
    ) -> None:
        """Get the newest value.

        Args:
            arrays: what is written, ours.
            target: returns where the values go, when `arrays` may be written and `reads` be read. If it
                raises, that is an error of whoever reads `arrays`, and of nobody else.
            owner: of this store on this rank.
            wanted: what must be in the value.
            reads: what `target` looks at.
        """
        key, whole, pushed, number = self.key, owner.rule.whole, self.pushes.total, self._next_pull()

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
                least=wanted.least,
                counted=wanted.counted,
                whole=whole,
                rows=found.rows,
                priority=wanted.priority,
                done=ended,
            )

        self._queue(operation, arrays, "netstorm_pull", wanted.priority, reads=reads)

    def pull_states(self, array: NDArray, owner: Owner) -> dict[int, bytes]:
        """Return what will have the states of all blocks when `array`, which is ours, may be read."""
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
        """Queue an operation of the network on arrays, which are its own until it ends.

        `owed` says what others wait for: if it cannot be made the job has failed.
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
