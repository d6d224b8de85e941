"""Topology requests (TRP): when to report that a round has begun, which requests the next policy. Pure.

The later the request, the newer is the policy that the next round gets; but the answer must be here before
any rank waits for it. So where rounds take long, the request is sent shortly before the end of a round. And
where many rounds of a key may be under way, the scheduler has granted many: one request serves several.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.values.key import Key
from netstorm.protocol.messages import RoundBegun

__all__ = ["TopologyRequests"]

_AHEAD_S: Final = 0.5
"""How long before the expected end of a round the next policy is requested: far more than an answer takes."""

_PART: Final = 4
"""A request reports this part of the rounds that may be under way; what is left lasts for several answers."""

_LONGEST_S: Final = 0.25
"""How long a report waits for others: a mismatch of calls should be found while it can still be
understood."""


class TopologyRequests:
    """The topology requests of one node, for all keys.

    Attributes:
        round_s: duration of the last round, in s; set from outside.
    """

    def __init__(self) -> None:
        self.round_s = 0.0
        self._pending: list[RoundBegun] = []
        """To be sent now."""
        self._deferred: Final[dict[int, RoundBegun]] = {}
        """By key: to be sent shortly before the end of the round."""
        self._gathered: Final[dict[int, list[RoundBegun]]] = {}
        """By key: to be sent when there are enough of them."""
        self._gathered_at = math.inf
        """When the first of them came."""
        self._recent: Final[dict[int, deque[RoundBegun]]] = {}
        """The last ones, by key."""

    def record_begin(self, key: Key, round: RoundBegun, now: float) -> None:
        """Record that a round of a key has begun here."""
        recent = self._recent.setdefault(round.key, deque(maxlen=key.rounds_under_way + 1))
        recent.append(round)
        enough = key.rounds_under_way // _PART
        if self.round_s > 2 * _AHEAD_S:
            self.request_now(round.key)
            self._deferred[round.key] = round
        elif enough > 1:
            gathered = self._gathered.setdefault(round.key, [])
            gathered.append(round)
            self._gathered_at = min(self._gathered_at, now)
            if len(gathered) >= enough:
                self.request_all(round.key)
        else:
            self._pending.append(round)

    def record_result(self, round: Round) -> None:
        """Record that one more result of a round is here."""
        if self._deferred and self.round_s * round.missing <= _AHEAD_S * len(round.sums):
            self.request_now(round.key.identity)

    def request_now(self, key: int) -> None:
        """Defer the request for the next round of a key no longer."""
        begun = self._deferred.pop(key, None)
        if begun is not None:
            self._pending.append(begun)

    def request_all(self, key: int) -> None:
        """Report everything of a key now: a round waits for the answer, or for the scheduler's comparison."""
        self._pending += self._gathered.pop(key, ())
        self.request_now(key)
        if not self._gathered:
            self._gathered_at = math.inf

    def tick(self, now: float) -> None:
        """Report what has waited long enough for others."""
        if now >= self.next_tick():
            for key in list(self._gathered):
                self.request_all(key)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return self._gathered_at + _LONGEST_S

    def has_pending(self) -> bool:
        """Return whether there are requests to send now."""
        return bool(self._pending)

    def take(self) -> tuple[RoundBegun, ...]:
        """Return the requests to send now, once."""
        taken, self._pending = self._pending, []
        return tuple(taken)

    def recent(self) -> tuple[RoundBegun, ...]:
        """Return all that a restarted scheduler must know; it includes what is pending."""
        self.clear()
        return tuple(begun for recent in self._recent.values() for begun in recent)

    def clear(self) -> None:
        """Drop all requests."""
        self._pending = []
        self._deferred.clear()
        self._gathered.clear()
        self._gathered_at = math.inf
