"""Settings of an emulator's own processes: real-time priority, and no hold on their parent's pipes."""

from __future__ import annotations

import contextlib
import os

__all__ = ["detach_standard_streams", "raise_priority"]


def raise_priority() -> None:
    """Give this process real-time priority; if the kernel refuses, the highest nice value that it allows.

    A nice value alone counts only within a session (sched(7), autogroups). The kernel keeps a share of each
    core for other processes (sched_rt_runtime_us). Child processes do not inherit the priority.
    """
    policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def detach_standard_streams() -> None:
    """Replace standard input, output and error by /dev/null: the parent may wait for the end of its pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
