"""One key of an asynchronous store, on this node: how its pushes and pulls travel through MXNet's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from netstorm.frontends.mxnet.engine import Completion, NDArray, push_async
from netstorm.frontends.mxnet.entry import Entry
from netstorm.frontends.mxnet.owner import Owner
from netstorm.frontends.mxnet.private import PrivateArray
from netstorm.kvstore.async_operation import AsyncOperation, PullOperation, Pushes, PushOperation
from netstorm.kvstore.keys import Key
from netstorm.kvstore.runtime import Runtime

__all__ = ["AsyncEntry"]


class AsyncEntry(Entry):
    """A key's value as it was when it was pulled last, and the array that is being pushed."""

    __slots__ = ("_gradient", "pushes")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self.pushes: Final = Pushes()
        self._gradient: PrivateArray | None = None

    def own(self, owner: Owner) -> None:
        """Keep what this rank owns of the initial value, which is here. Before any pull from owners."""
        key, stored, user_key = self.key, self._stored, self.user_key

        def start(completion: Completion) -> None:
            owner.keep(key, user_key, np.frombuffer(stored.memory(), key.dtype))
            completion.succeed()

        push_async(start, reads=(stored.array,), writes=(), name="netstorm_own")

    def push_to_owners(self, values: Sequence[NDArray], owner: Owner, *, clock: int, priority: int) -> None:
        """Sum `values` over devices, and have the owners update their blocks with it."""
        if self._gradient is None:
            self._gradient = PrivateArray(self.key.spec.shape, self.key.dtype)
        gradient, key, rule, live = self._gradient, self.key, owner.rule, owner.rule.live()
        number = self.pushes.total
        self.pushes.total += 1
        self.pushes.in_clock += 1
        gradient.sum_of(values)

        def start(completion: Completion) -> None:
            self._submit(
                PushOperation(
                    key=key,
                    number=number,
                    source=np.frombuffer(gradient.memory(), key.dtype),
                    rule=rule.text,
                    live=live,
                    clock=clock,
                    whole=rule.whole,
                    priority=priority,
                    done=completion.end,
                )
            )

        self._queue(start, gradient, "netstorm_push", priority, f"push {number}")

    def pull_from_owners(
        self, outs: Sequence[NDArray], owner: Owner, *, least: int, counted: bool, priority: int
    ) -> None:
        """Copy the newest value to `outs`: with all that this rank has pushed before, and with so many clocks
        of every rank.
        """
        key, stored, whole, pushed = self.key, self._stored, owner.rule.whole, self.pushes.total
        number = self.pushes.pulls
        self.pushes.pulls += 1

        def start(completion: Completion) -> None:
            self._submit(
                PullOperation(
                    key=key,
                    number=number,
                    pushed=pushed,
                    destination=np.frombuffer(stored.memory(), key.dtype),
                    least=least,
                    counted=counted,
                    whole=whole,
                    priority=priority,
                    done=completion.end,
                )
            )

        self._queue(start, stored, "netstorm_pull", priority, f"pull {number}")
        self.pull(outs)

    def _submit(self, operation: AsyncOperation) -> None:
        self._runtime.submit(operation)

    def _queue(
        self, start: Callable[[Completion], None], array: PrivateArray, name: str, priority: int, what: str
    ) -> None:
        """Queue an operation of the network on an array, which is its own until it ends."""
        runtime, key = self._runtime, self.key

        def skipped() -> None:
            self.skipped = array.array
            runtime.fail(f"{what} of {key.name} cannot be made: an operation that it depends on has failed")

        push_async(start, reads=(), writes=(array.array,), name=name, priority=priority, skipped=skipped)
