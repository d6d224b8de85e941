"""What an owner does: applies pushes, answers pulls with the newest value. Pure.

Values and the update rule belong to a *keeper*, which a frontend makes; it is asked for one thing at a time
of each block, through calls that do not wait. So a push is applied as soon as those that came before it are,
and a pull sees all that had come when the keeper was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeAlias

from netstorm.errors import Disagreement, NetStormError, ProtocolViolation
from netstorm.kvstore.asynchronous.answers import Answer, states_for, values_for, wanted_rows, wants_states
from netstorm.kvstore.asynchronous.block import Block, WaitingPull
from netstorm.kvstore.asynchronous.clocks import Clocks
from netstorm.kvstore.asynchronous.gradients import Gradient, check_push
from netstorm.kvstore.asynchronous.owners import Owners, chunks_of
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Applied, Pull, PullRows, PullStates, Push, States, Tick, Value
from netstorm.pslite.machine import Call

__all__ = ["BlockStore", "Serving"]

_Pull: TypeAlias = Pull | PullRows | PullStates


class BlockStore(Protocol):
    """Has the values of the blocks of one key that this rank owns. Its methods must not block.

    What they were given to call is called on the machine's thread, later.
    """

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""

    @property
    def whole(self) -> bool:
        """The rule needs whole tensors."""

    def apply(
        self, block: int, gradient: Gradient, live: tuple[float, ...], done: Callable[[], None]
    ) -> None:
        """Update a block with a gradient, which is the keeper's until it calls `done`."""

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Give `done` a copy of a block's value, which nobody changes later."""

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Give `done` what the update rule keeps of a block, behind the updates that have been asked for."""


class _Served:
    """A key of which this rank owns something."""

    __slots__ = ("blocks", "by_chunk", "keeper", "key")

    def __init__(self, key: Key, keeper: BlockStore, blocks: list[Block]) -> None:
        self.key: Final = key
        self.keeper: Final = keeper
        self.blocks: Final = blocks
        self.by_chunk: Final = {chunk: block for block in blocks for chunk in block.chunks}


class Serving:
    """All blocks that this rank owns."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        owners: Owners,
        outbox: Outbox,
        counters: Counters,
        *,
        answer: Callable[[int, Applied | Value | States, Buffer | None], None],
        blame: Callable[[NetStormError], None],
        settled: Callable[[], None],
    ) -> None:
        """Begin with nothing.

        Args:
            rank: of this node, of `ranks`.
            owners: of blocks.
            outbox: calls to keepers.
            counters: of the process.
            answer: sends a message (with an empty path) and a payload to a rank, which may be this one.
            blame: ends the job.
            settled: called when something that a keeper has done has been taken in.
        """
        self._rank: Final = rank
        self._ranks: Final = ranks
        self._owners: Final = owners
        self._counters: Final = counters
        self._answer: Final = answer
        self._blame: Final = blame
        self._settled: Final = settled
        self._served: dict[int, _Served] = {}
        self._early: dict[int, list[tuple[int, Push | _Pull, Buffer | None]]] = {}
        """Of keys that are not served yet: this rank's script has not come so far."""
        self._clocks: dict[int, Clocks] = {}
        """By namespace."""
        self._running = set(range(ranks))
        """Ranks that have not finished."""
        self._outbox: Final = outbox

    # --------------------------------------------------------------------------------------- what is told it

    def serve(self, key: Key, keeper: BlockStore) -> None:
        """Begin to serve the blocks of a key that this rank owns; what has come before is looked at now."""
        assert key.layout is not None
        blocks = [
            Block(key, number, chunks_of(key, number, whole=keeper.whole), self._ranks)
            for number in self._owners.blocks(key, whole=keeper.whole)
            if self._owners.owner(key, number) == self._rank
        ]
        self._served[key.identity] = _Served(key, keeper, blocks)
        for rank, message, payload in self._early.pop(key.identity, ()):
            if isinstance(message, Push):
                self.push(rank, message, payload)
            else:
                self.pull(rank, message, payload)

    def finished(self, rank: int) -> None:
        """A rank will push no more: nobody waits for its clock any longer."""
        self._running.discard(rank)
        self._look_at_pulls()

    def stop(self) -> None:
        """Forget everything: the job has failed, or is over."""
        self._served.clear()
        self._early.clear()

    # --------------------------------------------------------------------------------------- what ranks send

    def push(self, rank: int, push: Push, payload: Buffer | None) -> None:
        """Take a part of a rank's push.

        Raises:
            ProtocolViolation: it cannot belong to what the scheduler has fixed.
        """
        served = self._served.get(push.key)
        if served is None:
            self._keep(rank, push, payload)
            return
        key = served.key
        if push.rule != served.keeper.rule:
            self._blame(
                Disagreement(
                    f"{key.name}: rank {rank} pushes for {push.rule!r}, and rank {self._rank}, an owner of "
                    f"it, updates with {served.keeper.rule!r}: every rank must use the same optimiser and "
                    "hyper-parameters"
                )
            )
            return
        block = served.by_chunk.get(push.chunk)
        if block is None:
            raise ProtocolViolation(
                f"push of chunk {push.chunk} of {key.name}, of which rank {self._rank} is no owner"
            )
        check_push(push, payload, key)
        if block.take(rank, push, payload):
            self._advance(served, block)
        else:
            self._counters.add("pushes_known_before")

    def pull(self, rank: int, pull: _Pull, payload: Buffer | None) -> None:
        """Take a rank's pull of what is owned here of a key, or of some rows of a chunk. If it comes twice,
        around a link that has failed, it is answered twice.

        Raises:
            ProtocolViolation: of what is not owned here.
        """
        served = self._served.get(pull.key)
        if served is None:
            self._keep(rank, pull, payload)
            return
        if isinstance(pull, PullRows):
            rows, place = wanted_rows(pull, payload, served.key), pull.chunk
            if place not in served.by_chunk:
                raise ProtocolViolation(
                    f"pull of chunk {place} of {served.key.name}, of which rank {self._rank} is no owner"
                )
            waiting, blocks = WaitingPull(rank, pull, rows, place), [served.by_chunk[place]]
        else:
            waiting, blocks = WaitingPull(rank, pull), served.blocks
        for block in blocks:
            block.pulls.append(waiting)
            self._advance(served, block)

    def tick(self, rank: int, tick: Tick) -> None:
        """Take a rank's word that a clock has ended."""
        if self._clocks_of(tick.namespace).ended(rank, tick.clock, tick.pushed):
            self._look_at_pulls()

    # ---------------------------------------------------------------------------------------------- moving on

    def _advance(self, served: _Served, block: Block) -> None:
        """Ask the keeper for what comes next, if it is idle: first what somebody waits for, then updates."""
        if block.busy:
            return
        if block.snapshot is not None:
            self._send_values(block)
        ready = self._ready(block)
        if any(wants_states(one) for one in ready):
            block.busy = True
            keeper = served.keeper
            self._call(lambda: keeper.states(block.number, lambda states: self._states(block, states)))
        elif ready:
            block.busy = True
            self._call(lambda: served.keeper.read(block.number, lambda value: self._read(block, value)))
        elif block.queue:
            block.busy = True
            rank, gathering = block.queue.popleft()
            gradient, push = gathering.gradient, gathering.push
            self._call(
                lambda: served.keeper.apply(
                    block.number, gradient, push.live, lambda: self._applied(block, rank, push)
                )
            )

    def _ready(self, block: Block) -> list[WaitingPull]:
        """Return the pulls that may be answered now."""
        return [one for one in block.pulls if self._may_see(block, one)] if block.pulls else []

    def _may_see(self, block: Block, waiting: WaitingPull) -> bool:
        """Return whether the value has all that a pull wants in it."""
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
        if served is None:  # the job has failed meanwhile
            return
        block.busy = False
        block.snapshot = value
        self._advance(served, block)
        self._settled()

    def _states(self, block: Block, states: bytes) -> None:
        served = self._served.get(block.key.identity)
        if served is None:
            return
        block.busy = False
        ready = [one for one in self._ready(block) if wants_states(one)]
        self._send(block, ready, states_for(block, ready, states))
        self._advance(served, block)
        self._settled()

    def _send_values(self, block: Block) -> None:
        ready = [one for one in self._ready(block) if not wants_states(one)]
        self._send(block, ready, values_for(block, ready))

    def _send(self, block: Block, ready: list[WaitingPull], answers: Iterator[Answer]) -> None:
        block.pulls = [one for one in block.pulls if one not in ready]
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
            self._look_at_pulls()
        self._settled()

    def _look_at_pulls(self) -> None:
        """Ranks have come further: some pulls may be answered now."""
        for served in list(self._served.values()):
            for block in served.blocks:
                if block.pulls:
                    self._advance(served, block)

    # ------------------------------------------------------------------------------------------------ helpers

    def waits(self) -> str:
        """Say for whom pulls wait here, for a person; empty if none do."""
        for served in self._served.values():
            for block in served.blocks:
                for one in block.pulls:
                    return f"a pull of {served.key.name} by rank {one.rank} waits for slower ranks"
        return ""

    def _clocks_of(self, namespace: int) -> Clocks:
        found = self._clocks.get(namespace)
        if found is None:
            found = self._clocks[namespace] = Clocks(self._ranks)
        return found

    def _keep(self, rank: int, message: Push | _Pull, payload: Buffer | None) -> None:
        self._early.setdefault(message.key, []).append((rank, message, payload))

    def _call(self, function: Callable[[], None]) -> None:
        self._outbox.add(Call(function=function))
