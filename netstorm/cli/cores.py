"""How many threads each of several nodes on one machine should compute with."""

from __future__ import annotations

import os

__all__ = ["threads_each"]


def threads_each(nodes: int) -> int:
    """Return this machine's cores shared out among `nodes`, at least 1.

    MXNet starts a thread for each core in every process, and N processes would fight for them. Only those
    that this process may use count (taskset, Slurm, containers with cpusets).
    """
    return max(1, len(os.sched_getaffinity(0)) // nodes)
