"""How far ranks are, as an owner knows it, and whether a pull must wait for the slowest of them. Pure.

Bounded staleness is that of stale synchronous parallel training (MLNET, HotCloud'15). Clocks are those that
scripts count, or else each push of a key is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.block import Block, WaitingPull
from netstorm.kvstore.asynchronous.clocks import MOST_COUNTED, Clocks, check_counts
from netstorm.protocol.messages import HeldClocks, PullStates, Tick

__all__ = ["Staleness"]

_MOST_STORES: Final = 4096
_MOST_AHEAD: Final = 65_536
"""Clocks of one rank that may be under way to an owner: more wait in queues and fill them."""


class Staleness:
    """The ranks that push, and their clocks.

    Attributes:
        newcomers: ranks whose processes have joined later.
    """

    def __init__(self, ranks: int, present: Iterable[int] | None = None) -> None:
        """Begin, in a job of `ranks` ranks. If it is elastic, those that are in it at first are `present`;
        otherwise (None) all are, always.
        """
        self._ranks: Final = ranks
        self._elastic: Final = present is not None
        self._clocks: Final[dict[int, Clocks]] = {}
        """By namespace."""
        self._running: Final = set(range(ranks))
        """Ranks that have not finished."""
        self._present = set(range(ranks) if present is None else present)
        self.newcomers: Final[set[int]] = set()

    @property
    def clocks(self) -> Mapping[int, Clocks]:
        """The clocks of each store, by namespace."""
        return self._clocks

    # ------------------------------------------------------------------------------- ranks that come and go

    def finished(self, rank: int) -> None:
        """Record that a rank pushes no more: it holds up no pull any longer."""
        self._running.discard(rank)

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left the job. Another one with this rank counts from 0."""
        self._running.add(rank)
        self.newcomers.add(rank)
        for clocks in self._clocks.values():
            clocks.forget(rank)

    def change_view(self, members: Iterable[int]) -> None:
        """Record who is in the job."""
        self._present = set(members)

    def merge(self, heard: Iterable[HeldClocks]) -> None:
        """Take over what another rank has heard of clocks.

        Raises:
            ProtocolViolation: it speaks of other ranks than the job has, of no store, or of too many clocks.
        """
        for one in heard:
            if not 0 <= one.namespace < _MOST_STORES or len(one.ended) != self._ranks:
                raise ProtocolViolation(
                    f"clocks of {len(one.ended)} ranks in store {one.namespace}: expected {self._ranks} ranks"
                )
            check_counts(*one.ended)
            self._of(one.namespace).merge(one.ended)

    # -------------------------------------------------------------------------------------------- clocks end

    def tick(self, rank: int, tick: Tick) -> bool:
        """Record that a clock of a rank has ended; return whether all its pushes have been applied.

        Raises:
            ProtocolViolation: it is far from the rank's last one, or of no store.
        """
        clocks = self._clocks.get(tick.namespace)
        ended = 0 if clocks is None else clocks.of(rank)
        far = tick.clock > (MOST_COUNTED if self._elastic else ended + _MOST_AHEAD)
        if not 0 <= tick.namespace < _MOST_STORES or tick.pushed < 0 or tick.clock < 0 or far:
            raise ProtocolViolation(
                f"rank {rank} ends clock {tick.clock} of store {tick.namespace} after {tick.pushed} pushes: "
                f"expected one of {_MOST_STORES} stores, and at most {_MOST_AHEAD} clocks after {ended} "
                f"({MOST_COUNTED} in an elastic job)"
            )
        clocks = self._of(tick.namespace)
        if self._elastic:
            return clocks.reached(rank, tick.clock)
        return clocks.ended(rank, tick.clock, tick.pushed)

    def applied(self, block: Block, rank: int, clock: int) -> bool:
        """Count a push that has been applied; return whether that ends a clock of its rank."""
        return not self._elastic and self._of(block.key.spec.namespace).applied(rank, clock)

    def slowest(self, block: Block, rank: int) -> tuple[int, int]:
        """Return the least number of pushes of a block, and of clocks, of the ranks other than this one."""
        if not self._elastic:
            return 0, 0
        others = self._others(rank)
        counts = (block.pushes_of(other, block.applied) for other in others)
        pushes = min((count for count in counts if count is not None), default=0)
        return pushes, self._of(block.key.spec.namespace).slowest(others) or 0

    def is_fresh_enough(self, block: Block, waiting: WaitingPull, applied: Sequence[int]) -> bool:
        """Return whether a value, in which so many pushes of each rank are, has those of the slowest rank
        that a pull demands.
        """
        rank, pull = waiting.rank, waiting.pull
        if isinstance(pull, PullStates) or pull.least <= 0:
            return True
        others = self._others(rank)
        if pull.counted:
            slowest = self._of(block.key.spec.namespace).slowest(others)
        else:
            counts = (block.pushes_of(other, applied) for other in others)
            slowest = min((count for count in counts if count is not None), default=None)
        return slowest is None or slowest >= pull.least

    def _others(self, rank: int) -> list[int]:
        """Return the other ranks that are in the job and go on pushing."""
        return [other for other in self._running & self._present if other != rank]

    def _of(self, namespace: int) -> Clocks:
        found = self._clocks.get(namespace)
        if found is None:
            found = self._clocks[namespace] = Clocks(self._ranks)
            for rank in self.newcomers:
                found.forget(rank)
        return found
