"""The time in which operations are under way: how long a user waits for the network."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["BusyTime"]


class BusyTime:
    """Adds up the time in which at least one operation is under way. Any thread may call it."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._total = 0.0

    def begin(self, now: float) -> None:
        """Count the begin of an operation."""
        with self._lock:
            if self._under_way == 0:
                self._since = now
            self._under_way += 1

    def end(self, now: float) -> None:
        """Count the end of an operation."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._total += now - self._since

    def total(self, now: float) -> float:
        """Return the time so far, in s."""
        with self._lock:
            return self._total + (now - self._since if self._under_way else 0.0)
