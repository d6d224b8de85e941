"""How long messages take in a network in memory: the interface, and the simplest model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from netstorm.pslite.clock.virtual_time import Timeline

__all__ = ["FixedDelay", "LinkModel"]


class LinkModel(Protocol):
    """How long messages take."""

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """Call `arrived` when `size` bytes, handed over now at host `source`, are at host `target`.

        A flow is one direction of a connection: even numbers lead away from its opener, odd ones back. The
        network restores the order if messages of a flow overtake one another.
        """

    def forget(self, flow: int) -> None:
        """Drop what a flow has in flight: its connection is gone. The calls to `arrived` may be left out."""

    def round_trip(self, source: str, target: str) -> float:
        """Return the round trip of a small message in s, without queues."""


class FixedDelay:
    """All messages take about the same time; there are no capacities."""

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
        """See `LinkModel`; what is in flight arrives, and is ignored."""

    def round_trip(self, source: str, target: str) -> float:
        """See `LinkModel`."""
        return 2 * self.delay_s
