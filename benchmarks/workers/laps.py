"""What a training script's main thread does while sums are under way: laps, which are counted."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["LAPS", "run_beside"]

_BLOCK: Final = bytes(32768)


def python_lap() -> object:
    """Do some tens of microseconds of Python, which keep the interpreter lock."""
    return sum(number for number in range(1000))


def native_lap() -> object:
    """Do some tens of microseconds of C, which `hashlib` runs without the interpreter lock."""
    return hashlib.sha256(_BLOCK)


LAPS: Final[Mapping[str, Callable[[], object]]] = {"python": python_lap, "native": native_lap}
"""By what the main thread is busy in."""


def run_beside(beside: str, wait: Callable[[], None]) -> tuple[float, int]:
    """Return when `wait` has returned, and how many laps of `beside` the main thread did meanwhile."""
    finish: list[float] = []

    def wait_for_it() -> None:
        wait()
        finish.append(time.monotonic())

    if beside == "nothing":
        wait_for_it()
        return finish[0], 0
    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    lap, laps = LAPS[beside], 0
    while waiter.is_alive():
        lap()
        laps += 1
    waiter.join()
    return finish[0], laps
