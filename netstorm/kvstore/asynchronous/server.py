"""The work of an owner: it applies pushes, and answers pulls with the newest value. Pure.

Values and the update rule belong to a *block store*, which a frontend makes. It is asked for one thing at a
time of each block, through calls that do not wait. So a push is applied as soon as the pushes before it are,
and a pull sees all pushes that had come when the store was read.

In an elastic job a second rank has a block's state before anybody hears of it (`replication`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, TypeAlias

from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import (
    Actions,
    Answer,
    Block,
    BlockStore,
    EarlyMessages,
    Owners,
    Served,
    Staleness,
    ToOwner,
    WaitingPull,
    check_push,
    read_both,
    requested_rows,
    states_for,
    values_for,
    wants_states,
)
from netstorm.kvstore.asynchronous.replication import Replication
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Outbox
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import AsynchronousMessage as Routed
from netstorm.protocol.messages import CopiesHeld, CopyMessage, Pull, PullRows, PullStates, Push, Tick
from netstorm.pslite.machine import Call, Charge, WaitingBytes

__all__ = ["Serving"]

_MOST_AHEAD: Final = 65_536
"""Pushes of one rank that may be under way to an owner: more wait in queues and fill them."""

_Pull: TypeAlias = Pull | PullRows | PullStates


class Serving:
    """The blocks that this rank owns.

    Attributes:
        replication: what this rank does so that blocks survive their owners.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        owners: Owners,
        outbox: Outbox,
        counters: Counters,
        *,
        answer: Callable[[int, Routed, Buffer | None], None],
        end_job: Callable[[NetStormError], None],
        on_progress: Callable[[], None],
        waiting: WaitingBytes | None = None,
        present: Iterable[int] | None = None,
        patience_s: float = math.inf,
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
            waiting: counts the messages that come early.
            present: ranks that are in an elastic job at first; None: the job is not elastic.
            patience_s: see `Replication`.
        """
        self._rank: Final = rank
        self._ranks: Final = ranks
        self._owners: Final = owners
        self._counters: Final = counters
        self._answer: Final = answer
        self._end_job: Final = end_job
        self._on_progress: Final = on_progress
        self._served: dict[int, Served] = {}
        self._bytes: Final = waiting or WaitingBytes()
        self._early: Final = EarlyMessages(counters, self._handle, self._bytes)
        self._staleness: Final = Staleness(ranks, present)
        self._outbox: Final = outbox
        self.replication: Final = Replication(
            rank,
            ranks,
            owners,
            counters,
            elastic=present is not None,
            patience_s=patience_s,
            do=Actions(
                send=answer,
                end_job=end_job,
                call=self._call,
                advance=self._advance,
                start=self._start,
                on_progress=on_progress,
            ),
        )

    # ---------------------------------------------------------------------------------------- what is served

    def serve(self, key: Key, store: BlockStore) -> None:
        """Begin to serve the blocks of a key that this rank owns, and handle messages that came before."""
        assert key.layout is not None
        served = self._served[key.identity] = Served(key, store)
        self._own(served, installed=not self.replication.is_used)
        self.replication.settle(served)
        self._early.release(key.identity)

    def _own(self, served: Served, *, installed: bool) -> None:
        numbers = self._owners.blocks_of(self._rank, served.key, whole=served.store.whole)
        served.own(numbers, self._ranks, installed=installed, later=self._staleness.newcomers)

    @property
    def is_used(self) -> bool:
        """Whether this rank, or another one, trains asynchronously."""
        return bool(self._served or self._early)

    def finished(self, rank: int) -> None:
        """Record that a rank pushes no more: its clock holds up no pull any longer."""
        self._staleness.finished(rank)
        self._recheck_pulls()

    def waiting_text(self) -> str:
        """Return for whom this rank's blocks wait, for a person; empty: for nobody."""
        owned = (block for served in self._served.values() for block in served.owned)
        return self.replication.waiting_text(list(owned))

    def stop(self) -> None:
        """Drop everything: the job has failed, or is over."""
        for served in self._served.values():
            for block in served.blocks.values():
                self._drop_waiting(block)
        self._served.clear()
        self._early.clear()
        self.replication.stop()

    # ------------------------------------------------------------------------------- ranks that come and go

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left the job. Another one with this rank counts from 0."""
        self._staleness.forget(rank)
        for served in self._served.values():
            for block in served.blocks.values():
                block.forget(rank)
        self.replication.forget(rank)

    def change_view(
        self, view: int, *, members: Iterable[int], silent: Iterable[int], later: Iterable[int]
    ) -> None:
        """Go over to a view, whose owners `owners` has already. Requests that wait are sent again.

        Args:
            view: version of its policy.
            members: the ranks that are in the job.
            silent: those among them that take no part yet.
            later: those that have joined later.
        """
        for rank in set(later) - self._staleness.newcomers:
            self.forget(rank)  # a place that no node has had
        self._staleness.change_view(members)
        self._early.clear()
        self.replication.begin(view, set(members) - set(silent))
        for served in self._served.values():
            for block in served.blocks.values():
                self._drop_waiting(block)
                block.interrupt()
                block.serving = False
            self._own(served, installed=False)
        self.replication.announce(self._served.values(), self._staleness.clocks)
        self.settle()
        for served in list(self._served.values()):
            for block in list(served.blocks.values()):
                self._advance(served, block)

    # ------------------------------------------------------------------------------------- messages of ranks

    def push(self, rank: int, push: Push, payload: Buffer | None) -> None:
        """Handle a part of a rank's push.

        Raises:
            ProtocolViolation: it cannot belong to what the scheduler has fixed.
            NoRoom: it would have to wait, and too much waits already.
        """
        served = self._served.get(push.key)
        if served is None:
            self._keep(rank, push, payload)
            return
        key = served.key
        disagreement = served.disagreement(push, rank, self._rank)
        if disagreement is not None:
            self._end_job(disagreement)
            return
        block = served.by_chunk.get(push.chunk)
        if block is None:
            raise ProtocolViolation(
                f"push of chunk {push.chunk} of key {key.name!r}, of which rank {self._rank} is no owner"
            )
        check_push(push, payload, key)
        if push.number > block.arrived(rank) + _MOST_AHEAD:
            raise ProtocolViolation(
                f"push {push.number} of key {key.name!r} from rank {rank} is more than {_MOST_AHEAD} after "
                "the last one"
            )
        if not block.serving:
            place = rank, push.number, push.chunk
            if place not in block.early:
                block.early[place] = self._early.charged(rank, push, payload)
            return
        if self.replication.has_lost(block, rank, push.confirmed):
            return
        if block.begins[rank] < 0:
            block.begins[rank] = max(0, push.begin)
        charge = self._charge_ahead(block, rank, push, payload)
        if block.add_part(rank, push, payload):
            if charge is not None:
                block.ahead.setdefault((rank, push.number), []).append(charge)
            self._advance(served, block)
            return
        if charge is not None:
            self._bytes.give_back(charge)
        self._counters.add("pushes_known_before")
        if self.replication.is_used and push.number < block.applied[rank]:
            self.replication.confirm(block, rank, push)

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
                    f"pull of chunk {chunk} of key {served.key.name!r}, which is not rank {self._rank}'s"
                )
            waiting, blocks = WaitingPull(rank, pull, rows, chunk), [served.by_chunk[chunk]]
        else:
            waiting, blocks = WaitingPull(rank, pull), served.owned
        for block in blocks:
            block.pulls.append(waiting)
            self._advance(served, block)

    def tick(self, rank: int, tick: Tick) -> None:
        """Record that a clock of a rank has ended.

        Raises:
            ProtocolViolation: it is far from the rank's last one, or of no store.
        """
        if self._staleness.tick(rank, tick):
            self._recheck_pulls()

    def copy(self, rank: int, message: CopyMessage, payload: Buffer | None) -> None:
        """Handle what ranks say of copies of blocks.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        self.replication.check(rank, message)
        served = self._served.get(message.key)
        if served is None:
            self._keep(rank, message, payload)
        else:
            self.replication.receive(rank, served, message, payload)

    def held(self, rank: int, message: CopiesHeld) -> None:
        """Handle what a rank has of the blocks that are owned here now."""
        self.replication.held(rank, message)
        self._staleness.merge(message.clocks)
        self.settle()

    def settle(self) -> None:
        """Go on with blocks whose newest state is known by now."""
        for served in list(self._served.values()):
            self.replication.settle(served)

    # --------------------------------------------------------------------------------------- block by block

    def _start(self, served: Served, block: Block) -> None:
        """Serve a block, whose state is here now."""
        block.serving = True
        self._bytes.all_ready()  # which pushes come next, another rank has said
        early, block.early = list(block.early.values()), {}
        self._early.handle_all(block.key.identity, early)
        self._advance(served, block)

    def _advance(self, served: Served, block: Block) -> None:
        """Ask the store for what comes next, if it is idle: first reads that pulls wait for, then updates."""
        if block.busy:
            return
        if self.replication.take(served, block):
            return
        if not block.serving:
            return
        if block.snapshot is not None:
            self._send_values(served.store, block, block.snapshot)
        ready = self._ready(block)
        if any(wants_states(pull) for pull in ready):
            block.busy = True
            read_both(served.store, block.number, partial(self._states, block), self._call)
        elif ready and not self.replication.lacks(block):
            block.busy = True
            self._call(lambda: served.store.read(block.number, lambda value: self._read(block, value)))
        elif block.queue:
            block.busy = True
            rank, assembly = block.queue.popleft()
            block.being_applied = rank
            self._release_ahead(block, rank)
            gradient, push = assembly.gradient, assembly.push
            self._call(
                lambda: served.store.apply(
                    block.number, rank, gradient, push.live, lambda: self._applied(block, rank, push)
                )
            )

    def _charge_ahead(self, block: Block, rank: int, push: Push, payload: Buffer | None) -> Charge | None:
        """Charge the sender of a push for a part of it; None if it is applied next.

        That one always has room: it is as large as what this rank owns, at most.
        """
        if push.number <= block.next_to_apply(rank) or rank == self._rank:
            return None
        size = 0 if payload is None else memoryview(payload).nbytes
        return self._bytes.take(size, _turn(block, rank, push.number), "pushes before it")

    def _release_ahead(self, block: Block, rank: int) -> None:
        """Let the push of a rank have room that is applied next."""
        number = block.next_to_apply(rank)
        self._bytes.ready(_turn(block, rank, number))
        for charge in block.ahead.pop((rank, number), ()):
            self._bytes.give_back(charge)

    def _drop_waiting(self, block: Block) -> None:
        """Count no more what waits for a block: it is dropped."""
        self._early.drop(block.key.identity, block.early.values())
        for charges in block.ahead.values():
            for charge in charges:
                self._bytes.give_back(charge)
        block.early.clear()
        block.ahead.clear()

    def _ready(self, block: Block) -> list[WaitingPull]:
        """Return the pulls that may be answered now."""
        return [waiting for waiting in block.pulls if self._can_answer(block, waiting)] if block.pulls else []

    def _can_answer(self, block: Block, waiting: WaitingPull) -> bool:
        """Return whether the value contains all updates that a pull requires."""
        rank, pull = waiting.rank, waiting.pull
        applied = block.shown[1] if self.replication.lacks(block) else block.applied
        if applied[rank] < pull.pushed:
            self.replication.has_lost(block, rank, pull.confirmed)
            return False
        return self._staleness.is_fresh_enough(block, waiting, applied)

    def _read(self, block: Block, value: Buffer) -> None:
        served = self._served.get(block.key.identity)
        if served is None:  # the job has failed in the meantime
            return
        block.busy = False
        if block.serving:
            block.snapshot = value
        self._advance(served, block)
        self._on_progress()

    def _states(self, block: Block, values: Buffer, states: bytes) -> None:
        served = self._served.get(block.key.identity)
        if served is None:
            return
        block.busy = False
        ready = [pull for pull in self._ready(block) if wants_states(pull)] if block.serving else []
        self._send(block, ready, states_for(block, ready, values, states))
        self._advance(served, block)
        self._on_progress()

    def _send_values(self, store: BlockStore, block: Block, value: Buffer) -> None:
        ready = [pull for pull in self._ready(block) if not wants_states(pull)]
        for rank in {pull.rank: None for pull in ready}:
            store.pulled(block.number, rank, value)
        self._send(block, ready, values_for(block, ready, self._staleness))

    def _send(self, block: Block, ready: list[WaitingPull], answers: Iterator[Answer]) -> None:
        block.pulls = [pull for pull in block.pulls if pull not in ready]
        for rank, message, payload in answers:
            self._answer(rank, message, payload)

    def _applied(self, block: Block, rank: int, push: Push) -> None:
        served = self._served.get(block.key.identity)
        if served is None:
            return
        behind = max(0, block.others(rank) - push.seen)
        block.busy = False
        block.version += 1
        self._counters.add("updates_as_owner")
        if block.being_applied == rank:  # otherwise its process has left
            block.applied[rank] += 1
            if block.serving:
                self.replication.confirm(block, rank, push, behind)
        block.being_applied = -1
        if not self.replication.lacks(block):
            block.snapshot = None
        self._advance(served, block)
        if self._staleness.applied(block, rank, push.clock):
            self._recheck_pulls()
        self._on_progress()

    def _recheck_pulls(self) -> None:
        """Answer the pulls that may be answered now that a clock has advanced."""
        for served in list(self._served.values()):
            for block in served.owned:
                if block.pulls:
                    self._advance(served, block)

    # ------------------------------------------------------------------------------------------------ helpers

    def _keep(self, rank: int, message: ToOwner, payload: Buffer | None) -> None:
        if self._rank not in self._owners.ranks:
            raise ProtocolViolation(f"rank {rank} asks rank {self._rank}, which owns nothing")
        self._early.keep(rank, message, payload)

    def _handle(self, rank: int, message: ToOwner, payload: Buffer | None) -> None:
        if isinstance(message, Push):
            self.push(rank, message, payload)
        elif isinstance(message, (Pull, PullRows, PullStates)):
            self.pull(rank, message, payload)
        else:
            self.copy(rank, message, payload)

    def _call(self, function: Callable[[], None]) -> None:
        self._outbox.add(Call(function=function))


def _turn(block: Block, rank: int, number: int) -> tuple[object, ...]:
    """Return the name of what a push waits for."""
    return "turn", block.place, rank, number
