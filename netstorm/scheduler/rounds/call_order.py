"""Comparing collective calls that wait: whether all members of a group make the same calls in the same order.
Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import ranks_in
from netstorm.protocol.messages import CallTimedOut, WaitingCall

__all__ = ["CallConflict", "CallOrder"]

_REPORTS_S: Final = 1.25
"""How long to wait, once a call has timed out at one rank, for the reports of those that have made it: they
come after a second."""

_OPEN: Final = 10_000
"""Most calls that are remembered; the oldest are forgotten."""

_OPEN_CHARACTERS: Final = 16 * 2**20
"""Most characters of their texts together."""

_MOST_CHARACTERS: Final = 2**18
"""Of one call: an all-to-all of thousands of ranks names a shape for each."""


@dataclass(frozen=True, slots=True)
class CallConflict:
    """Two ranks make different calls at the same place."""

    group: str
    number: int
    first_rank: int
    first: str
    rank: int
    text: str

    def __str__(self) -> str:
        return (
            f"call {self.number} of group {self.group!r} is {self.first} at rank {self.first_rank} and "
            f"{self.text} at rank {self.rank}: every member of a group must make the same calls, of the same "
            "types and shapes, in the same order"
        )


@dataclass(slots=True)
class _Waiting:
    first_rank: int
    text: str
    ranks: int = 0
    """Bit set of the ranks that have reported the call."""


class CallOrder:
    """The calls that ranks have reported as waiting."""

    def __init__(self) -> None:
        self._seen: Final[dict[tuple[str, int], _Waiting]] = {}
        """By group and number."""
        self._characters = 0
        self._timed_out: tuple[int, CallTimedOut] | None = None
        self._decide_at = math.inf

    def record(self, rank: int, call: WaitingCall) -> CallConflict | None:
        """Record a call that waits at a rank. Returns the conflict with another rank's call, if there is
        one.

        Raises:
            ProtocolViolation: no call has such a text.
        """
        place = (call.group, call.number)
        seen = self._seen.get(place)
        if seen is None:
            size = len(call.group) + len(call.text)
            if size > _MOST_CHARACTERS:
                raise ProtocolViolation(
                    f"rank {rank} describes a call in {size} characters: expected at most {_MOST_CHARACTERS}"
                )
            seen = self._seen[place] = _Waiting(rank, call.text)
            self._characters += size
        while len(self._seen) > _OPEN or self._characters > _OPEN_CHARACTERS:
            self._forget(next(iter(self._seen)))
        seen.ranks |= 1 << rank
        if seen.text == call.text:
            return None
        return CallConflict(call.group, call.number, seen.first_rank, seen.text, rank, call.text)

    def without(self, rank: int) -> None:
        """Forget what a rank has reported that has left: the others may go on otherwise, as their results
        tell.
        """
        for place, seen in list(self._seen.items()):
            seen.ranks &= ~(1 << rank)
            if not seen.ranks:
                self._forget(place)
            elif seen.first_rank == rank:
                seen.first_rank = ranks_in(seen.ranks)[0]

    def _forget(self, place: tuple[str, int]) -> None:
        self._characters -= len(place[0]) + len(self._seen.pop(place).text)

    def timed_out(self, rank: int, message: CallTimedOut, now: float) -> None:
        """Record that a call has reached its time-out at a rank. Other ranks may have made it just now.

        Raises:
            ProtocolViolation: no group has such members.
        """
        members = message.members
        if min(members, default=0) < 0 or any(one >= other for one, other in pairwise(members)):
            raise ProtocolViolation(
                f"rank {rank} says that a call of ranks {list(members[:16])} has timed out: expected ranks "
                "from 0 up, in order"
            )
        if self._decide_at == math.inf:
            self._timed_out, self._decide_at = (rank, message), now + _REPORTS_S

    def decide_at(self) -> float:
        """Return when `decision` has something to say."""
        return self._decide_at

    def decision(self, now: float) -> str | None:
        """Return what to tell all ranks of a call that has timed out; None: there is none, or not yet."""
        if now < self._decide_at or self._timed_out is None:
            return None
        return self.timeout_text(*self._timed_out)

    def timeout_text(self, rank: int, message: CallTimedOut) -> str:
        """Return what to tell all ranks of a call that has reached its time-out at a rank."""
        call = message.call
        text = (
            f"call {call.number} of group {call.group!r}, {call.text}, has not completed within "
            f"its timeout of {message.seconds:g} s at rank {rank}"
        )
        seen = self._seen.get((call.group, call.number))
        have = 1 << rank | (seen.ranks if seen else 0)
        missing = [member for member in message.members if not have >> member & 1]
        if not missing:
            return f"{text}: every member has made it; the network is slower than the time-out allows"
        some = f"ranks {', '.join(map(str, missing))} have" if len(missing) > 1 else f"rank {missing[0]} has"
        return f"{text}: {some} not made it"
