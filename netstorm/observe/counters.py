"""Counters of one process: how much was sent, received, dropped, waited for."""

from __future__ import annotations

__all__ = ["Counters"]


class Counters:
    """Named numbers that only grow. One thread writes; any thread may take a snapshot."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`."""
        self._values[name] = self._values.get(name, 0) + amount

    def get(self, name: str) -> float:
        """Return a counter's value; 0 if nothing was added."""
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Return a copy of all counters."""
        return dict(self._values)
