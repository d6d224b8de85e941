"""The look-ahead of policies: sums that this node withholds, not to run far ahead of others. Pure.

Which ones, and why that cannot end in a deadlock, `topology.look_ahead` says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Final

from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.round import Extension, Owner, Round
from netstorm.protocol.messages import LossTerms
from netstorm.topology.look_ahead import LookAheadSpan, Withholding
from netstorm.topology.policy import Policy

__all__ = ["LookAhead"]


class LookAhead(Extension):
    """The withheld sums of all open rounds of one node."""

    def __init__(self, rounds: Aggregation) -> None:
        self._rounds: Final = rounds
        self._spans: Final[dict[Owner, LookAheadSpan[Owner]]] = {}
        """By round: its sums that are withheld."""
        self._by_number: Final[dict[int, Withholding[Owner]]] = {}
        """By number of the round: rounds with different numbers do not wait for each other."""
        self._without_deadline: Final[list[Owner]] = []
        """Rounds that have begun since deadlines were last set."""
        self._deadlines: Final[list[tuple[float, Owner]]] = []
        """Heap of when to wait no longer for a round that may not have begun everywhere."""

    def policy_known(self, policy: Policy) -> None:
        """Plug in with the first policy that looks ahead."""
        if policy.look_ahead:
            self._rounds.extend(self)

    def opened(self, round: Round) -> None:
        """Withhold sums of a round whose policy looks ahead."""
        look_ahead = round.plan.policy.look_ahead if round.layout.is_within_key else 0
        if look_ahead:
            self._spans[round.owner] = LookAheadSpan(round.owner, round.layout.offsets, look_ahead)
            round.join(self)

    def terms_came(self, round: Round, terms: LossTerms) -> None:
        """Withhold nothing by offset, if what is sent first is not what has the lowest offset."""
        if terms.important:
            self._spans.pop(round.owner, None)

    def begins(self, round: Round) -> None:
        """Record that a round has begun here."""
        span = self._spans.get(round.owner)
        if span is not None:
            span.priority = round.priority
            self._of(round).begin(span)
            self._without_deadline.append(round.owner)

    def withholds(self, round: Round, chunk: int) -> bool:
        """Return whether a complete sum must wait. Moved chunks never wait."""
        span = self._spans.get(round.owner)
        return span is not None and chunk not in round.moved and self._of(round).withhold(span, chunk)

    def delivered(self, round: Round, chunk: int) -> None:
        """Send what has waited for a result."""
        span = self._spans.get(round.owner)
        if span is not None:
            self._release(self._of(round).record_result(span, chunk))

    def hurry(self, round: Round) -> None:
        """Send what is withheld of a round, and withhold nothing of it any more."""
        span = self._spans.get(round.owner)
        if span is not None:
            waiting = sorted(span.withheld)
            self.dropped(round)
            self._release((round.owner, chunk) for chunk in waiting)

    def dropped(self, round: Round) -> None:
        """Forget a round, and send what has waited for it."""
        self._release(self._end(round))

    def restarted(self, round: Round) -> None:
        """Forget a round, and all that waits: it is summed anew, too."""
        for _ in self._end(round):
            pass

    def tick(self, now: float) -> None:
        """Wait no longer for rounds that have begun here long ago and have had no result."""
        self._release(self._overdue(now))

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        if self._without_deadline:
            return 0.0
        return self._deadlines[0][0] if self._deadlines else math.inf

    def clear(self) -> None:
        """Forget everything."""
        self._spans.clear()
        self._by_number.clear()
        self._without_deadline.clear()
        self._deadlines.clear()

    def _release(self, released: Iterator[tuple[Owner, int]]) -> None:
        for owner, chunk in released:
            round = self._rounds.rounds[owner]
            # A faulty peer may have sent the result of what is withheld; moved chunks are not withheld.
            if not round.results[chunk] and chunk not in round.moved:
                self._rounds.send_up(round, chunk, round.way_of(chunk))

    def _overdue(self, now: float) -> Iterator[tuple[Owner, int]]:
        rounds = self._rounds.rounds
        for owner in self._without_deadline:
            round = rounds.get(owner)
            if round is not None:
                heapq.heappush(self._deadlines, (now + round.plan.policy.look_ahead_s, owner))
        self._without_deadline.clear()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in rounds):
            _, owner = heapq.heappop(self._deadlines)
            span, withholding = self._spans.get(owner), self._by_number.get(owner[1])
            if owner in rounds and span is not None and withholding is not None:
                yield from withholding.expire(span)

    def _end(self, round: Round) -> Iterator[tuple[Owner, int]]:
        span, withholding = self._spans.pop(round.owner, None), self._by_number.get(round.round)
        if span is not None and withholding is not None:
            yield from withholding.forget(span)
            if withholding.is_empty():
                del self._by_number[round.round]

    def _of(self, round: Round) -> Withholding[Owner]:
        return self._by_number.setdefault(round.round, Withholding())
