"""Exploration: which chunk takes a detour only to measure its links, and when. Pure.

A policy may mark detours as `explore`: links that no tree uses, whose bandwidth is to be estimated. A small
share of the chunks (EXPLORE_SHARE) goes over them, one at a time. A chunk that arrives late delays its round,
so chunks that would not be late are preferred.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from netstorm.kvstore.paths.auxiliary import PartId
from netstorm.topology.policy import Detour

__all__ = ["Exploration"]

_CHUNKS_PER_TURN: Final = 6
"""Chunks that explore a path one after the other. An estimate rests on the last PROBE_CHUNK_NUM (4) chunks,
and the first chunk only opens the connections and shows their latency. Single chunks, far apart, never add up
to an estimate.
"""

_UNEXPLORED_FACTOR: Final = 5.0
"""While there are unexplored paths, so many times the usual share of chunks explores."""

_LATE_EVERY_S: Final = 30.0
"""How often a chunk may explore a known path though it, and its round, will be late."""


class Exploration:
    """The exploration of all paths of one node."""

    def __init__(self, share: float) -> None:
        """Let this share of the chunks explore."""
        self._share: Final = share
        self._budget = 0.0
        """Chunks that may explore now."""
        self._explored: Final[dict[tuple[int, ...], int]] = {}
        """By path: how many chunks have explored it."""
        self._late_at = -math.inf
        """When a chunk last explored though it would be late."""
        self._in_flight: PartId | None = None
        """The chunk that explores now; only one at a time may be late."""

    def count_chunk(self, detours: Collection[Detour]) -> None:
        """Add to the budget for a chunk whose neighbour has these detours."""
        known = [detour.again or self._turns(detour) > 0 for detour in detours if detour.explore]
        if known:
            self._budget += self._share * (1.0 if all(known) else _UNEXPLORED_FACTOR)

    def may_explore(self) -> bool:
        """Return whether a chunk may explore now."""
        return self._budget >= 1.0 and self._in_flight is None

    def next_path(self, detours: Sequence[Detour], all_detours: Iterable[Detour]) -> int | None:
        """Return the index of the detour to explore; None: it is another neighbour's turn.

        Args:
            detours: usable ones to one neighbour.
            all_detours: those to all neighbours that chunks wait for.
        """
        turns = [(self._turns(detour), index) for index, detour in enumerate(detours) if detour.explore]
        if turns and min(turns)[0] <= min(self._turns(detour) for detour in all_detours if detour.explore):
            return min(turns)[1]
        return None

    def may_be_late(self, detour: Detour, now: float) -> bool:
        """Return whether a chunk may explore a path though it will be late; if so, it counts as sent."""
        if detour.again or self._turns(detour) > 0:
            if now < self._late_at + _LATE_EVERY_S:
                return False
            self._late_at = now
        return True

    def record_sent(self, detour: Detour, part: PartId) -> None:
        """Record that a chunk explores a path."""
        self._explored[detour.path] = self._explored.get(detour.path, 0) + 1
        self._budget = min(self._budget - 1.0, 1.0)
        self._in_flight = part

    def record_arrival(self, part: PartId) -> None:
        """Record the arrival of a chunk."""
        if part == self._in_flight:
            self._in_flight = None

    def forget_in_flight(self) -> None:
        """Wait for no confirmation any more."""
        self._in_flight = None

    def _turns(self, detour: Detour) -> int:
        """Return how often a path has had its turn."""
        return self._explored.get(detour.path, 0) // _CHUNKS_PER_TURN
