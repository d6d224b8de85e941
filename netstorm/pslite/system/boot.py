"""A number of the boot of this machine: processes that have the same one share a kernel."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["boot_number"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A random UUID of each boot of the kernel, the same in all containers (random(4))."""


def boot_number() -> int:
    """Return the number; 0: the system has none. It is a hash, so peers do not learn the UUID itself."""
    try:
        identity = _BOOT_ID.read_bytes().strip()
    except OSError:
        return 0
    return 1 + int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "big")
