"""Connections of the discrete events behind `predict` that share resources, max-min fairly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from netstorm.topology.prediction.agenda import Agenda
from netstorm.topology.prediction.connections import Arrive, Connection
from netstorm.topology.prediction.maxmin import MaxMin

__all__ = ["Shares", "Sharing"]


class Sharing(Connection):
    """A connection that shares resources with others, or whose link changes: its rate changes over time."""

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
        """Bits of the present chunk that were not sent at `_since`."""
        self._since = 0.0
        self._rate = 0.0
        self._ends = math.inf
        """When the present chunk is sent, at the present rate."""
        self._event = math.inf
        """Time of the next event: `_ends` or, if the rate has fallen since, earlier."""

    def push(self, number: int, *, result: bool) -> None:
        """Send a chunk when its turn comes."""
        super().push(number, result=result)
        if self._sending is None:
            self._begin()

    def set_rate(self, rate: float) -> None:
        """Continue at another rate."""
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
        """Send the next chunk; return False, and become idle, if there is none."""
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
        """Go on: the window has room again."""
        if self._sending is None:
            self._commit()
            self._begin()

    def _finish(self) -> None:
        """End the present chunk, unless the rate has fallen in the meantime."""
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
        self.start: Final = self._flows.start
        self.stop: Final = self._flows.stop

    def add(self, connection: Sharing, uses: Sequence[int]) -> int:
        """Return the number of a connection's flow, stopped."""
        self._connections.append(connection)
        return self._flows.add(uses)

    def change(self, capacities: Sequence[float]) -> None:
        """Change the capacities of the resources, in bit/s."""
        self._flows.set_capacities(capacities)

    def settle(self) -> None:
        """Bring rates up to date."""
        for flow in self._flows.settle():
            self._connections[flow].set_rate(self._flows.rates[flow])

    def __bool__(self) -> bool:
        return bool(self._connections)
