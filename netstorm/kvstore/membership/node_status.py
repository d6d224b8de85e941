"""How a node is doing, for people and metrics: what its heartbeats carry beside the sign of life. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from netstorm.observe.counters import Counters
from netstorm.protocol.messages import NodeStatus

__all__ = ["DriverStatus", "NodeStatusTracker"]

_REMEMBERED: Final = 8
"""Rounds back of which the begin is kept: a key may begin a round after all others have ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStatus:
    """What only the driver of a node knows."""

    bytes_sent: int = 0
    """To other nodes, headers included."""
    clock_offset: float = 0.0
    """Cluster clock less the host's, in s."""
    clock_drift: float = 0.0
    """How much faster the cluster clock goes."""
    clock_error: float = -1.0
    """Most that the offset may be wrong, in s; -1: not known."""
    clock_hops: int = 0
    """Exchanges between this clock and the scheduler's: 1 if it asks the scheduler."""


class NodeStatusTracker:
    """Counts operations and their time.

    A round, here, is that of all keys together: the n-th push of each. It takes from the begin of the first
    to the end of the last.

    Attributes:
        look: asked for what only the driver knows, with the node's time; the driver sets it.
    """

    def __init__(self, counters: Counters) -> None:
        self.look: Callable[[float], DriverStatus] = lambda _: DriverStatus()
        self._counters: Final = counters
        self._open: dict[int, int] = {}
        """Operations under way, by round."""
        self._since: dict[int, float] = {}
        """When a round's first operation began."""
        self._last_round = -1
        self._round_s = 0.0
        self._under_way = 0
        self._busy_since = 0.0
        self._waited_s = 0.0

    @property
    def round_s(self) -> float:
        """What the last round took, in s."""
        return self._round_s

    def begun(self, round: int, now: float) -> None:
        """The user has asked for an operation of this round."""
        if self._under_way == 0:
            self._busy_since = now
        self._under_way += 1
        self._open[round] = self._open.get(round, 0) + 1
        self._since.setdefault(round, now)

    def ended(self, round: int, now: float) -> None:
        """An operation of this round is complete."""
        self._under_way -= 1
        if self._under_way == 0:
            self._waited_s += now - self._busy_since
        self._open[round] -= 1
        if self._open[round] == 0:
            del self._open[round]
            if round >= self._last_round:  # a key that is pushed rarely is rounds behind the others
                self._last_round = round
                self._round_s = now - self._since[round]
                self._forget()

    def report(self, now: float) -> NodeStatus:
        """Return how it stands."""
        outside = self.look(now)
        return NodeStatus(
            rounds=int(self._counters.get("rounds")),
            round_s=self._round_s,
            waited_s=self._waited_s + (now - self._busy_since if self._under_way else 0.0),
            bytes_sent=outside.bytes_sent,
            clock_offset=outside.clock_offset,
            clock_drift=outside.clock_drift,
            detoured=int(self._counters.get("detoured")),
            last_round=self._last_round,
            clock_error=outside.clock_error,
            clock_hops=outside.clock_hops,
        )

    def _forget(self) -> None:
        old = [round for round in self._since if round < self._last_round - _REMEMBERED]
        for round in old:
            if round not in self._open:
                del self._since[round]
