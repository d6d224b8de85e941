"""When the scheduler is told that a round has begun, which asks it for the policy of the next one. Pure.

The later it is asked, the newer is the policy that the next round gets; but its answer has to be here before
anybody waits for it. So where rounds take long, it is asked shortly before the end of one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from netstorm.kvstore.rounds.part_checks import ROUNDS_AHEAD
from netstorm.kvstore.rounds.round import Round
from netstorm.protocol.messages import RoundBegun

__all__ = ["TopologyRequests"]

_AHEAD_S: Final = 0.5
"""How long before the end of a round, as the last one was, the scheduler is asked for the next one's policy:
it has answered long before.
"""


class TopologyRequests:
    """Rounds of all keys that have begun on this node.

    Attributes:
        round_s: what the last round took, in s; somebody else says so.
    """

    def __init__(self) -> None:
        self.round_s = 0.0
        self._due: list[RoundBegun] = []
        """What the scheduler is to be told."""
        self._later: Final[dict[int, RoundBegun]] = {}
        """By key: what it is not to be told yet."""
        self._last: Final[dict[int, deque[RoundBegun]]] = {}
        """The last ones, by key."""

    def begun(self, round: RoundBegun) -> None:
        """Note that a round has begun here."""
        self._last.setdefault(round.key, deque(maxlen=ROUNDS_AHEAD + 1)).append(round)
        if self.round_s > 2 * _AHEAD_S:
            self.ask(round.key)
            self._later[round.key] = round
        else:
            self._due.append(round)

    def got_on(self, round: Round) -> None:
        """Note that one more result of a round is here."""
        if self._later and self.round_s * round.missing <= _AHEAD_S * len(round.sums):
            self.ask(round.key.identity)

    def ask(self, key: int) -> None:
        """Have the scheduler asked now under which policy the round after the one that has begun runs."""
        begun = self._later.pop(key, None)
        if begun is not None:
            self._due.append(begun)

    def due(self) -> bool:
        """Return whether the scheduler is to be told something."""
        return bool(self._due)

    def take(self) -> tuple[RoundBegun, ...]:
        """Return what the scheduler is to be told, once."""
        taken, self._due = self._due, []
        return tuple(taken)

    def again(self) -> tuple[RoundBegun, ...]:
        """Return all that a scheduler that has forgotten it must know; what is due is in it."""
        self._due = []
        return tuple(begun for last in self._last.values() for begun in last)

    def clear(self) -> None:
        """Ask for nothing any more."""
        self._due = []
        self._later.clear()
