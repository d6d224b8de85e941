"""Asynchronous training on a simulated node: stands in for a frontend's store.

The update rule is gradient descent at a rate of 1: a value is its initial value less all gradients. Each
update and each read takes a random time, as in an engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

import numpy as np

from netstorm.compression.sparse import Numbers, Rows
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.asynchronous.blocks import Gradient, chunks_of, extent
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import (
    UNBOUNDED,
    AsyncOperation,
    PullOperation,
    Pushes,
    PushOperation,
    StatesOperation,
)
from netstorm.lab.simulation.node import Array, Pending, SimulatedNode
from netstorm.protocol.codecs import ROW_SPARSE
from netstorm.protocol.frames import Buffer
from netstorm.pslite.memory_network import Timeline

__all__ = ["AsynchronousStore", "SimulatedBlockStore"]


class SimulatedBlockStore:
    """The blocks of a key that a node owns, and the update rule that is applied to them."""

    def __init__(self, store: AsynchronousStore, key: Key, initial: Array) -> None:
        self.rule: Final = store.rule
        self.whole: Final = store.whole
        self.values: Final[dict[int, Array]] = {}
        """By block."""
        self.updates: Final[dict[int, int]] = {}
        """Number of updates, by block."""
        self.last_pulled: Final[dict[tuple[int, int], Array]] = {}
        """The value that a rank has got last, by block and rank."""
        self.pushed_on: Final[list[tuple[int, int, Array | None]]] = []
        """Of each update: the block, the rank that has pushed it, and the value that it had got last."""
        self._store: Final = store
        self._initial: Final = initial.ravel().copy()
        self._key: Final = key
        if store.node.machine.live.is_elastic:
            return
        owners = store.machine.owners
        for block in owners.blocks(key, whole=self.whole):
            if owners.owner(key, block) == store.node.rank:
                self.install(block, None, b"")

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint has been loaded: here, never."""
        return False

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[], None],
    ) -> None:
        """Subtract a gradient from a block, later; then call `done`."""
        self.pushed_on.append((block, rank, self.last_pulled.get((block, rank))))

        def work() -> None:
            value = self.values[block]
            if isinstance(gradient, Rows):
                value.reshape(-1, gradient.values.shape[1])[gradient.numbers] -= gradient.values
            else:
                value -= gradient
            self.updates[block] += 1
            done()

        self._store.later(work)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Call `done` with a copy of a block's value, later."""
        self._store.later(lambda: done(self.values[block].copy()))

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Record what a rank gets."""
        self.last_pulled[block, rank] = np.frombuffer(value, self.values[block].dtype)

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Call `done` with the number of a block's updates as text, later."""
        self._store.later(lambda: done(str(self.updates[block]).encode()))

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Tell `done` whether states are a number, later."""
        problem = "" if states.isdigit() else f"{states!r}: expected a number of updates"
        self._store.later(lambda: done(problem))

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Begin to hold a block."""
        if values is None:
            chunks = chunks_of(self._key, block, whole=self.whole)
            first, end = extent(self._key, chunks[0])[0], extent(self._key, chunks[-1])[1]
            self.values[block] = self._initial[first:end].copy()
        else:
            self.values[block] = np.frombuffer(values, self._key.dtype).copy()
        self.updates[block] = int(states or b"0")

    def discard(self, block: int) -> None:
        """Hold a block no longer."""
        del self.values[block], self.updates[block]


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
        rule: str = "descent",
    ) -> None:
        """Begin without keys.

        Args:
            node: has joined the job.
            timeline: of the cluster.
            seed: of the random times.
            staleness: clocks that this rank may be ahead of the slowest.
            whole: blocks are whole keys.
            slowest_s: longest time of an update or a read.
            rule: the update rule's name.
        """
        self.node: Final = node
        self.machine: Final[Asynchronous] = node.machine.asynchronous
        self.whole: Final = whole
        self.rule: Final = rule
        self._timeline: Final = timeline
        self._chance: Final = random.Random(f"keeper {seed} {node.rank}")
        self._slowest_s: Final = slowest_s
        self._staleness: Final = staleness
        self._pushes: Final[dict[str, Pushes]] = {}
        self._clock = 0
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
            number=count.total,
            source=source,
            rule=self.rule,
            clock=self._clock,
            whole=self.whole,
            codec=codec,
            priority=priority,
            done=pending.done,
        )
        count.total += 1
        count.in_clock += 1
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
            number=count.pulls,
            pushed=count.total,
            destination=destination,
            least=None if self._staleness == UNBOUNDED else (self._clock or count.total) - self._staleness,
            counted=self._clock > 0,
            whole=self.whole,
            rows=rows,
            priority=priority,
            done=pending.done,
        )
        count.pulls += 1
        return self._submit(pending, operation)

    def pull_states(self, name: str) -> tuple[Pending, dict[int, bytes]]:
        """Read the number of each block's updates, as text."""
        key, count = self.node.keys[name], self._pushes[name]
        pending = Pending(self._timeline, f"rank {self.node.rank}: pull {count.pulls} of key {name!r}")
        found: dict[int, bytes] = {}
        operation = StatesOperation(
            key=key,
            number=count.pulls,
            pushed=count.total,
            destination=found,
            whole=self.whole,
            done=pending.done,
        )
        count.pulls += 1
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

    def later(self, work: Callable[[], None]) -> None:
        """Call `work` on the node after a random time."""
        delay = self._chance.random() * self._slowest_s
        self._timeline.after(delay, lambda: self.node.process.call(lambda _: work()))

    def _submit(self, pending: Pending, operation: AsyncOperation) -> Pending:
        self.node.pending.append(pending)
        self.node.process.call(lambda now: self.machine.submit(operation, now))
        return pending
