"""A node's status, for people and metrics: it travels with the heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from netstorm.observe.counters import Counters
from netstorm.protocol.messages import NodeStatus

__all__ = ["DriverStatus", "NodeStatusTracker"]

_REMEMBERED: Final = 8
"""Rounds back whose begin is kept: a key may begin a round after all other keys have ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStatus:
    """The part of the status that only the driver of a node knows."""

    bytes_sent: int = 0
    """To other nodes, headers included."""
    clock_offset: float = 0.0
    """Cluster clock less the host's, in s."""
    clock_drift: float = 0.0
    """How much faster the cluster clock goes."""
    clock_error: float = -1.0
    """Upper bound of the error of the offset, in s; -1: not known."""
    clock_hops: int = 0
    """Exchanges between this clock and the scheduler's: 1 if it asks the scheduler."""


class NodeStatusTracker:
    """Counts operations and their time.

    A round, here, is that of all keys together: the n-th push of each. It lasts from the begin of the first
    operation to the end of the last.

    Attributes:
        sample_driver: returns what only the driver knows, given the node's time; the driver sets it.
        compression: how gradients travel, for a person; the frontend sets it.
    """

    def __init__(self, counters: Counters) -> None:
        self.sample_driver: Callable[[float], DriverStatus] = lambda _: DriverStatus()
        self.compression = ""
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
        """Duration of the last round, in s."""
        return self._round_s

    def operation_begun(self, round: int, now: float) -> None:
        """Count an operation of this round that the user has submitted."""
        if self._under_way == 0:
            self._busy_since = now
        self._under_way += 1
        self._open[round] = self._open.get(round, 0) + 1
        self._since.setdefault(round, now)

    def operation_ended(self, round: int, now: float) -> None:
        """Count the end of an operation of this round."""
        self._under_way -= 1
        if self._under_way == 0:
            self._waited_s += now - self._busy_since
        self._open[round] -= 1
        if self._open[round] == 0:
            del self._open[round]
            if round >= self._last_round:  # a key that is pushed rarely is rounds behind the others
                self._last_round = round
                self._round_s = now - self._since[round]
                self._drop_old_rounds()

    def report(self, now: float) -> NodeStatus:
        """Return the status now."""
        driver = self.sample_driver(now)
        return NodeStatus(
            rounds=int(self._counters.get("rounds")),
            round_s=self._round_s,
            waited_s=self._waited_s + (now - self._busy_since if self._under_way else 0.0),
            bytes_sent=driver.bytes_sent,
            clock_offset=driver.clock_offset,
            clock_drift=driver.clock_drift,
            detoured=int(self._counters.get("detoured")),
            last_round=self._last_round,
            clock_error=driver.clock_error,
            clock_hops=driver.clock_hops,
            compression=self.compression,
        )

    def _drop_old_rounds(self) -> None:
        old = [round for round in self._since if round < self._last_round - _REMEMBERED]
        for round in old:
            if round not in self._open:
                del self._since[round]
