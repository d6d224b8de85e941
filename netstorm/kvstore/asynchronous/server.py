"""The work of an owner: it applies pushes, and answers pulls with the newest value. Pure.

Values and the update rule belong to a *block store*, which a frontend makes. It is asked for one thing at a
time of each block, through calls that do not wait. So a push is applied as soon as the pushes before it are,
and a pull sees all pushes that had come when the store was read.

In an elastic job a second rank, the block's *replica*, has a state before anybody hears of it. After pushes
have been applied, the owner sends the state there. Once it is there, the pushes are confirmed and pulls get
that value: nothing that a rank has heard of is lost with the owner. One state of a block is on its way at a
time; what is applied meanwhile goes with the next one.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from netstorm.errors import NetStormError, NodeLost, NotAuthorised, ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import (
    Answer,
    AsynchronousOutbox,
    Block,
    BlockCopies,
    BlockState,
    BlockStore,
    Clocks,
    EarlyMessage,
    Owners,
    Place,
    Served,
    Staleness,
    ToOwner,
    WaitingPull,
    about,
    check_push,
    pieces_of,
    requested_rows,
    states_for,
    values_for,
    wants_states,
)
from netstorm.kvstore.forms import Key
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import (
    Applied,
    BlockCopy,
    CopiesHeld,
    CopyKept,
    CopyMessage,
    CopyReleased,
    CopyWanted,
    HeldClocks,
    HeldCopy,
    Pull,
    PullRows,
    PullStates,
    Push,
    Tick,
)
from netstorm.pslite.machine import Charge, WaitingBytes

__all__ = ["Handover", "Serving", "versions_of"]

_log = logging.getLogger(__name__)

_MOST_AHEAD: Final = 65_536
"""Pushes of one rank that may be under way to an owner: more wait in queues and fill them."""

_UPDATES: Final = "updates"
"""What pulls wait for."""

_Pull: TypeAlias = Pull | PullRows | PullStates


class Serving:
    """The blocks that this rank owns, and the copies that it keeps for other owners.

    Attributes:
        handover: what the other ranks have of this rank's blocks.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        owners: Owners,
        routed: AsynchronousOutbox,
        counters: Counters,
        *,
        end_job: Callable[[NetStormError], None],
        on_progress: Callable[[], None],
        seen: Callable[[Key, int], int | None] = lambda *_: 0,
        waiting: WaitingBytes | None = None,
        present: Iterable[int] | None = None,
        patience_s: float = math.inf,
    ) -> None:
        """Begin without keys, and with the job's first view, in which no rank has any states.

        Args:
            rank: of this node, of `ranks`.
            owners: of blocks.
            routed: takes messages, and calls to stores.
            counters: of the process.
            end_job: fails the whole job.
            on_progress: called after each answer of a store has been handled.
            seen: see `Requests.seen`.
            waiting: counts the messages that come early.
            present: ranks that are in an elastic job at first; None: the job is not elastic, and blocks have
                no replicas.
            patience_s: longest silence of a rank that this one waits for at the begin of a view.
        """
        self._rank: Final = rank
        self._ranks: Final = ranks
        self._owners: Final = owners
        self._routed: Final = routed
        self._counters: Final = counters
        self._end_job: Final = end_job
        self._on_progress: Final = on_progress
        self._seen: Final = seen
        self._elastic: Final = present is not None
        self._patience_s: Final = patience_s
        self._served: dict[int, Served] = {}
        self._bytes: Final = waiting or WaitingBytes()
        self._early: Final[dict[int, list[EarlyMessage]]] = {}
        """By key that this rank's script has not initialised yet. `WaitingBytes` bounds what they count."""
        self._staleness: Final = Staleness(ranks, present)
        self._copies: Final = BlockCopies(ranks)
        self.handover = Handover()
        self._eligible: frozenset[int] = frozenset(owners.ranks if present is None else present)
        self._departed: set[int] = set()
        self._shown: Final[dict[Place, tuple[int, int]]] = {}
        """By block: a version that pulls may have got, and the owner that has told of it."""

    # ---------------------------------------------------------------------------------------- what is served

    def serve(self, key: Key, store: BlockStore) -> None:
        """Begin to serve the blocks of a key that this rank owns, and handle messages that came before."""
        assert key.layout is not None
        served = self._served[key.identity] = Served(key, store)
        for place in [place for place in self._shown if place[0] == key.identity]:
            del self._shown[place]  # of an earlier update rule
        self._own(served, installed=not self._elastic)
        self._settle_key(served)
        self._handle_early(key.identity, self._early.pop(key.identity, []))

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
        text = self.handover.waiting_text()
        if text:
            return text
        owned = (block for served in self._served.values() for block in served.owned)
        replicas = {self.replica(block) for block in owned if block.shipped is not None}
        silent = sorted(rank for rank in replicas if rank is not None)
        return f"copies wait until ranks {silent} have confirmed them" if silent else ""

    def stop(self) -> None:
        """Drop everything: the job has failed, or is over."""
        for served in self._served.values():
            for block in served.blocks.values():
                self._drop_waiting(block)
        self._served.clear()
        self._drop_all_early()
        self._copies.clear()
        self.handover = Handover()

    # ------------------------------------------------------------------------------- ranks that come and go

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left the job. Another one with this rank counts from 0."""
        self._staleness.forget(rank)
        for served in self._served.values():
            for block in served.blocks.values():
                block.forget(rank)
        self._departed.add(rank)
        self._copies.forget(rank)

    def change_view(
        self, *, members: Collection[int], silent: Collection[int], later: Collection[int]
    ) -> None:
        """Go over to a view, whose owners `owners` has already. Requests that wait are sent again.

        Args:
            members: the ranks that are in the job.
            silent: those among them that take no part yet.
            later: those that have joined later.
        """
        for rank in set(later) - self._staleness.newcomers:
            self.forget(rank)  # a place that no node has had
        self._staleness.change_view(members)
        self._drop_all_early()
        self._eligible = frozenset(members) - frozenset(silent)
        self._copies.interrupt()
        takes_part = self._rank in self._eligible
        others = self._eligible - {self._rank} if takes_part else ()
        self.handover = Handover(others, patience_s=self._patience_s)
        for served in self._served.values():
            for block in served.blocks.values():
                self._drop_waiting(block)
                block.interrupt()
                block.serving = False
            self._own(served, installed=False)
        if takes_part:
            self._announce()
        self._settle()
        for served in list(self._served.values()):
            for block in list(served.blocks.values()):
                self._advance(served, block)

    def _announce(self) -> None:
        """Tell the other ranks which states are here of the blocks that are theirs now."""
        others, clocks = self._eligible - {self._rank}, self._staleness.clocks
        keys, view = self._served.values(), self._routed.view
        for rank, message in announcements(keys, self._copies, clocks, self._owners, ranks=others, view=view):
            self._routed.send(rank, message)

    def pass_over_silent(self, now: float) -> None:
        """Wait no longer for ranks that should have said what they have, or sent it."""
        late, places = self.handover.pass_over(now)
        for place in places:
            self._copies.interrupt(place)
        if late:
            self._counters.add("ranks_passed_over", len(late))
            _log.error(
                "rank %d goes on without what ranks %s have of its blocks: in %g s they have not said what "
                "it is, or not sent %d states that they had announced",
                self._rank,
                late,
                self._patience_s,
                len(places),
            )
            self._settle()

    # ------------------------------------------------------------------------------------- messages of ranks

    def push(self, rank: int, push: Push, payload: Buffer | None) -> None:
        """Handle a part of a rank's push.

        Raises:
            ProtocolViolation: it cannot belong to what the scheduler has fixed.
            NoRoom: it would have to wait, and too much waits already.
        """
        served = self._served.get(push.key)
        if served is None:
            self._keep_early(rank, push, payload)
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
            part = rank, push.number, push.chunk
            if part not in block.early:
                block.early[part] = self._charged(rank, push, payload)
            return
        if self._has_lost(block, rank, push.confirmed, push.seen):
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
        if self._elastic and push.number < block.applied[rank]:
            self._confirm(block, rank, push)

    def pull(self, rank: int, pull: _Pull, payload: Buffer | None) -> None:
        """Handle a rank's pull of the blocks of a key that are owned here, or of some rows of a chunk. If it
        comes twice, around a failed link, it is answered twice.

        Raises:
            ProtocolViolation: it asks for what is not owned here.
            NoRoom: it would have to wait, and too much waits already.
        """
        served = self._served.get(pull.key)
        if served is None:
            self._keep_early(rank, pull, payload)
            return
        rows, chunk, blocks = None, 0, served.owned
        if isinstance(pull, PullRows):
            rows, chunk = requested_rows(pull, payload, served.key), pull.chunk
            if chunk not in served.by_chunk:
                raise ProtocolViolation(
                    f"pull of chunk {chunk} of key {served.key.name!r}, which is not rank {self._rank}'s"
                )
            blocks = [served.by_chunk[chunk]]
        waiting = WaitingPull(rank, pull, rows, chunk)
        if rank != self._rank and not all(one.serving and self._can_answer(one, waiting) for one in blocks):
            # What can be answered always has room: others may wait for whoever waits for the answer.
            size = 0 if payload is None else memoryview(payload).nbytes
            charge = self._bytes.take(size, _UPDATES, "updates that it has to contain")
            waiting = WaitingPull(rank, pull, rows, chunk, charge)
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
        self._check_holder(rank, message)
        served = self._served.get(message.key)
        if served is None:
            self._keep_early(rank, message, payload)
        else:
            self._receive_copy(rank, served, message, payload)

    def held(self, rank: int, message: CopiesHeld) -> None:
        """Handle what a rank has of the blocks that are owned here now.

        Raises:
            NotAuthorised: the rank has no states in this view.
            ProtocolViolation: it has said so before.
        """
        self._check_holder(rank, message)
        self.handover.add(rank, message)
        self._staleness.merge(message.clocks)
        self._settle()

    # --------------------------------------------------- messages for keys and blocks that are not served yet

    def _charged(self, rank: int, message: ToOwner, payload: Buffer | None) -> EarlyMessage:
        """Return a message that is to wait for its key, or for a block.

        Raises:
            NoRoom: too much waits already.
        """
        size = 0 if payload is None else memoryview(payload).nbytes
        charge = self._bytes.take(size, _key_of(message.key), f"key {message.key}, which is not served yet")
        return EarlyMessage(rank, message, payload, charge)

    def _keep_early(self, rank: int, message: ToOwner, payload: Buffer | None) -> None:
        if self._rank not in self._eligible:
            raise ProtocolViolation(f"rank {rank} asks rank {self._rank}, which owns nothing")
        self._early.setdefault(message.key, []).append(self._charged(rank, message, payload))

    def _handle_early(self, key: int, messages: Collection[EarlyMessage]) -> None:
        """Handle messages that have waited. What is wrong with one is its sender's fault, and no other's."""
        self._drop_early(key, messages)
        for early in messages:
            rank, message, payload = early.rank, early.message, early.payload
            self._bytes.begin(early.charge.peer, again=True)
            try:
                if isinstance(message, Push):
                    self.push(rank, message, payload)
                elif isinstance(message, (Pull, PullRows, PullStates)):
                    self.pull(rank, message, payload)
                else:
                    self.copy(rank, message, payload)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a message that rank %d sent early: %s", rank, error)

    def _drop_early(self, key: int, messages: Iterable[EarlyMessage]) -> None:
        self._bytes.ready(_key_of(key))
        for early in messages:
            self._bytes.give_back(early.charge)

    def _drop_all_early(self) -> None:
        for key, messages in self._early.items():
            self._drop_early(key, messages)
        self._early.clear()
        self._bytes.all_ready()

    # --------------------------------------------------------------------------------------- block by block

    def _start(self, served: Served, block: Block) -> None:
        """Serve a block, whose state is here now."""
        block.serving = True
        if self._has_lost(block, self._rank, 0, self._seen(block.key, block.number)):
            return
        shown, owner = self._shown.get(block.place, (0, -1))
        if shown > block.version:
            self._lose(block.key, block.number, f"rank {owner} has told of {shown} updates", block.version)
            return
        self._bytes.all_ready()  # which pushes come next, another rank has said
        early, block.early = list(block.early.values()), {}
        self._handle_early(block.key.identity, early)
        self._advance(served, block)

    def _advance(self, served: Served, block: Block) -> None:
        """Ask the store for what comes next, if it is idle: first reads that pulls wait for, then updates."""
        if block.busy:
            return
        if self._is_due(block):
            block.busy = True
            self._read_both(served.store, block.number, functools.partial(self._taken, served, block))
            return
        if not block.serving:
            return
        if block.snapshot is not None:
            self._send_values(served.store, block, block.snapshot)
        ready = self._ready(block)
        if any(wants_states(pull) for pull in ready):
            block.busy = True
            self._read_both(served.store, block.number, functools.partial(self._states, block))
        elif ready and not self._lacks(block):
            block.busy = True
            self._routed.call(lambda: served.store.read(block.number, lambda value: self._read(block, value)))
        elif block.queue:
            block.busy = True
            rank, assembly = block.queue.popleft()
            block.being_applied = rank
            self._release_ahead(block, rank)
            gradient, push, reads = assembly.gradient, assembly.push, self._is_awaited(block, rank)
            done = functools.partial(self._applied, block, rank, push)
            self._routed.call(
                lambda: served.store.apply(block.number, rank, gradient, push.live, done, reads=reads)
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
        self._drop_early(block.key.identity, block.early.values())
        for charges in block.ahead.values():
            for charge in charges:
                self._bytes.give_back(charge)
        block.early.clear()
        block.ahead.clear()
        block.pulls.clear()

    def _ready(self, block: Block) -> list[WaitingPull]:
        """Return the pulls that may be answered now."""
        return [waiting for waiting in block.pulls if self._can_answer(block, waiting)] if block.pulls else []

    def _can_answer(self, block: Block, waiting: WaitingPull) -> bool:
        """Return whether the value contains all updates that a pull requires."""
        rank, pull = waiting.rank, waiting.pull
        applied = block.shown[1] if self._lacks(block) else block.applied
        if applied[rank] < pull.pushed:
            self._has_lost(block, rank, pull.confirmed)
            return False
        return self._staleness.is_fresh_enough(block, waiting, applied)

    def _is_awaited(self, block: Block, rank: int) -> bool:
        """Return whether a pull waits for the next push of a rank alone, and may have the value then: what is
        asked for together wakes a thread once.
        """
        if self._elastic or not block.pulls:
            return False
        applied = [count + (number == rank) for number, count in enumerate(block.applied)]
        return any(
            applied[waiting.rank] >= waiting.pull.pushed
            and not wants_states(waiting)
            and self._staleness.is_fresh_enough(block, waiting, applied)
            for waiting in block.pulls
        )

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
        self._answer(block, ready, states_for(block, ready, values, states))
        self._advance(served, block)
        self._on_progress()

    def _send_values(self, store: BlockStore, block: Block, value: Buffer) -> None:
        ready = [pull for pull in self._ready(block) if not wants_states(pull)]
        for rank in {pull.rank: None for pull in ready}:
            store.pulled(block.number, rank, value)
        self._answer(block, ready, values_for(block, ready, self._staleness))

    def _answer(self, block: Block, ready: list[WaitingPull], answers: Iterator[Answer]) -> None:
        block.pulls = [pull for pull in block.pulls if pull not in ready]
        for rank, message, payload in answers:
            self._routed.send(rank, message, payload)

    def _applied(self, block: Block, rank: int, push: Push, value: Buffer | None) -> None:
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
                self._confirm(block, rank, push, behind)
        block.being_applied = -1
        if not self._lacks(block):
            block.snapshot = value
            self._tell_others(block, block.version)
        self._bytes.ready(_UPDATES)
        self._advance(served, block)
        if self._staleness.applied(block, rank, push.clock):
            self._recheck_pulls()
        self._on_progress()

    def _recheck_pulls(self) -> None:
        """Answer the pulls that may be answered now that a clock has advanced."""
        self._bytes.ready(_UPDATES)
        for served in list(self._served.values()):
            for block in served.owned:
                if block.pulls:
                    self._advance(served, block)

    def _read_both(self, store: BlockStore, block: int, done: Callable[[Buffer, bytes], None]) -> None:
        """Give `done` a copy of a block's value, and its states. Nothing may be applied to it meanwhile."""

        def read(values: Buffer) -> None:
            self._routed.call(lambda: store.states(block, lambda states: done(values, states)))

        self._routed.call(lambda: store.read(block, read))

    # ------------------------------------------------------------------------------ which state is the newest

    def _settle(self) -> None:
        """Go on with blocks whose newest state is known by now."""
        for served in list(self._served.values()):
            self._settle_key(served)

    def _settle_key(self, served: Served) -> None:
        """Take the newest states of this rank's blocks of a key, once it is known who has them."""
        if not self.handover.is_complete:
            return
        for block in served.owned:
            if not block.serving and not self.handover.is_busy(block.place):
                self._settle_block(served, block)

    def _settle_block(self, served: Served, block: Block) -> None:
        handover, place = self.handover, block.place
        version, rank = handover.newest(place)
        kept = self._copies.get(block.place)
        here = block.version if block.installed else 0
        if version > max(here, kept.version if kept else 0):
            self._counters.add("blocks_handed_over")
            handover.ask(place)
            self._routed.send(rank, about(CopyWanted, place, version, self._routed.view))
        elif kept is not None and kept.version > here:
            self._check_state(served, block, kept)
        else:
            if not block.installed:
                block.installed = True
                block.version = int(served.store.begins_with_states)
                self._routed.call(lambda: served.store.install(block.number, None, b""))
            if (version, rank) == (block.version, self.replica(block)):
                block.shown = (version, tuple(block.applied))  # the replica has it from the view before
                self._tell_others(block, version)
            self._start(served, block)

    def _check_state(self, served: Served, block: Block, state: BlockState) -> None:
        """Install a state that another rank has sent if the store can take it, else look for another one."""
        handover, place = self.handover, block.place
        handover.begin_check(place)

        def checked(problem: str) -> None:
            if handover is not self.handover:
                return  # of an earlier view
            handover.end_check(place)
            kept = self._copies.get(place) is state
            if not problem:
                self._counters.add("blocks_taken_over", int(kept))
                self._install(served, block, state)
            else:
                self._refuse(block, state, problem, was_kept=kept)
                self._settle_block(served, block)
            self._on_progress()

        self._routed.call(lambda: served.store.check(block.number, state.states, checked))

    def _refuse(self, block: Block, state: BlockState, problem: str, *, was_kept: bool) -> None:
        if was_kept:
            self._copies.drop(block.place)
        text = self.handover.refuse(block, state.sender, problem, was_kept=was_kept)
        self._counters.add("states_refused")
        _log.error("%s; version %d is passed over for the newest state that is left", text, state.version)

    def _install(self, served: Served, block: Block, state: BlockState) -> None:
        store = served.store
        if block.busy:  # what the store is asked for belongs to an earlier state
            block = served.renew(block)
        block.take(state)
        block.installed = True
        self._copies.drop(block.place)
        self._routed.call(lambda: store.install(block.number, state.values, state.states))
        self._start(served, block)

    # ---------------------------------------------------------------------------------------- an owner's copy

    def replica(self, block: Block) -> int | None:
        """Return the rank that keeps the block's state, too; None: there is no second rank."""
        return self._owners.replica(block.key, block.number) if self._elastic else None

    def _lacks(self, block: Block) -> bool:
        """Return whether the replica has not got what has been applied to a block."""
        return block.version > block.shown[0] and self.replica(block) is not None

    def _is_due(self, block: Block) -> bool:
        """Return whether the state of an idle block is to be read, for another rank."""
        if not self._elastic or not block.installed:
            return False
        if block.wanted_by:
            return True
        if not block.serving or block.shipped is not None or not self._lacks(block):
            return False
        return not block.queue or len(block.unconfirmed) >= self._copies.ranks

    def _taken(self, served: Served, block: Block, values: Buffer, states: bytes) -> None:
        block.busy = False
        state = block.state(values, states)
        for rank in sorted(block.wanted_by):
            self._ship(rank, block.place, state)
        block.wanted_by.clear()
        replica = self.replica(block)
        if block.serving and block.shipped is None and replica is not None and self._lacks(block):
            block.shipped = state
            self._ship(replica, block.place, state)
        self._advance(served, block)

    def _ship(self, rank: int, place: tuple[int, int], state: BlockState) -> None:
        for message, payload in pieces_of(state, *place, view=self._routed.view):
            self._counters.add("bytes_of_copies", memoryview(payload).nbytes)
            self._routed.send(rank, message, payload)

    def _kept(self, served: Served, block: Block, version: int) -> None:
        """Record that the replica has a state that was sent to it."""
        state = block.shipped
        if state is None or state.version != version:
            return
        block.shipped = None
        block.shown = (version, tuple(state.applied))
        block.snapshot = state.values
        confirmed = [one for one in block.unconfirmed if one[0] <= version]
        block.unconfirmed[:] = [one for one in block.unconfirmed if one[0] > version]
        for _, rank, message in confirmed:
            self._routed.send(rank, message)
        self._tell_others(block, version)
        self._bytes.ready(_UPDATES)
        self._advance(served, block)

    def _confirm(self, block: Block, rank: int, push: Push, behind: int = 0) -> None:
        """Confirm a push that is in the state, once it is with the replica, too."""
        message = Applied(path=(), hop=0, key=push.key, block=block.number, number=push.number, behind=behind)
        if not self._lacks(block) or message.number < block.shown[1][rank]:
            self._routed.send(rank, message)
        else:
            block.unconfirmed.append((block.version, rank, message))

    def _tell_others(self, block: Block, version: int) -> None:
        """Tell ranks other than the replica, which has it, of a block's state: whoever has an older one may
        drop it, and whoever finds none later knows that it is lost.
        """
        if self._elastic and self.handover.is_news(block.place, version):
            for rank in sorted(self._eligible - {self._rank, self.replica(block)}):
                self._routed.send(rank, about(CopyReleased, block.place, version, self._routed.view))

    # ------------------------------------------------------------------------------- messages about copies

    def _check_holder(self, rank: int, message: CopyMessage | CopiesHeld) -> None:
        """Check that a message can come from a rank.

        Raises:
            NotAuthorised: the rank has no states in this view.
        """
        if not self._elastic or rank not in self._eligible:
            raise NotAuthorised(
                f"rank {rank} sends {type(message).__name__}, but it has no states in view "
                f"{self._routed.view}"
            )

    def _receive_copy(self, rank: int, served: Served, message: CopyMessage, payload: Buffer | None) -> None:
        """Handle a message about the state of one block of a key that is served here.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        key, number = served.key, message.block
        whole = served.store.whole
        if number not in self._owners.blocks(key, whole=whole):
            raise NotAuthorised(
                f"rank {rank} sends {type(message).__name__} of block {number} of key {key.name!r}"
            )
        owner, replica = self._owners.owner(key, number), self._owners.replica(key, number)
        block, place = served.blocks.get(number), (key.identity, number)
        if isinstance(message, CopyKept):
            if owner == self._rank and rank == replica and block is not None:
                self._kept(served, block, message.version)
                return
        elif isinstance(message, CopyWanted):
            if rank == owner:
                self._give(rank, served, block, place)
                return
        elif isinstance(message, CopyReleased):
            if rank == owner:
                self._shown[place] = message.version, rank
                self._release(served, block, place, keeps=replica == self._rank)
                return
        elif rank == owner and replica == self._rank:
            self._keep_copy(rank, served, message, payload)
            return
        elif owner == self._rank and block is not None:
            if self.handover.comes_from(place, rank):
                self._arrive(
                    rank, served, block, self._copies.add(rank, message, payload, served.nbytes(number))
                )
            return
        raise NotAuthorised(
            f"rank {rank} sends {type(message).__name__} of block {number} of key {key.name!r}: rank {owner} "
            f"owns it, and rank {replica} keeps a copy"
        )

    def _arrive(self, rank: int, served: Served, block: Block, state: BlockState | None) -> None:
        """Go on with a block whose state comes from a rank that has announced it, once it is whole."""
        if state is None:
            return
        if self.handover.take(block.place, state.version):
            self._check_state(served, block, state)
            return
        self._settle_block(served, block)
        raise ProtocolViolation(
            f"rank {rank} sends version {state.version} of block {block.number} of key "
            f"{served.key.name!r}: it has announced a newer one"
        )

    def _keep_copy(self, rank: int, served: Served, message: BlockCopy, payload: Buffer | None) -> None:
        """Keep a state for a block's owner."""
        state = self._copies.add(rank, message, payload, served.nbytes(message.block))
        if state is None:
            return
        place = message.key, message.block
        self._copies.keep(place, state)
        self._discard(served, message.block)
        self._counters.add("copies_kept")
        self._routed.send(rank, about(CopyKept, place, message.version, self._routed.view))

    def _give(self, rank: int, served: Served, block: Block | None, place: tuple[int, int]) -> None:
        """Send a block's state to its new owner."""
        kept = self._copies.get(place)
        if block is not None and block.installed and block.version_soon > (kept.version if kept else 0):
            block.wanted_by.add(rank)
            self._advance(served, block)
        elif kept is not None:
            self._ship(rank, place, kept)

    def _release(self, served: Served, block: Block | None, place: tuple[int, int], *, keeps: bool) -> None:
        """Drop a state that two other ranks have."""
        if not keeps:
            self._copies.drop(place)
        if block is not None:
            self._discard(served, block.number)

    def _discard(self, served: Served, number: int) -> None:
        block = served.blocks.get(number)
        if block is not None and block not in served.owned:
            del served.blocks[number]
            self._routed.call(lambda: served.store.discard(number))

    def _has_lost(self, block: Block, rank: int, confirmed: int, seen: int | None = 0) -> bool:
        """End the job if a rank knows of pushes that are in no state that is left; return whether.

        Args:
            block: of this rank.
            rank: that knows of them.
            confirmed: how many of its own were confirmed.
            seen: how many of other ranks it has pulled; None: it has no values that it could go on with.
        """
        if not self._elastic or not block.serving:
            return False
        place, others = (block.key, block.number), block.others(rank)
        if confirmed > block.applied[rank]:
            self._lose(*place, f"{confirmed} pushes of rank {rank} were confirmed", block.applied[rank])
        elif seen is None and block.version == 0:
            self._lose(*place, f"rank {rank} has joined later and has pulled no values", 0)
        elif seen is not None and seen > others:
            self.went_back(*place, seen, others, rank=rank)
        else:
            return False
        return True

    def went_back(self, key: Key, block: int, seen: int, here: int, *, rank: int = -1) -> None:
        """End the job: a rank (-1: this one) has pulled `seen` updates by others, and `here` are left."""
        rank = self._rank if rank < 0 else rank
        self._lose(key, block, f"rank {rank} has pulled values with {seen} pushes of other ranks", here)

    def _lose(self, key: Key, block: int, known: str, here: int) -> None:
        departed = self._departed - self._eligible
        self._end_job(NodeLost(self.handover.lost_text(key, block, known, here, departed)))


def _turn(block: Block, rank: int, number: int) -> tuple[object, ...]:
    """Return the name of what a push waits for."""
    return "turn", block.place, rank, number


def _key_of(number: int) -> tuple[str, int]:
    """Return the name of what messages for a key wait for."""
    return "owner", number


# Which rank has the newest state of a block, at the begin of a view.
#
# A new view gives blocks other owners and replicas. Each rank tells each other one which states it has of the
# blocks that are the other one's now. Once an owner has heard of all, it takes the newest state. What was
# confirmed is at two processes, and a process that was away comes back without states; so the newest one has
# all that was ever confirmed, unless both processes have left together.
#
# A rank may say that it has a state, and not send it, or say nothing. An owner waits for it for a bounded
# time, and goes on with the newest state of the others. So it does if what comes is none that its update rule
# takes.


class Handover:
    """What the other ranks have of this rank's blocks, in one view.

    Attributes:
        waits_for: ranks that have not said it yet.
        passed_over: ranks that have not said it, or not sent what they have, in time.
    """

    def __init__(self, waits_for: Iterable[int] = (), *, patience_s: float = math.inf) -> None:
        """Begin a view; these ranks will say what they have. Each may be silent for `patience_s`."""
        self.waits_for: Final = set(waits_for)
        self.passed_over: Final[set[int]] = set()
        self._patience_s: Final = patience_s
        self._said: Final[set[int]] = set()
        """Ranks that have said what they have."""
        self._versions: Final[dict[Place, dict[int, int]]] = {}
        """By block and rank; 0: it has not sent what it had."""
        self._asked: Final[dict[Place, tuple[int, int]]] = {}
        """By block: the version that is to come, and the rank that has it."""
        self._checking: Final[set[Place]] = set()
        """Blocks whose states are here, and are being checked."""
        self._refused: Final[dict[Place, str]] = {}
        """By block: which rank's state could not be taken, and why."""
        self._silent_since: Final[dict[int, float]] = {}
        """Of ranks that this one waits for."""
        self._told: Final[dict[Place, int]] = {}
        """By block: which version other ranks have heard of; 2 stands for all later ones."""

    @property
    def is_complete(self) -> bool:
        """Whether all have said what they have."""
        return not self.waits_for

    def add(self, rank: int, message: CopiesHeld) -> None:
        """Record what a rank has.

        Raises:
            ProtocolViolation: it has said so in this view: what it names is kept, and has to be bounded.
        """
        if rank in self._said:
            raise ProtocolViolation(f"rank {rank} says twice in one view which states it has")
        self._said.add(rank)
        self.waits_for.discard(rank)
        for copy in message.copies:
            self._versions.setdefault((copy.key, copy.block), {})[rank] = copy.version

    def newest(self, place: Place) -> tuple[int, int]:
        """Return the newest version of a block that another rank has, and which; (0, -1): none has any."""
        versions = self._versions.get(place, {})
        return max(((version, rank) for rank, version in versions.items() if version > 0), default=(0, -1))

    def is_news(self, place: Place, version: int) -> bool:
        """Return whether other ranks are to hear which version of a block its replica has: the first one of
        the view, and the first one after 1, which may be that of initial values (`begins_with_states`).
        """
        self._versions.pop(place, None)
        told, self._told[place] = self._told.get(place, 0), min(version, 2)
        return told < self._told[place]

    # ------------------------------------------------------------------------------- states that are to come

    def ask(self, place: Place) -> tuple[int, int]:
        """Wait for the newest state of a block; return its version, and the rank that has it."""
        self._asked[place] = self.newest(place)
        return self._asked[place]

    def comes_from(self, place: Place, rank: int) -> bool:
        """Record that a part of a block's state comes from a rank; return whether it was asked for it."""
        if self._asked.get(place, (0, -1))[1] != rank:
            return False
        self._silent_since.pop(rank, None)
        return True

    def is_busy(self, place: Place) -> bool:
        """Return whether a block's state is to come, or is being checked."""
        return place in self._asked or place in self._checking

    def begin_check(self, place: Place) -> None:
        """Record that a block's state is being checked."""
        self._checking.add(place)

    def end_check(self, place: Place) -> None:
        """Record that a block's state is being checked no longer."""
        self._checking.discard(place)

    def refuse(self, block: Block, rank: int, problem: str, *, was_kept: bool) -> str:
        """Record that the states of the update rule that a rank has sent of a block are none; return that as
        text. If the copy `was_kept` here for long, the rank may have a better one now; else it has none.
        """
        text = self._refused[block.place] = (
            f"the states of the update rule that rank {rank} has sent of block {block.number} of key "
            f"{block.key.name!r} are {problem}"
        )
        versions = self._versions.get(block.place, {})
        if not was_kept and rank in versions:
            versions[rank] = 0
        return text

    def take(self, place: Place, version: int) -> bool:
        """Wait for a block's state no longer. Return whether this version is as new as what was announced; if
        it is not, that rank has none.
        """
        announced, rank = self._asked.pop(place)
        if version >= announced:
            return True
        self._versions[place][rank] = 0
        return False

    def pass_over(self, now: float) -> tuple[list[int], list[Place]]:
        """Wait no longer for ranks that have been silent for too long. Return them, and the blocks whose
        states they had.
        """
        owing = self._owing()
        for rank in self._silent_since.keys() - owing:
            del self._silent_since[rank]
        for rank in owing:
            self._silent_since.setdefault(rank, now)
        late = sorted(rank for rank, since in self._silent_since.items() if now >= since + self._patience_s)
        places = [place for place, (_, rank) in self._asked.items() if rank in late]
        for place in places:
            del self._asked[place]
        for versions in self._versions.values():
            versions.update((rank, 0) for rank in late if rank in versions)
        self.waits_for.difference_update(late)
        self.passed_over.update(late)
        return late, places

    def next_tick(self) -> float:
        """Return when `pass_over` has something to do."""
        if not self.waits_for and not self._asked:
            return math.inf
        owing = self._owing()
        if not owing <= self._silent_since.keys():
            return -math.inf
        return min(self._silent_since[rank] + self._patience_s for rank in owing)

    def _owing(self) -> set[int]:
        return self.waits_for | {rank for _, rank in self._asked.values()}

    def lost_text(self, key: Key, block: int, known: str, here: int, departed: Iterable[int]) -> str:
        """Return which pushes are `known` that are in no state that is left of a block, of which the newest
        has `here`; and who may have had them.
        """
        cause, gone = "no rank that is here has a newer one", ", ".join(map(str, sorted(departed)))
        if (key.identity, block) in self._refused:
            cause = self._refused[key.identity, block]
        elif self.passed_over:
            cause = f"ranks {sorted(self.passed_over)} have not sent what they have of it"
        elif gone:
            cause = f"its owner and its replica have left together (ranks {gone})"
        return (
            f"key {key.name!r}: {known}, and the newest state of block {block} has {here}: {cause}; "
            "begin again from saved values"
        )

    def waiting_text(self) -> str:
        """Return for whom this rank's blocks wait, for a person; empty: for nobody."""
        if self.waits_for:
            return f"ranks {sorted(self.waits_for)} have not said what they have of this rank's blocks"
        if self._asked:
            ranks = sorted({rank for _, rank in self._asked.values()})
            return f"{len(self._asked)} blocks wait for their states from ranks {ranks}"
        if self._checking:
            return f"the states of {len(self._checking)} blocks are being checked"
        return ""


def versions_of(served: Served, copies: BlockCopies) -> dict[Place, int]:
    """Return the version of each block of a key that this rank has in any form."""
    found = {place: state.version for place, state in copies.kept() if place[0] == served.key.identity}
    for block in served.blocks.values():
        if block.installed and block.version_soon:
            found[block.place] = max(block.version_soon, found.get(block.place, 0))
    return found


def announcements(
    keys: Iterable[Served],
    copies: BlockCopies,
    clocks: Mapping[int, Clocks],
    owners: Owners,
    *,
    ranks: Collection[int],
    view: int,
) -> Iterator[tuple[int, CopiesHeld]]:
    """Yield what to tell each of these ranks: which states are here of the blocks that it owns now."""
    found: dict[int, list[HeldCopy]] = {rank: [] for rank in ranks}
    for served in keys:
        for (key, number), version in versions_of(served, copies).items():
            owner = owners.owner(served.key, number)
            if owner in found:
                found[owner].append(HeldCopy(key=key, block=number, version=version))
    heard = tuple(HeldClocks(namespace=space, ended=one.ended_by_rank) for space, one in clocks.items())
    for rank, held in found.items():
        yield rank, CopiesHeld(path=(), hop=0, view=view, copies=tuple(held), clocks=heard)
