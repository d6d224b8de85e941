"""The number of threads for each of several nodes on one machine."""

from __future__ import annotations

import os

__all__ = ["threads_each"]


def threads_each(nodes: int) -> int:
    """Return this machine's cores divided by `nodes`, at least 1.

    MXNet starts a thread for each core in each process, so that N processes would compete for them. Only
    cores that this process may use count (taskset, Slurm, containers with cpusets).
    """
    return max(1, len(os.sched_getaffinity(0)) // nodes)
