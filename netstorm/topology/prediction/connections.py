"""Connections of the discrete events behind `predict`: what waits, what is under way, and how fast.

What waits is in order of urgency; what is within the window has been handed over to the operating system,
whose order is that of arrival. A connection that shares nothing knows at once when such a chunk will be there
(`Alone`); the rates of those that share change whenever one of them begins or ends (`Sharing`).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final, Protocol

from netstorm.topology.prediction.maxmin import MaxMin

__all__ = ["Agenda", "Alone", "Connection", "Shares", "Sharing", "window_of"]

_SMALLEST_WINDOW: Final = 8 * 1024 * 1024
_WINDOW_FACTOR: Final = 4

_A_BIT: Final = 0.5
"""Bits are counted in floats: less than this is none."""


def window_of(largest: float, rate: float, round_trip: float) -> float:
    """Return how many bits a connection may have un-acknowledged.

    The transport's rule: 4 times (the largest chunk and the bandwidth-delay product), but at least 1 MiB.
    """
    return max(_SMALLEST_WINDOW, _WINDOW_FACTOR * (largest + rate * round_trip))


class Agenda:
    """What will happen, and when.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: Final[list[tuple[float, int, Callable[..., None], tuple[object, ...]]]] = []
        self._number: Final = itertools.count().__next__

    def at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        """Enter something; of what happens at the same time, what was entered first happens first."""
        heappush(self._entries, (time, self._number(), action, arguments))

    def next(self) -> None:
        """Let the next thing happen."""
        self.now, _, action, arguments = heappop(self._entries)
        action(*arguments)

    def at_rest(self) -> bool:
        """Return whether nothing more happens at this time."""
        return not self._entries or self._entries[0][0] > self.now


class Arrive(Protocol):
    """What is called when a chunk is there."""

    def __call__(self, number: int, rank: int, result: bool, /) -> None:
        """Take chunk `number` at `rank`: a contribution, or a result."""


class Connection:
    """One direction of a pair.

    Attributes:
        latency: seconds; `return_latency`: of what acknowledges.
        window: bits that may be un-acknowledged.
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
        """Begin idle; `bits` are those of each chunk, and `arrive` is called with each that is there."""
        self._agenda: Final = agenda
        self.source, self.target = ends
        self._bits: Final = bits
        self._arrive: Final = arrive
        self._waiting: Final[list[tuple[int, int, bool]]] = []
        """Heap of (chunk, arrival here, is a result)."""
        self._pushed = 0
        self._in_flight = 0.0
        self._acknowledgements: Final[deque[tuple[float, float]]] = deque()
        """(When it comes, bits) of each chunk that is through."""
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
        """Hand over what fits into the window, the most urgent first: then nothing overtakes it any more."""
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
        """Return whether the window has room; if so, the chunk has it."""
        after = self._in_flight + self._bits[number]
        if after > self.window and self._in_flight > _A_BIT:
            return False
        self._in_flight = after
        return True

    def _wait(self) -> None:
        """Have `_commit` called when there is room, if nothing else calls it then."""

    def _send(self, number: int, *, result: bool) -> None:
        raise NotImplementedError


class Alone(Connection):
    """A connection that shares nothing, on links that do not change: what is sent when is known at once."""

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
        """When all that has been handed over is through."""
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


class Sharing(Connection):
    """A connection whose rate is what others leave, or what a changing link gives."""

    __slots__ = ("_committed", "_ends", "_event", "_flow", "_left", "_rate", "_sending", "_shares", "_since")

    def __init__(
        self,
        agenda: Agenda,
        ends: tuple[int, int],
        bits: Sequence[float],
        arrive: Arrive,
        *,
        shares: Shares,
        uses: Sequence[int],
    ) -> None:
        """Begin idle; `uses` are the resources of the pair."""
        super().__init__(agenda, ends, bits, arrive)
        self._shares: Final = shares
        self._flow: Final = shares.add(self, uses)
        self._committed: Final[deque[tuple[int, bool]]] = deque()
        self._sending: tuple[int, bool] | None = None
        self._left = 0.0
        """Bits of it that were not through at `_since`."""
        self._since = 0.0
        self._rate = 0.0
        self._ends = math.inf
        """When it is through at the present rate."""
        self._event = math.inf
        """When we look again: at `_ends` or, after the rate has fallen, earlier."""

    def push(self, number: int, *, result: bool) -> None:
        """Send a chunk when its turn comes."""
        super().push(number, result=result)
        if self._sending is None:
            self._begin()

    def move(self, rate: float) -> None:
        """Go on at another rate."""
        now = self._agenda.now
        self._left -= self._rate * (now - self._since)
        self._since = now
        self._rate = rate
        self._ends = now + (self._left / rate if self._left > 0 else 0.0)
        if self._ends < self._event:
            self._event = self._ends
            self._agenda.at(self._ends, self._finish)

    def _send(self, number: int, *, result: bool) -> None:
        self._committed.append((number, result))

    def _begin(self) -> bool:
        """Send the next chunk, if there is one; a connection without any is idle."""
        if not self._committed:
            if self._waiting:
                self._agenda.at(self._acknowledgements[0][0], self._wake)
            return False
        if self._sending is None:
            self._shares.start(self._flow)
            self._rate = 0.0
        self._sending = self._committed.popleft()
        self._left = self._bits[self._sending[0]]
        self._since = self._agenda.now
        if self._rate > 0:
            self._ends = self._event = self._since + self._left / self._rate
            self._agenda.at(self._ends, self._finish)
        return True

    def _wake(self) -> None:
        """The window has opened."""
        if self._sending is None:
            self._commit()
            self._begin()

    def _finish(self) -> None:
        """The last bit leaves, if the rate has not fallen in the meantime."""
        now = self._agenda.now
        if self._sending is None or self._event != now:
            return
        if self._ends > now:
            self._event = self._ends
            self._agenda.at(self._ends, self._finish)
            return
        number, result = self._sending
        bits = self._bits[number]
        self.total += bits
        there = now + self.latency
        self._acknowledgements.append((there + self.return_latency, bits))
        self._agenda.at(there, self._arrive, number, self.target, result)
        self._commit()
        if not self._begin():
            self._sending = None
            self._ends = self._event = math.inf
            self._shares.stop(self._flow)


class Shares:
    """The max-min fair rates of connections that share."""

    def __init__(self, capacities: Sequence[float]) -> None:
        """Begin without connections."""
        self._flows: Final = MaxMin(capacities)
        self._connections: Final[list[Sharing]] = []
        self._moved = False
        self.start: Final = self._flows.start
        self.stop: Final = self._flows.stop

    def add(self, connection: Sharing, uses: Sequence[int]) -> int:
        """Return the number of a connection's flow, stopped."""
        self._connections.append(connection)
        return self._flows.add(uses)

    def change(self, capacities: Sequence[float]) -> None:
        """Let resources give more or less."""
        self._flows.set_capacities(capacities)

    def settle(self) -> None:
        """Bring rates up to date."""
        for flow in self._flows.settle():
            self._connections[flow].move(self._flows.rates[flow])

    def __bool__(self) -> bool:
        return bool(self._connections)
