"""The blocks that this rank owns, in MXNet's arrays, and the thread that applies pushes to them.

An optimizer is Python code that queues operations on MXNet's engine, and some optimizers wait for values.
Other ranks' gradients must not block the script's thread, nor an optimizer the I/O thread. So updates have a
thread of their own. When a rank pulls a value, the engine makes a copy behind the updates that belong in it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from netstorm.compression.sparse import Rows
from netstorm.frontends.mxnet.arrays.row_memory import filled_rows, rows_of
from netstorm.frontends.mxnet.arrays.staging import memory_of
from netstorm.frontends.mxnet.asynchronous.owned_rule import BlockPlace, OwnedRule
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.kvstore.asynchronous.blocks import Gradient, chunks_of, extent, has_whole_rows
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.process.runtime import Runtime, after_close
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.frames import Buffer

__all__ = ["Owner"]

_JOIN_S: Final = 10.0
"""For an update to end, when this process does."""

_log = logging.getLogger(__name__)


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
        """Copy this rank's blocks of a key's initial value, and begin to serve them. In an elastic job any
        block may be this rank's later, so all of the value is copied.

        The key is known to the job. `initial` must not change before this returns.
        """
        requests, whole = self.runtime.node.requests, self.rule.whole
        owners, values = requests.asynchronous.owners, _InitialValue(key, whole=whole)
        for block in owners.blocks(key, whole=whole):
            if requests.live.is_elastic or owners.owner(key, block) == self.runtime.rank:
                values.keep(block, initial)

        def serve() -> None:
            blocks = _BlockStore(self, key, user_key, values, elastic=requests.live.is_elastic)
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


class _InitialValue:
    """Blocks of the value that all ranks begin with."""

    def __init__(self, key: Key, *, whole: bool) -> None:
        self._key: Final = key
        self._whole: Final = whole
        self._blocks: Final[dict[int, Array]] = {}

    def keep(self, block: int, value: Array) -> None:
        """Keep a block of a key's value."""
        chunks = chunks_of(self._key, block, whole=self._whole)
        self._blocks[block] = value[extent(self._key, chunks[0])[0] : extent(self._key, chunks[-1])[1]].copy()

    def of(self, block: int) -> Array:
        """Return a block that is kept."""
        return self._blocks[block]

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks that are kept."""
        return iter(self._blocks)


class _BlockStore:
    """The blocks of one key. See `netstorm.kvstore.asynchronous.blocks.BlockStore`.

    Only the owner's thread touches blocks, so calls about a block take effect in their order.
    """

    def __init__(
        self, owner: Owner, key: Key, user_key: int | str, initial: _InitialValue, *, elastic: bool
    ) -> None:
        """Begin with the blocks in `initial`, or in an elastic job without any: they are installed later."""
        self._owner: Final = owner
        self._key: Final = key
        self._user_key: Final = user_key
        self._initial: Final = initial if elastic or owner.rule.compensates else None
        """What all ranks began with; kept for rules that ask what a gradient was computed on, too."""
        self._blocks: Final = {} if elastic else {block: self._stored(initial.of(block)) for block in initial}
        self._unchanged_owner: Final = set(self._blocks)
        """Blocks that were this rank's from their initial value on."""
        self._pulled: Final[dict[tuple[int, int], Buffer]] = {}
        """What each rank has got last, by block and rank."""

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""
        return self._owner.rule.fingerprint

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole tensors."""
        return self._owner.rule.whole

    @property
    def begins_with_states(self) -> bool:
        """Whether the rule has states or counts of earlier jobs."""
        return self._owner.rule.begins_with_states

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[], None],
    ) -> None:
        """Have a block updated by the owner's thread."""
        pulled = self._pulled.get((block, rank))

        def update() -> None:
            stored = self._blocks[block]
            if isinstance(gradient, Rows):
                array = filled_rows(tuple(stored.shape), self._key.dtype, gradient)
            else:
                array = self._array_of(gradient)
            rule = self._owner.rule
            if rule.compensates:
                rule.update_compensated(
                    self._place(block), array, stored, live, self._base(block, pulled, stored)
                )
            else:
                rule.update(self._place(block), array, stored, live)
            # The gradient has been copied. An operation that reads the block waits for the update.
            self._post(done)

        self._owner.call(update)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Have the engine copy a block, behind the updates that are queued."""
        runtime, name = self._owner.runtime, self._key.name

        def read() -> None:
            stored = self._blocks[block]

            def start(completion: Completion) -> None:
                if stored.stype == "row_sparse":
                    copy: Array = rows_of(stored).values.reshape(-1).copy()
                else:
                    copy = np.frombuffer(memory_of(stored), np.uint8).copy()
                completion.succeed()
                self._post(lambda: done(copy))

            push_async(start, reads=(stored,), writes=(), name="netstorm_read", skipped=skipped)

        def skipped() -> None:
            runtime.fail(f"an update of key {name!r}, of which it is an owner, has failed")

        self._owner.call(read)

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Keep what a rank gets, if the rule asks what a gradient was computed on. Ranks that get the same
        value share it.
        """
        if self._owner.rule.compensates:
            self._pulled[block, rank] = value

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Have the owner's thread encode the optimizer's state of a block."""

        def encode() -> None:
            state = self._owner.rule.encoded_state(self._place(block), self._blocks[block])
            self._post(lambda: done(state))

        self._owner.call(encode)

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Have the owner's thread compare a state with one that the optimizer makes."""

        def compare() -> None:
            assert self._initial is not None
            like = self._stored(self._initial.of(block))
            problem = self._owner.rule.problem_of(self._place(block), like, states)
            self._post(lambda: done(problem))

        self._owner.call(compare)

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Have the owner's thread begin to hold a block, with the initial value or another owner's state.

        What ranks have pulled of it is not known then: their next gradients are not corrected.
        """
        self._forget_pulled(block)

        def begin() -> None:
            initial = self._initial
            if values is not None:
                value = np.frombuffer(values, self._key.dtype)
                self._unchanged_owner.discard(block)
            else:
                assert initial is not None
                value = initial.of(block)
                self._unchanged_owner.add(block)
            stored = self._blocks[block] = self._stored(value)
            self._owner.rule.take_state(self._place(block), stored, states)

        self._owner.call(begin)

    def discard(self, block: int) -> None:
        """Have the owner's thread drop a block."""
        self._forget_pulled(block)

        def drop() -> None:
            self._owner.rule.drop_state(self._place(block))
            self._blocks.pop(block, None)

        self._owner.call(drop)

    def _forget_pulled(self, block: int) -> None:
        for place in [place for place in self._pulled if place[0] == block]:
            del self._pulled[place]

    def _place(self, block: int) -> BlockPlace:
        key = self._key
        return BlockPlace(self._user_key, block, key.spec.shape, extent(key, block)[0])

    def _base(self, block: int, pulled: Buffer | None, stored: NDArray) -> NDArray:
        """Return the value that a gradient was computed on: as its rank has pulled it, else the initial one.
        Where neither is known, since this rule has followed another one, or this owner, it is the present
        one.
        """
        if pulled is not None:
            return self._array_of(np.frombuffer(pulled, self._key.dtype))
        if self._initial is not None and block in self._unchanged_owner:
            return self._array_of(self._initial.of(block))
        return stored.copy()

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
