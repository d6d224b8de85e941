"""Two ranks for each block: an owner ships states to the replica, and blocks change owners. Pure.

After pushes have been applied, the owner sends the state to the block's replica. Once it is there, the pushes
are confirmed and pulls get that value: nothing that a rank has heard of is lost with the owner. One state of
a block is on its way at a time; what is applied meanwhile goes with the next one.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from netstorm.errors import NodeLost, NotAuthorised, ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import (
    Actions,
    Block,
    BlockCopies,
    BlockState,
    Clocks,
    Owners,
    Served,
    about,
    pieces_of,
    read_both,
)
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
    Push,
)

__all__ = ["Handover", "Replication", "versions_of"]


_log = logging.getLogger(__name__)


class Replication:
    """What this rank does so that blocks survive their owners.

    Attributes:
        is_used: the job is elastic.
        handover: what the other ranks have of this rank's blocks.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        owners: Owners,
        counters: Counters,
        *,
        elastic: bool,
        patience_s: float,
        do: Actions,
    ) -> None:
        """Begin with the job's first view, in which no rank has any states.

        Args:
            rank: of this node, of `ranks`.
            owners: of blocks.
            counters: of the process.
            elastic: the job is; in any other one, blocks have no replicas.
            patience_s: longest silence of a rank that this one waits for at the begin of a view.
            do: what it may have done.
        """
        self._rank: Final = rank
        self._owners: Final = owners
        self._counters: Final = counters
        self.is_used: Final = elastic
        self._patience_s: Final = patience_s
        self._do: Final = do
        self._send, self._call = do.send, do.call
        self._copies: Final = BlockCopies(ranks)
        self.handover = Handover()
        self._view = 0
        self._eligible: frozenset[int] = frozenset(owners.ranks)
        self._departed: set[int] = set()

    # ------------------------------------------------------------------------------------------------- views

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left."""
        self._departed.add(rank)
        self._copies.forget(rank)

    def begin(self, view: int, eligible: Collection[int]) -> None:
        """Begin a view, in which these ranks may own blocks."""
        self._view = view
        self._eligible = frozenset(eligible)
        self._copies.interrupt()
        others = self._eligible - {self._rank} if self._rank in self._eligible else ()
        self.handover = Handover(others, patience_s=self._patience_s)

    def announce(self, keys: Iterable[Served], clocks: Mapping[int, Clocks]) -> None:
        """Tell the other ranks which states are here of the blocks that are theirs now."""
        if self._rank not in self._eligible:
            return
        others = self._eligible - {self._rank}
        told = announcements(keys, self._copies, clocks, self._owners, ranks=others, view=self._view)
        for rank, message in told:
            self._send(rank, message, None)

    def held(self, rank: int, message: CopiesHeld) -> None:
        """Record what a rank has of this rank's blocks.

        Raises:
            NotAuthorised: the rank has no states in this view.
        """
        self.check(rank, message)
        self.handover.add(rank, message)

    def tick(self, now: float) -> bool:
        """Wait no longer for ranks that should have said what they have, or sent it. Return whether there are
        any: then `settle` all keys.
        """
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
        return bool(late)

    def settle(self, served: Served) -> None:
        """Take the newest states of this rank's blocks of a key, once it is known who has them."""
        if not self.handover.is_complete:
            return
        for block in served.owned:
            if not block.serving and not self.handover.is_busy(block.place):
                self._settle(served, block)

    def _settle(self, served: Served, block: Block) -> None:
        handover, place = self.handover, block.place
        version, rank = handover.newest(place)
        kept = self._copies.get(block.place)
        here = block.version if block.installed else 0
        if version > max(here, kept.version if kept else 0):
            self._counters.add("blocks_handed_over")
            handover.ask(place)
            self._send(rank, about(CopyWanted, place, version, self._view), None)
        elif kept is not None and kept.version > here:
            self._check(served, block, kept)
        else:
            if not block.installed:
                block.installed = True
                block.version = int(served.store.begins_with_states)
                self._call(lambda: served.store.install(block.number, None, b""))
            if (version, rank) == (block.version, self.replica(block)):
                block.shown = (version, tuple(block.applied))  # the replica has it from the view before
                self._release_others(block)
            self._do.start(served, block)

    def _check(self, served: Served, block: Block, state: BlockState) -> None:
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
                self._settle(served, block)
            self._do.on_progress()

        self._call(lambda: served.store.check(block.number, state.states, checked))

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
        self._call(lambda: store.install(block.number, state.values, state.states))
        self._do.start(served, block)

    # ---------------------------------------------------------------------------------------- a block's owner

    def replica(self, block: Block) -> int | None:
        """Return the rank that keeps the block's state, too; None: there is no second rank."""
        return self._owners.replica(block.key, block.number) if self.is_used else None

    def lacks(self, block: Block) -> bool:
        """Return whether the replica has not got what has been applied to a block."""
        return block.version > block.shown[0] and self.replica(block) is not None

    def _is_due(self, block: Block) -> bool:
        """Return whether the state of an idle block is to be read, for another rank."""
        if not self.is_used or not block.installed:
            return False
        if block.wanted_by:
            return True
        if not block.serving or block.shipped is not None or not self.lacks(block):
            return False
        return not block.queue or len(block.unconfirmed) >= self._copies.ranks

    def take(self, served: Served, block: Block) -> bool:
        """Read the state of an idle block, and send it to those who need it, if any do; return whether."""
        if not self._is_due(block):
            return False
        block.busy = True
        read_both(served.store, block.number, functools.partial(self._taken, served, block), self._call)
        return True

    def _taken(self, served: Served, block: Block, values: Buffer, states: bytes) -> None:
        block.busy = False
        state = block.state(values, states)
        for rank in sorted(block.wanted_by):
            self._ship(rank, block.place, state)
        block.wanted_by.clear()
        replica = self.replica(block)
        if block.serving and block.shipped is None and replica is not None and self.lacks(block):
            block.shipped = state
            self._ship(replica, block.place, state)
        self._do.advance(served, block)

    def _ship(self, rank: int, place: tuple[int, int], state: BlockState) -> None:
        for message, payload in pieces_of(state, *place, view=self._view):
            self._counters.add("bytes_of_copies", memoryview(payload).nbytes)
            self._send(rank, message, payload)

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
            self._send(rank, message, None)
        self._release_others(block)
        self._do.advance(served, block)

    def confirm(self, block: Block, rank: int, push: Push, behind: int = 0) -> None:
        """Confirm a push that is in the state, once it is with the replica, too."""
        message = Applied(path=(), hop=0, key=push.key, block=block.number, number=push.number, behind=behind)
        if not self.lacks(block) or message.number < block.shown[1][rank]:
            self._send(rank, message, None)
        else:
            block.unconfirmed.append((block.version, rank, message))

    def _release_others(self, block: Block) -> None:
        """Let those drop a block's state who have had it before: the replica has a newer one."""
        for rank in self.handover.take_holders(block.place) - {self.replica(block)}:
            self._send(rank, about(CopyReleased, block.place, block.shown[0], self._view), None)

    # ------------------------------------------------------------------------------- messages about copies

    def check(self, rank: int, message: CopyMessage | CopiesHeld) -> None:
        """Check that a message can come from a rank.

        Raises:
            NotAuthorised: the rank has no states in this view.
        """
        if not self.is_used or rank not in self._eligible:
            raise NotAuthorised(
                f"rank {rank} sends {type(message).__name__}, but it has no states in view {self._view}"
            )

    def receive(self, rank: int, served: Served, message: CopyMessage, payload: Buffer | None) -> None:
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
                self._release(served, block, place, keeps=replica == self._rank)
                return
        elif rank == owner and replica == self._rank:
            self._keep(rank, served, message, payload)
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
            self._check(served, block, state)
            return
        self._settle(served, block)
        raise ProtocolViolation(
            f"rank {rank} sends version {state.version} of block {block.number} of key "
            f"{served.key.name!r}: it has announced a newer one"
        )

    def _keep(self, rank: int, served: Served, message: BlockCopy, payload: Buffer | None) -> None:
        """Keep a state for a block's owner."""
        state = self._copies.add(rank, message, payload, served.nbytes(message.block))
        if state is None:
            return
        place = message.key, message.block
        self._copies.keep(place, state)
        self._discard(served, message.block)
        self._counters.add("copies_kept")
        self._send(rank, about(CopyKept, place, message.version, self._view), None)

    def _give(self, rank: int, served: Served, block: Block | None, place: tuple[int, int]) -> None:
        """Send a block's state to its new owner."""
        kept = self._copies.get(place)
        if block is not None and block.installed and block.version_soon > (kept.version if kept else 0):
            block.wanted_by.add(rank)
            self._do.advance(served, block)
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
            self._call(lambda: served.store.discard(number))

    # ------------------------------------------------------------------------------------------- for people

    def has_lost(self, block: Block, rank: int, confirmed: int) -> bool:
        """End the job if pushes that were confirmed are in no state that is left; return whether."""
        if not self.is_used or not block.serving or confirmed <= block.applied[rank]:
            return False
        reason = self.handover.lost_text(block, rank, confirmed, self._departed - self._eligible)
        self._do.end_job(NodeLost(reason))
        return True

    def waiting_text(self, blocks: Collection[Block]) -> str:
        """Return for whom these blocks wait, for a person; empty: for nobody."""
        text = self.handover.waiting_text()
        if text:
            return text
        replicas = {self.replica(block) for block in blocks if block.shipped is not None}
        found = sorted(rank for rank in replicas if rank is not None)
        return f"copies wait until ranks {found} have confirmed them" if found else ""

    def stop(self) -> None:
        """Drop everything."""
        self._copies.clear()
        self.handover = Handover()


# Which rank has the newest state of a block, at the begin of a view. Pure.
#
# A new view gives blocks other owners and replicas. Each rank tells each other one which states it has of the
# blocks that are the other one's now. Once an owner has heard of all, it takes the newest state. What was
# confirmed is at two processes, and a process that was away comes back without states; so the newest one has
# all that was ever confirmed, unless both processes have left together.
#
# A rank may say that it has a state, and not send it, or say nothing. An owner waits for it for a bounded
# time, and goes on with the newest state of the others. So it does if what comes is none that its update rule
# takes.

Place = tuple[int, int]
"""A key's number, and the block's."""


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

    @property
    def is_complete(self) -> bool:
        """Whether all have said what they have."""
        return not self.waits_for

    def add(self, rank: int, message: CopiesHeld) -> None:
        """Record what a rank has."""
        self.waits_for.discard(rank)
        for copy in message.copies:
            self._versions.setdefault((copy.key, copy.block), {})[rank] = copy.version

    def newest(self, place: Place) -> tuple[int, int]:
        """Return the newest version of a block that another rank has, and which; (0, -1): none has any."""
        found = self._versions.get(place, {})
        return max(((version, rank) for rank, version in found.items() if version > 0), default=(0, -1))

    def take_holders(self, place: Place) -> set[int]:
        """Return the ranks that have a state of a block, once."""
        return set(self._versions.pop(place, ()))

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
        owing = self._owing()
        if not owing <= self._silent_since.keys():
            return -math.inf
        return min((self._silent_since[rank] + self._patience_s for rank in owing), default=math.inf)

    def _owing(self) -> set[int]:
        return self.waits_for | {rank for _, rank in self._asked.values()}

    def lost_text(self, block: Block, rank: int, confirmed: int, departed: Iterable[int]) -> str:
        """Return that pushes of a rank are in no state that is left of a block, and who may have had it."""
        cause, gone = "no rank that is here has a newer one", ", ".join(map(str, sorted(departed)))
        if block.place in self._refused:
            cause = self._refused[block.place]
        elif self.passed_over:
            cause = f"ranks {sorted(self.passed_over)} have not sent what they have of it"
        elif gone:
            cause = f"its owner and its replica have left together (ranks {gone})"
        return (
            f"key {block.key.name!r}: {confirmed} pushes of rank {rank} were confirmed, and the newest state "
            f"of block {block.number} has {block.applied[rank]}: {cause}; begin again from "
            "saved values"
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
