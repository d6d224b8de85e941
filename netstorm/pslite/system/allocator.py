"""Lets the C library keep memory that messages have given back, instead of returning and asking for it again.

libzmq allocates each message and frees it soon after, on another thread. By default glibc returns blocks of
256 KiB to the system at once, and every new one costs 64 page faults: a quarter of all processor time of an
all-reduce here (40 MB, three processes: 88 ms a node instead of 65; `benchmarks/loopback.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

__all__ = ["keep_freed_memory"]

# mallopt(3), from malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_KEPT_BYTES: Final = 128 * 2**20
"""Free memory at the heap's top beyond this goes back to the system."""

_LARGEST_ON_HEAP: Final = 32 * 2**20
"""glibc's own upper limit on 64-bit systems (DEFAULT_MMAP_THRESHOLD_MAX)."""


def keep_freed_memory() -> None:
    """Set the allocator up for messages; a C library that cannot be told so (musl) stays as it is."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
