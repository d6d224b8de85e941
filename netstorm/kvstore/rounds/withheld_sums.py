"""Sums that a node holds back for the look-ahead of their policies (`topology.trees.withholding`). Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from netstorm.kvstore.rounds.round import Round
from netstorm.topology.trees.withholding import Withholding

__all__ = ["Owner", "WithheldSums"]

Owner: TypeAlias = tuple[int, int]
"""Key and number of a round."""


class WithheldSums:
    """Of all open rounds. What need not wait any more is yielded, as owners and chunks: exhaust it."""

    def __init__(self) -> None:
        self._holding: Final[dict[int, Withholding[Owner]]] = {}
        """By number of the round: those with different numbers don't wait for each other."""
        self._undated: Final[list[Owner]] = []
        """Those that have begun since they were last looked at."""
        self._doubts: Final[list[tuple[float, Owner]]] = []
        """Heap of when to doubt that a round has begun everywhere."""

    def begin(self, round: Round, priority: int) -> None:
        """Note that a round has begun here."""
        if round.stretch is not None:
            round.stretch.priority = priority
            self._of(round).begin(round.stretch)
            self._undated.append((round.key.identity, round.round))

    def must_wait(self, round: Round, chunk: int) -> bool:
        """Return whether a sum that is complete is held back. What has moved is late enough."""
        if round.stretch is None or chunk in round.moved:
            return False
        return self._of(round).withhold(round.stretch, chunk)

    def result(self, round: Round, chunk: int) -> Iterator[tuple[Owner, int]]:
        """Note a result."""
        if round.stretch is not None:
            yield from self._of(round).record_result(round.stretch, chunk)

    def end(self, round: Round) -> Iterator[tuple[Owner, int]]:
        """Forget a round."""
        holding = self._holding.get(round.round)
        if holding is not None and round.stretch is not None:
            yield from holding.forget(round.stretch)
            if holding.is_empty():
                del self._holding[round.round]

    def doubt(self, rounds: Mapping[Owner, Round], now: float) -> Iterator[tuple[Owner, int]]:
        """Hold nothing back for rounds that have begun here long ago and have had no result."""
        for owner in self._undated:
            round = rounds.get(owner)
            if round is not None:
                heapq.heappush(self._doubts, (now + round.plan.policy.look_ahead_s, owner))
        self._undated.clear()
        while self._doubts and (self._doubts[0][0] <= now or self._doubts[0][1] not in rounds):
            _, owner = heapq.heappop(self._doubts)
            round, holding = rounds.get(owner), self._holding.get(owner[1])
            if round is not None and round.stretch is not None and holding is not None:
                yield from holding.expire(round.stretch)

    def due(self) -> float:
        """Return when `doubt` has something to do."""
        if self._undated:
            return 0.0
        return self._doubts[0][0] if self._doubts else math.inf

    def clear(self) -> None:
        """Forget everything."""
        self._holding.clear()
        self._undated.clear()
        self._doubts.clear()

    def _of(self, round: Round) -> Withholding[Owner]:
        return self._holding.setdefault(round.round, Withholding())
