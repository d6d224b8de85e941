"""Which hosts of the network in memory cannot reach each other, and since when. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Partitions"]

_ALWAYS: Final = -1.0
"""Stands for the time at which a host lost power; the exact time does not matter."""


class Partitions:
    """Cut paths between hosts, and hosts without power."""

    def __init__(self) -> None:
        self._cut_since: Final[dict[tuple[str, str], float]] = {}
        self._without_power: Final[set[str]] = set()

    def cut(self, source: str, target: str, now: float) -> None:
        """Drop everything from one host to another from now on."""
        self._cut_since.setdefault((source, target), now)

    def heal(self, one: str, other: str) -> None:
        """End a cut, in both directions."""
        self._cut_since.pop((one, other), None)
        self._cut_since.pop((other, one), None)

    def power_off(self, host: str) -> None:
        """Drop everything from and to a host from now on."""
        self._without_power.add(host)

    def power_on(self, host: str) -> None:
        """End the effect of `power_off`."""
        self._without_power.discard(host)

    def block(self, source: str, target: str) -> bool:
        """Return whether nothing can arrive at `target` from `source`."""
        return (source, target) in self._cut_since or target in self._without_power

    def silent_since(self, one: str, other: str) -> float | None:
        """Return since when something between two hosts is dropped; None if nothing is."""
        if one in self._without_power or other in self._without_power:
            return _ALWAYS
        times = [self._cut_since[pair] for pair in ((one, other), (other, one)) if pair in self._cut_since]
        return min(times, default=None)
