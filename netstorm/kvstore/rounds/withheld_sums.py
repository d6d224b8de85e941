"""Sums that a node withholds for the look-ahead of their policies (`topology.trees.withholding`). Pure."""

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
    """The withheld sums of all open rounds. Those that are released are yielded, as owners and chunks:
    exhaust it.
    """

    def __init__(self) -> None:
        self._by_number: Final[dict[int, Withholding[Owner]]] = {}
        """By number of the round: rounds with different numbers do not wait for each other."""
        self._without_deadline: Final[list[Owner]] = []
        """Rounds that have begun since deadlines were last set."""
        self._deadlines: Final[list[tuple[float, Owner]]] = []
        """Heap of when to wait no longer for a round that may not have begun everywhere."""

    def begin(self, round: Round, priority: int) -> None:
        """Record that a round has begun here."""
        if round.look_ahead_span is not None:
            round.look_ahead_span.priority = priority
            self._of(round).begin(round.look_ahead_span)
            self._without_deadline.append((round.key.identity, round.round))

    def withhold(self, round: Round, chunk: int) -> bool:
        """Withhold a complete sum, if it must wait; return whether it must. Moved chunks never wait."""
        if round.look_ahead_span is None or chunk in round.moved:
            return False
        return self._of(round).withhold(round.look_ahead_span, chunk)

    def result(self, round: Round, chunk: int) -> Iterator[tuple[Owner, int]]:
        """Record a result."""
        if round.look_ahead_span is not None:
            yield from self._of(round).record_result(round.look_ahead_span, chunk)

    def end(self, round: Round) -> Iterator[tuple[Owner, int]]:
        """Forget a round."""
        withholding = self._by_number.get(round.round)
        if withholding is not None and round.look_ahead_span is not None:
            yield from withholding.forget(round.look_ahead_span)
            if withholding.is_empty():
                del self._by_number[round.round]

    def drop(self, round: Round) -> None:
        """Forget a round and what is withheld of it."""
        for _ in self.end(round):
            pass

    def release_overdue(self, rounds: Mapping[Owner, Round], now: float) -> Iterator[tuple[Owner, int]]:
        """Wait no longer for rounds that have begun here long ago and have had no result."""
        for owner in self._without_deadline:
            round = rounds.get(owner)
            if round is not None:
                heapq.heappush(self._deadlines, (now + round.plan.policy.look_ahead_s, owner))
        self._without_deadline.clear()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in rounds):
            _, owner = heapq.heappop(self._deadlines)
            round, withholding = rounds.get(owner), self._by_number.get(owner[1])
            if round is not None and round.look_ahead_span is not None and withholding is not None:
                yield from withholding.expire(round.look_ahead_span)

    def next_deadline(self) -> float:
        """Return when `release_overdue` has something to do."""
        if self._without_deadline:
            return 0.0
        return self._deadlines[0][0] if self._deadlines else math.inf

    def clear(self) -> None:
        """Forget everything."""
        self._by_number.clear()
        self._without_deadline.clear()
        self._deadlines.clear()

    def _of(self, round: Round) -> Withholding[Owner]:
        return self._by_number.setdefault(round.round, Withholding())
