"""Asynchronous training on a simulated node: stands in for a frontend's store.

The update rule is gradient descent at a rate of 1: a value is its initial value less all gradients. Each
update and each read takes a random time, as in an engine.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from netstorm.compression.sparse import Numbers, Rows
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.asynchronous.blocks import Gradient, block_extent
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import (
    UNBOUNDED,
    AsyncOperation,
    PullOperation,
    Pushes,
    PushOperation,
    StatesOperation,
)
from netstorm.lab.simulation.memory_network import Timeline
from netstorm.lab.simulation.node import Array, Pending, SimulatedNode
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.frames import Buffer
from netstorm.training.owned_blocks import OwnedBlocks, initial_blocks

__all__ = ["AsynchronousStore", "SimulatedBlockStore"]


class SimulatedRule:
    """Gradient descent at a rate of 1, on one key's blocks. See `BlockRule`."""

    compensates: Final = True
    """So that it hears what ranks had pulled."""
    begins_with_states: Final = False
    fingerprint: Final = "descent"

    def __init__(self, key: Key, *, whole: bool) -> None:
        self.whole: Final = whole
        self.updates: Final[dict[int, int]] = {}
        """Number of updates, by block."""
        self._row: Final = row_length(key.spec.shape)

    def begin(self, block: int, values: Array, states: bytes) -> Array:
        """Copy values; states are the number of updates as text."""
        self.updates[block] = int(states or b"0")
        return values.copy()

    def update(
        self, block: int, values: Array, gradient: Gradient, live: tuple[float, ...], base: Array | None
    ) -> None:
        """Subtract a gradient."""
        if isinstance(gradient, Rows):
            values.reshape(-1, self._row)[gradient.numbers] -= gradient.values
        else:
            values -= gradient
        self.updates[block] += 1

    def read(self, values: Array, then: Callable[[Buffer], None]) -> None:
        """Call `then` with a copy."""
        then(values.copy())

    def encoded_state(self, block: int, values: Array) -> bytes:
        """Return the number of updates as text."""
        return str(self.updates[block]).encode()

    def problem_of(self, block: int, initial: Array, states: bytes) -> str:
        """Return why states are no number; empty: they are one."""
        return "" if states.isdigit() else f"{states!r}: expected a number of updates"

    def drop(self, block: int) -> None:
        """Forget a block."""
        del self.updates[block]


class _InitialBlocks(dict[int, Array]):
    """Those of a key that may not have been granted yet, made when they are asked for."""

    def __init__(self, key: Key, value: Array, *, whole: bool) -> None:
        super().__init__()
        self._key: Final = key
        self._value: Final = value.ravel().copy()
        self._whole: Final = whole

    def __missing__(self, block: int) -> Array:
        return self._value[block_extent(self._key, block, whole=self._whole)]


class SimulatedBlockStore(OwnedBlocks[Array]):
    """The blocks of a key that a node owns.

    Attributes:
        pushed_on: of each push: the block, the rank, and the value that it had got last.
    """

    def __init__(self, store: AsynchronousStore, key: Key, initial: Array) -> None:
        rule = SimulatedRule(key, whole=store.whole)
        if store.node.machine.live.is_elastic:
            blocks: dict[int, Array] = _InitialBlocks(key, initial, whole=store.whole)
            super().__init__(key, rule, store, blocks, elastic=True)
        else:
            owners, rank = store.machine.owners, store.node.rank
            blocks = initial_blocks(key, initial.ravel(), owners, rank=rank, whole=store.whole, elastic=False)
            super().__init__(key, rule, store, blocks, elastic=False)
        self.pushed_on: Final[list[tuple[int, int, Array | None]]] = []

    @property
    def values(self) -> Mapping[int, Array]:
        """The value of each block."""
        return self._blocks

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[Buffer | None], None],
        *,
        reads: bool = False,
    ) -> None:
        """Have a block updated, and record on what."""
        last = self._pulled.get((block, rank))
        self.pushed_on.append((block, rank, None if last is None else np.frombuffer(last, self._dtype)))
        super().apply(block, rank, gradient, live, done, reads=reads)


class AsynchronousStore:
    """One rank's store of keys that are trained asynchronously.

    Attributes:
        blocks: the blocks that this rank owns, by key.
    """

    def __init__(
        self,
        node: SimulatedNode,
        timeline: Timeline,
        *,
        seed: int = 0,
        staleness: int = UNBOUNDED,
        whole: bool = False,
        slowest_s: float = 0.0,
    ) -> None:
        """Begin without keys.

        Args:
            node: has joined the job.
            timeline: of the cluster.
            seed: of the random times.
            staleness: clocks that this rank may be ahead of the slowest.
            whole: blocks are whole keys.
            slowest_s: longest time of an update or a read.
        """
        self.node: Final = node
        self.machine: Final[Asynchronous] = node.machine.asynchronous
        self.whole: Final = whole
        self._timeline: Final = timeline
        self._chance: Final = random.Random(f"keeper {seed} {node.rank}")
        self._slowest_s: Final = slowest_s
        self._staleness: Final = staleness
        self._pushes: Final[dict[str, Pushes]] = {}
        self._clock = 0
        self._calls: Final[deque[Callable[[], None]]] = deque()
        self.blocks: Final[dict[str, SimulatedBlockStore]] = {}

    def init(self, name: str, initial: Array) -> Pending:
        """Initialise a key with rank 0's value. When it arrives, this node serves the blocks that it owns."""
        pending = self.node.push(name, initial if self.node.rank == 0 else np.zeros_like(initial))
        self._pushes[name] = Pushes()

        def serve() -> None:
            if pending.error is None:
                key, value = self.node.keys[name], pending.result()
                blocks = self.blocks[name] = SimulatedBlockStore(self, key, value)
                self.node.process.call(lambda _: self.machine.serve(key, blocks))

        pending.then(serve)
        return pending

    def join(self, name: str, initial: Array) -> None:
        """Begin with a key that the others have initialised: this node has joined the job later."""
        key = self.node.register(name, initial.shape, initial.dtype.name)
        key.begin_at(1)  # the first round was that of the initial value
        self.node.process.call(lambda now: self.node.machine.begin_key(key, 1, now))
        self._pushes[name] = Pushes()
        blocks = self.blocks[name] = SimulatedBlockStore(self, key, initial)
        self.node.process.call(lambda _: self.machine.serve(key, blocks))

    def push_rows(self, name: str, rows: Rows) -> Pending:
        """Subtract some rows of a gradient from the value. The rows must not change."""
        return self._push(name, rows, lambda: rows.values, codec=ROW_SPARSE)

    def push(self, name: str, gradient: Array, *, priority: int = 0) -> Pending:
        """Subtract a gradient from the value."""
        source = np.array(gradient).ravel()

        def collect() -> Array:
            source.view(np.uint8).fill(0xA5)  # nothing may read it any more
            return source

        return self._push(name, source, collect, priority=priority)

    def _push(
        self,
        name: str,
        source: Array | Rows,
        collect: Callable[[], Array],
        *,
        codec: int = 0,
        priority: int = 0,
    ) -> Pending:
        key, count = self.node.keys[name], self._pushes[name]
        pending = Pending(self._timeline, f"rank {self.node.rank}: push {count.total} of key {name!r}")
        pending.collect_with(collect)
        operation = PushOperation(
            key=key,
            number=count.take_push(),
            source=source,
            rule=SimulatedRule.fingerprint,
            clock=self._clock,
            whole=self.whole,
            codec=codec,
            priority=priority,
            done=pending.done,
        )
        return self._submit(pending, operation)

    def pull(self, name: str, *, rows: Numbers | None = None, priority: int = 0) -> Pending:
        """Read the newest value, or some rows of it."""
        key, count = self.node.keys[name], self._pushes[name]
        pending = Pending(self._timeline, f"rank {self.node.rank}: pull {count.pulls} of key {name!r}")
        shape = key.spec.shape if rows is None else (len(rows), *key.spec.shape[1:])
        destination = np.empty(math.prod(shape), key.dtype)
        pending.collect_with(lambda: destination.reshape(shape))
        operation = PullOperation(
            key=key,
            number=count.take_pull(),
            pushed=count.total,
            destination=destination,
            least=None if self._staleness == UNBOUNDED else (self._clock or count.total) - self._staleness,
            counted=self._clock > 0,
            whole=self.whole,
            rows=rows,
            priority=priority,
            done=pending.done,
        )
        return self._submit(pending, operation)

    def pull_states(self, name: str) -> tuple[Pending, dict[int, bytes]]:
        """Read the number of each block's updates, as text."""
        key, count = self.node.keys[name], self._pushes[name]
        pending = Pending(self._timeline, f"rank {self.node.rank}: pull {count.pulls} of key {name!r}")
        found: dict[int, bytes] = {}
        operation = StatesOperation(
            key=key,
            number=count.take_pull(),
            pushed=count.total,
            destination=found,
            whole=self.whole,
            done=pending.done,
        )
        return self._submit(pending, operation), found

    def clock(self) -> None:
        """End this rank's present clock, and begin the next."""
        self._clock += 1
        pushes = {self.node.keys[name]: count.in_clock for name, count in self._pushes.items()}
        for count in self._pushes.values():
            count.in_clock = 0
        number = self._clock
        self.node.process.call(
            lambda _: self.machine.clock(
                self.node.keys[next(iter(self._pushes))].spec.namespace, number, pushes, whole=self.whole
            )
        )

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the node after a random time, and after those before."""
        self._calls.append(function)
        delay = self._chance.random() * self._slowest_s
        self._timeline.after(delay, lambda: self.node.process.call(lambda _: self._calls.popleft()()))

    def post(self, function: Callable[[], None]) -> None:
        """Call a function."""
        function()

    def _submit(self, pending: Pending, operation: AsyncOperation) -> Pending:
        self.node.pending.append(pending)
        self.node.process.call(lambda now: self.machine.submit(operation, now))
        return pending
