"""How long messages take in a network in memory: the interface, and the simplest of models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from netstorm.pslite.clock.virtual_time import Timeline

__all__ = ["FixedDelay", "LinkModel"]


class LinkModel(Protocol):
    """How long things take."""

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """Call `arrived` when `size` bytes, handed over now at host `source`, are at host `target`.

        A flow is one direction of a connection: even numbers lead away from its opener, odd ones back. If
        what it carries overtakes, the network restores the order.
        """

    def forget(self, flow: int) -> None:
        """Drop what a flow has under way: its connection is gone. The calls to `arrived` may be left out."""

    def round_trip(self, source: str, target: str) -> float:
        """Return the seconds that something small takes there and back while nothing is in its way."""


class FixedDelay:
    """Everything takes the same time, give or take; no capacities."""

    def __init__(
        self, timeline: Timeline, *, delay_s: float = 0.001, jitter_s: float = 0.0, seed: int = 0
    ) -> None:
        """Make each message take `delay_s` and up to `jitter_s` more."""
        self._timeline = timeline
        self._random = random.Random(f"delay {seed}")
        self.delay_s = delay_s
        self.jitter_s = jitter_s

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """See `LinkModel`."""
        jitter = self._random.random() * self.jitter_s if self.jitter_s else 0.0
        self._timeline.after(self.delay_s + jitter, arrived)

    def forget(self, flow: int) -> None:
        """See `LinkModel`; what is under way arrives, and is ignored."""

    def round_trip(self, source: str, target: str) -> float:
        """See `LinkModel`."""
        return 2 * self.delay_s
