"""Which rank has the newest state of a block, at the begin of a view. Pure.

A new view gives blocks other owners and replicas. Each rank tells each other one which states it has of the
blocks that are the other one's now. Once an owner has heard of all, it takes the newest state. What was
confirmed is at two processes, and a process that was away comes back without states; so the newest one has
all that was ever confirmed, unless both processes have left together.

A rank may say that it has a state, and not send it, or say nothing. An owner waits for it for a bounded time,
and goes on with the newest state of the others. So it does if what comes is none that its update rule takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from netstorm.kvstore.asynchronous.block import Block
from netstorm.kvstore.asynchronous.clocks import Clocks
from netstorm.kvstore.asynchronous.copies import Copies
from netstorm.kvstore.asynchronous.owners import Owners
from netstorm.kvstore.asynchronous.served import Served
from netstorm.protocol.messages import CopiesHeld, HeldClocks, HeldCopy

__all__ = ["Handover", "announcements", "versions_of"]

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


def versions_of(served: Served, copies: Copies) -> dict[Place, int]:
    """Return the version of each block of a key that this rank has in any form."""
    found = {place: state.version for place, state in copies.kept() if place[0] == served.key.identity}
    for block in served.blocks.values():
        if block.installed and block.version_soon:
            found[block.place] = max(block.version_soon, found.get(block.place, 0))
    return found


def announcements(
    keys: Iterable[Served],
    copies: Copies,
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
