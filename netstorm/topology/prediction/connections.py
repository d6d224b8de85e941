"""Connections of the discrete events behind `predict`: their queue, their window, and when chunks arrive.

The queue is in order of urgency. Chunks within the window have been handed to the operating system, which
sends them in order of arrival. A connection that shares nothing knows at once when such a chunk arrives
(`Alone`); the rates of connections that share change whenever one of them begins or ends (`sharing.Sharing`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, Protocol

from netstorm.topology.prediction.agenda import Agenda

__all__ = ["Alone", "Arrive", "Connection", "window_of"]

_SMALLEST_WINDOW: Final = 8 * 1024 * 1024
_WINDOW_FACTOR: Final = 4

_A_BIT: Final = 0.5
"""Bits are floats: fewer than this are none."""


def window_of(largest: float, rate: float, round_trip: float) -> float:
    """Return the bits that a connection may have unacknowledged.

    The transport's rule: 4 times (the largest chunk and the bandwidth-delay product), but at least 1 MiB.
    """
    return max(_SMALLEST_WINDOW, _WINDOW_FACTOR * (largest + rate * round_trip))


class Arrive(Protocol):
    """Called when a chunk arrives."""

    def __call__(self, number: int, rank: int, result: bool, /) -> None:
        """Handle the arrival of chunk `number` at `rank`: a contribution, or a result."""


class Connection:
    """One direction of a pair.

    Attributes:
        latency: seconds; `return_latency`: of acknowledgements.
        window: bits that may be unacknowledged.
        total: bits sent.
    """

    __slots__ = (
        "_acknowledgements",
        "_agenda",
        "_arrive",
        "_bits",
        "_in_flight",
        "_pushed",
        "_waiting",
        "latency",
        "return_latency",
        "source",
        "target",
        "total",
        "window",
    )

    def __init__(self, agenda: Agenda, ends: tuple[int, int], bits: Sequence[float], arrive: Arrive) -> None:
        """Begin idle; `bits` are the size of each chunk, and `arrive` is called with each that arrives."""
        self._agenda: Final = agenda
        self.source, self.target = ends
        self._bits: Final = bits
        self._arrive: Final = arrive
        self._waiting: Final[list[tuple[int, int, bool]]] = []
        """Heap of (chunk, arrival here, is a result)."""
        self._pushed = 0
        self._in_flight = 0.0
        self._acknowledgements: Final[deque[tuple[float, float]]] = deque()
        """(When it arrives, bits) of each chunk that is sent."""
        self.latency = 0.0
        self.return_latency = 0.0
        self.window = math.inf
        self.total = 0.0

    def push(self, number: int, *, result: bool) -> None:
        """Send a chunk when its turn comes."""
        acknowledgements = self._acknowledgements
        if self._waiting or (acknowledgements and acknowledgements[0][0] <= self._agenda.now):
            self._commit()
        if self._waiting or not self._fits(number):
            self._pushed += 1
            heappush(self._waiting, (number, self._pushed, result))
            self._wait()
        else:
            self._send(number, result=result)

    def _commit(self) -> None:
        """Hand over what fits into the window, the most urgent first. Nothing overtakes it from then on."""
        acknowledgements, now = self._acknowledgements, self._agenda.now
        while acknowledgements and acknowledgements[0][0] <= now:
            self._in_flight -= acknowledgements.popleft()[1]
        waiting = self._waiting
        while waiting and self._fits(waiting[0][0]):
            number, _, result = heappop(waiting)
            self._send(number, result=result)
        if waiting:
            self._wait()

    def _fits(self, number: int) -> bool:
        """Return whether the window has room; if so, reserve it for the chunk."""
        after = self._in_flight + self._bits[number]
        if after > self.window and self._in_flight > _A_BIT:
            return False
        self._in_flight = after
        return True

    def _wait(self) -> None:
        """Schedule `_commit` for when the window has room, if nothing else calls it then."""

    def _send(self, number: int, *, result: bool) -> None:
        raise NotImplementedError


class Alone(Connection):
    """A connection that shares nothing, on links that do not change: arrivals are known at once."""

    __slots__ = ("_free_at", "_rate", "_wakes_at")

    def __init__(
        self,
        agenda: Agenda,
        ends: tuple[int, int],
        bits: Sequence[float],
        arrive: Arrive,
        *,
        rate: float,
    ) -> None:
        """Begin idle."""
        super().__init__(agenda, ends, bits, arrive)
        self._rate: Final = rate
        self._free_at = 0.0
        """When all that was handed over is sent."""
        self._wakes_at = -1.0

    def _wait(self) -> None:
        if self._wakes_at <= self._agenda.now:
            self._wakes_at = self._acknowledgements[0][0]
            self._agenda.at(self._wakes_at, self._commit)

    def _send(self, number: int, *, result: bool) -> None:
        bits, now = self._bits[number], self._agenda.now
        self._free_at = ends = max(now, self._free_at) + bits / self._rate
        self.total += bits
        there = ends + self.latency
        self._acknowledgements.append((there + self.return_latency, bits))
        self._agenda.at(there, self._arrive, number, self.target, result)
