"""The work of an owner: it applies pushes, and answers pulls with the newest value. Pure.

Values and the update rule belong to a *block store*, which a frontend makes. It is asked for one thing at a
time of each block, through calls that do not wait. So a push is applied as soon as the pushes before it are,
and a pull sees all pushes that had come when the store was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from netstorm.errors import Disagreement, NetStormError, ProtocolViolation
from netstorm.kvstore.asynchronous.answers import Answer, requested_rows, states_for, values_for, wants_states
from netstorm.kvstore.asynchronous.block import Block, WaitingPull
from netstorm.kvstore.asynchronous.block_store import BlockStore
from netstorm.kvstore.asynchronous.clocks import Clocks
from netstorm.kvstore.asynchronous.gradients import check_push
from netstorm.kvstore.asynchronous.owners import Owners, chunks_of
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Applied, Pull, PullRows, PullStates, Push, States, Tick, Value
from netstorm.pslite.machine import Call

__all__ = ["Serving"]

_Pull: TypeAlias = Pull | PullRows | PullStates


class _Served:
    """A key of which this rank owns something."""

    __slots__ = ("blocks", "by_chunk", "key", "store")

    def __init__(self, key: Key, store: BlockStore, blocks: list[Block]) -> None:
        self.key: Final = key
        self.store: Final = store
        self.blocks: Final = blocks
        self.by_chunk: Final = {chunk: block for block in blocks for chunk in block.chunks}


class Serving:
    """The blocks that this rank owns."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        owners: Owners,
        outbox: Outbox,
        counters: Counters,
        *,
        answer: Callable[[int, Applied | Value | States, Buffer | None], None],
        end_job: Callable[[NetStormError], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Begin without keys.

        Args:
            rank: of this node, of `ranks`.
            owners: of blocks.
            outbox: takes calls to stores.
            counters: of the process.
            answer: sends a message (with an empty path) and a payload to a rank, which may be this one.
            end_job: fails the whole job.
            on_progress: called after each answer of a store has been handled.
        """
        self._rank: Final = rank
        self._ranks: Final = ranks
        self._owners: Final = owners
        self._counters: Final = counters
        self._answer: Final = answer
        self._end_job: Final = end_job
        self._on_progress: Final = on_progress
        self._served: dict[int, _Served] = {}
        self._early: dict[int, list[tuple[int, Push | _Pull, Buffer | None]]] = {}
        """Messages for keys that are not served yet: this rank's script has not initialised them."""
        self._clocks: dict[int, Clocks] = {}
        """By namespace."""
        self._running = set(range(ranks))
        """Ranks that have not finished."""
        self._outbox: Final = outbox

    # ---------------------------------------------------------------------------------------- what is served

    def serve(self, key: Key, store: BlockStore) -> None:
        """Begin to serve the blocks of a key that this rank owns, and handle messages that came before."""
        assert key.layout is not None
        blocks = [
            Block(key, number, chunks_of(key, number, whole=store.whole), self._ranks)
            for number in self._owners.blocks(key, whole=store.whole)
            if self._owners.owner(key, number) == self._rank
        ]
        self._served[key.identity] = _Served(key, store, blocks)
        for rank, message, payload in self._early.pop(key.identity, ()):
            if isinstance(message, Push):
                self.push(rank, message, payload)
            else:
                self.pull(rank, message, payload)

    def finished(self, rank: int) -> None:
        """Record that a rank pushes no more: its clock holds up no pull any longer."""
        self._running.discard(rank)
        self._recheck_pulls()

    def stop(self) -> None:
        """Drop everything: the job has failed, or is over."""
        self._served.clear()
        self._early.clear()

    # ------------------------------------------------------------------------------------- messages of ranks

    def push(self, rank: int, push: Push, payload: Buffer | None) -> None:
        """Handle a part of a rank's push.

        Raises:
            ProtocolViolation: it cannot belong to what the scheduler has fixed.
        """
        served = self._served.get(push.key)
        if served is None:
            self._keep(rank, push, payload)
            return
        key = served.key
        if push.rule != served.store.rule:
            self._end_job(
                Disagreement(
                    f"key {key.name!r}: rank {rank} pushes for {push.rule!r}, and rank {self._rank}, an "
                    f"owner of it, updates with {served.store.rule!r}: every rank must use the same "
                    "optimiser and hyper-parameters"
                )
            )
            return
        block = served.by_chunk.get(push.chunk)
        if block is None:
            raise ProtocolViolation(
                f"push of chunk {push.chunk} of key {key.name!r}, of which rank {self._rank} is no owner"
            )
        check_push(push, payload, key)
        if block.add_part(rank, push, payload):
            self._advance(served, block)
        else:
            self._counters.add("pushes_known_before")

    def pull(self, rank: int, pull: _Pull, payload: Buffer | None) -> None:
        """Handle a rank's pull of the blocks of a key that are owned here, or of some rows of a chunk. If it
        comes twice, around a failed link, it is answered twice.

        Raises:
            ProtocolViolation: it asks for what is not owned here.
        """
        served = self._served.get(pull.key)
        if served is None:
            self._keep(rank, pull, payload)
            return
        if isinstance(pull, PullRows):
            rows, chunk = requested_rows(pull, payload, served.key), pull.chunk
            if chunk not in served.by_chunk:
                raise ProtocolViolation(
                    f"pull of chunk {chunk} of key {served.key.name!r}, of which rank {self._rank} is no "
                    "owner"
                )
            waiting, blocks = WaitingPull(rank, pull, rows, chunk), [served.by_chunk[chunk]]
        else:
            waiting, blocks = WaitingPull(rank, pull), served.blocks
        for block in blocks:
            block.pulls.append(waiting)
            self._advance(served, block)

    def tick(self, rank: int, tick: Tick) -> None:
        """Record that a clock of a rank has ended."""
        if self._clocks_of(tick.namespace).ended(rank, tick.clock, tick.pushed):
            self._recheck_pulls()

    # --------------------------------------------------------------------------------------- block by block

    def _advance(self, served: _Served, block: Block) -> None:
        """Ask the store for what comes next, if it is idle: first reads that pulls wait for, then updates."""
        if block.busy:
            return
        if block.snapshot is not None:
            self._send_values(block)
        ready = self._ready(block)
        if any(wants_states(pull) for pull in ready):
            block.busy = True
            store = served.store
            self._call(lambda: store.states(block.number, lambda states: self._states(block, states)))
        elif ready:
            block.busy = True
            self._call(lambda: served.store.read(block.number, lambda value: self._read(block, value)))
        elif block.queue:
            block.busy = True
            rank, assembly = block.queue.popleft()
            gradient, push = assembly.gradient, assembly.push
            self._call(
                lambda: served.store.apply(
                    block.number, gradient, push.live, lambda: self._applied(block, rank, push)
                )
            )

    def _ready(self, block: Block) -> list[WaitingPull]:
        """Return the pulls that may be answered now."""
        return [waiting for waiting in block.pulls if self._can_answer(block, waiting)] if block.pulls else []

    def _can_answer(self, block: Block, waiting: WaitingPull) -> bool:
        """Return whether the value contains all updates that a pull requires."""
        rank, pull = waiting.rank, waiting.pull
        if block.applied[rank] < pull.pushed:
            return False
        if pull.least <= 0:
            return True
        others = [other for other in self._running if other != rank]
        if pull.counted:
            slowest = self._clocks_of(block.key.spec.namespace).slowest(others)
        else:
            slowest = min((block.applied[other] for other in others), default=None)
        return slowest is None or slowest >= pull.least

    def _read(self, block: Block, value: Buffer) -> None:
        served = self._served.get(block.key.identity)
        if served is None:  # the job has failed in the meantime
            return
        block.busy = False
        block.snapshot = value
        self._advance(served, block)
        self._on_progress()

    def _states(self, block: Block, states: bytes) -> None:
        served = self._served.get(block.key.identity)
        if served is None:
            return
        block.busy = False
        ready = [pull for pull in self._ready(block) if wants_states(pull)]
        self._send(block, ready, states_for(block, ready, states))
        self._advance(served, block)
        self._on_progress()

    def _send_values(self, block: Block) -> None:
        ready = [pull for pull in self._ready(block) if not wants_states(pull)]
        self._send(block, ready, values_for(block, ready))

    def _send(self, block: Block, ready: list[WaitingPull], answers: Iterator[Answer]) -> None:
        block.pulls = [pull for pull in block.pulls if pull not in ready]
        for rank, message, payload in answers:
            self._answer(rank, message, payload)

    def _applied(self, block: Block, rank: int, push: Push) -> None:
        served = self._served.get(block.key.identity)
        if served is None:
            return
        block.busy = False
        behind = max(0, block.others(rank) - push.seen)
        block.version += 1
        block.applied[rank] += 1
        block.snapshot = None
        self._counters.add("updates_as_owner")
        self._answer(
            rank,
            Applied(path=(), hop=0, key=push.key, block=block.number, number=push.number, behind=behind),
            None,
        )
        self._advance(served, block)
        if self._clocks_of(block.key.spec.namespace).applied(rank, push.clock):
            self._recheck_pulls()
        self._on_progress()

    def _recheck_pulls(self) -> None:
        """Answer the pulls that may be answered now that a clock has advanced."""
        for served in list(self._served.values()):
            for block in served.blocks:
                if block.pulls:
                    self._advance(served, block)

    # ------------------------------------------------------------------------------------------------ helpers

    def _clocks_of(self, namespace: int) -> Clocks:
        found = self._clocks.get(namespace)
        if found is None:
            found = self._clocks[namespace] = Clocks(self._ranks)
        return found

    def _keep(self, rank: int, message: Push | _Pull, payload: Buffer | None) -> None:
        self._early.setdefault(message.key, []).append((rank, message, payload))

    def _call(self, function: Callable[[], None]) -> None:
        self._outbox.add(Call(function=function))
