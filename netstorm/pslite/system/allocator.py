"""Makes the C library keep freed memory of messages, instead of returning it to the system.

libzmq allocates each message and frees it soon afterwards, on another thread. By default glibc returns blocks
of 256 KiB to the system at once, and every new block costs 64 page faults: a quarter of the processor time of
an all-reduce (40 MB, three processes: 88 ms a node instead of 65; `benchmarks/loopback.py`).
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
"""Free memory at the top of the heap beyond this is returned to the system."""

_LARGEST_ON_HEAP: Final = 32 * 2**20
"""glibc's own upper limit on 64-bit systems (DEFAULT_MMAP_THRESHOLD_MAX)."""


def keep_freed_memory() -> None:
    """Configure the allocator for messages; a C library without mallopt (musl) stays as it is."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
