"""Topology requests (TRP): when to report that a round has begun, which requests the next policy. Pure.

The later the request, the newer is the policy that the next round gets; but the answer must be here before
any rank waits for it. So where rounds take long, the request is sent shortly before the end of a round.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from netstorm.kvstore.rounds.part_checks import ROUNDS_AHEAD
from netstorm.kvstore.rounds.round import Round
from netstorm.protocol.messages import RoundBegun

__all__ = ["TopologyRequests"]

_AHEAD_S: Final = 0.5
"""How long before the expected end of a round the next policy is requested: far more than an answer takes."""


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
        self._recent: Final[dict[int, deque[RoundBegun]]] = {}
        """The last ones, by key."""

    def record_begin(self, round: RoundBegun) -> None:
        """Record that a round has begun here."""
        self._recent.setdefault(round.key, deque(maxlen=ROUNDS_AHEAD + 1)).append(round)
        if self.round_s > 2 * _AHEAD_S:
            self.request_now(round.key)
            self._deferred[round.key] = round
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

    def has_pending(self) -> bool:
        """Return whether there are requests to send now."""
        return bool(self._pending)

    def take(self) -> tuple[RoundBegun, ...]:
        """Return the requests to send now, once."""
        taken, self._pending = self._pending, []
        return tuple(taken)

    def recent(self) -> tuple[RoundBegun, ...]:
        """Return all that a restarted scheduler must know; it includes what is pending."""
        self._pending = []
        return tuple(begun for recent in self._recent.values() for begun in recent)

    def clear(self) -> None:
        """Drop all requests."""
        self._pending = []
        self._deferred.clear()
