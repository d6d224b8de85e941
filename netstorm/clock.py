"""The only module that reads the machine's clocks. All other code gets the time as an argument."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["boot_identity", "monotonic", "monotonic_ns", "sleep", "wall", "wall_ns"]


def monotonic() -> float:
    """Seconds that never go backwards, from an arbitrary origin."""
    return time.monotonic()


def monotonic_ns() -> int:
    """Like `monotonic`, in nanoseconds."""
    return time.monotonic_ns()


def boot_identity() -> str:
    """Return an identifier of this boot: processes with the same identifier share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def wall() -> float:
    """Seconds since the Unix epoch, by this host's clock."""
    return time.time()


def wall_ns() -> int:
    """Nanoseconds since the Unix epoch, by this host's clock."""
    return time.time_ns()


def sleep(seconds: float) -> None:
    """Block the calling thread."""
    time.sleep(seconds)
