"""The blocks that this rank owns, in MXNet's arrays, and the thread that applies pushes to them.

An optimiser is Python code that queues operations on MXNet's engine, and some optimisers wait for values.
Other ranks' gradients must not block the script's thread, nor an optimiser the I/O thread. So updates have a
thread of their own. When a rank pulls a value, the engine makes a copy behind the updates that belong in it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from netstorm.compression.rows import Rows
from netstorm.frontends.mxnet.arrays.row_memory import filled_rows, rows_of
from netstorm.frontends.mxnet.arrays.staging import memory_of
from netstorm.frontends.mxnet.asynchronous.owned_rule import BlockPlace, OwnedRule
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.kvstore.asynchronous.gradients import Gradient
from netstorm.kvstore.asynchronous.owners import chunks_of, extent, has_whole_rows
from netstorm.kvstore.process.lifetime import after_close
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Array, Key
from netstorm.protocol.chunks import ROW_SPARSE, row_length
from netstorm.protocol.frames import Buffer

__all__ = ["Owner"]

_JOIN_S: Final = 10.0
"""For an update to end, when this process does."""

_log: Final = logging.getLogger(__name__)


class Owner:
    """All blocks that one store owns on this rank."""

    def __init__(self, runtime: Runtime, rule: OwnedRule) -> None:
        """Begin with no blocks; `rule` updates them."""
        self.rule = rule
        """May be replaced while no rank has a push or pull outstanding."""
        self.runtime: Final = runtime
        self._calls: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: Final = threading.Thread(target=self._run, name="netstorm-owner", daemon=True)
        self._thread.start()
        after_close(self.stop)

    def own(self, key: Key, user_key: int | str, initial: Array) -> None:
        """Copy this rank's blocks of a key's initial value, and begin to serve them.

        The key is known to the job. `initial` must not change before this returns.
        """
        owners, whole = self.runtime.node.requests.asynchronous.owners, self.rule.whole
        values: dict[int, Array] = {}
        for block in owners.blocks(key, whole=whole):
            if owners.owner(key, block) == self.runtime.rank:
                chunks = chunks_of(key, block, whole=whole)
                values[block] = initial[extent(key, chunks[0])[0] : extent(key, chunks[-1])[1]].copy()

        def serve() -> None:
            blocks = _BlockStore(self, key, user_key, values)
            self.runtime.post(lambda node, _: node.requests.asynchronous.serve(key, blocks))

        self.call(serve)

    def call(self, function: Callable[[], None]) -> None:
        """Have the owner's thread call a function. From any thread; does not wait."""
        self._calls.put(function)

    def stop(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 -- a user's rule may fail in any way
                _log.exception("an update of a block that this rank owns has failed")
                self.runtime.fail(f"its update rule has failed: {type(error).__name__}: {error}")


class _BlockStore:
    """The blocks of one key. See `netstorm.kvstore.asynchronous.serving.Keeper`."""

    def __init__(self, owner: Owner, key: Key, user_key: int | str, values: dict[int, Array]) -> None:
        self._owner: Final = owner
        self._key: Final = key
        self._blocks: Final = {block: self._stored(value) for block, value in values.items()}
        self._places: Final = {
            block: BlockPlace(user_key, block, key.spec.shape, extent(key, block)[0]) for block in values
        }

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""
        return self._owner.rule.fingerprint

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole tensors."""
        return self._owner.rule.whole

    def apply(
        self, block: int, gradient: Gradient, live: tuple[float, ...], done: Callable[[], None]
    ) -> None:
        """Have a block updated by the owner's thread."""

        def update() -> None:
            stored = self._blocks[block]
            if isinstance(gradient, Rows):
                array = filled_rows(tuple(stored.shape), self._key.dtype, gradient)
            else:
                array = self._array_of(gradient)
            self._owner.rule.update(self._places[block], array, stored, live)
            # The gradient has been copied. An operation that reads the block waits for the update.
            self._post(done)

        self._owner.call(update)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Have the engine copy a block, behind the updates that are queued."""
        stored, runtime, name = self._blocks[block], self._owner.runtime, self._key.name

        def start(completion: Completion) -> None:
            if stored.stype == "row_sparse":
                copy: Array = rows_of(stored).values.reshape(-1).copy()
            else:
                copy = np.frombuffer(memory_of(stored), np.uint8).copy()
            completion.succeed()
            self._post(lambda: done(copy))

        def skipped() -> None:
            runtime.fail(f"an update of key {name!r}, of which it is an owner, has failed")

        self._owner.call(
            lambda: push_async(start, reads=(stored,), writes=(), name="netstorm_read", skipped=skipped)
        )

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Have the owner's thread encode the optimiser's state of a block."""

        def encode() -> None:
            state = self._owner.rule.encoded_state(self._places[block], self._blocks[block])
            self._post(lambda: done(state))

        self._owner.call(encode)

    def _stored(self, values: Array) -> NDArray:
        """Return a copy of a block's values: row-sparse, with all rows, if the key is."""
        if self._key.spec.form != ROW_SPARSE:
            return self._array_of(values)
        shape = self._shape(values.size)
        return filled_rows(shape, self._key.dtype, Rows(np.arange(shape[0]), values))

    def _array_of(self, values: Array) -> NDArray:
        """Return a copy of dense values of a block, in its shape."""
        return mx.nd.array(values.reshape(self._shape(values.size)), ctx=mx.cpu(), dtype=self._key.dtype)

    def _shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a block of `size` elements: that of its rows, if these are whole."""
        shape = self._key.spec.shape
        if not shape or not (size == self._key.elements or has_whole_rows(self._key)):
            return (size,)
        return (size // row_length(shape), *shape[1:])

    def _post(self, function: Callable[[], None]) -> None:
        self._owner.runtime.post(lambda _node, _now: function())
