"""How a process that stands for a wire behaves: it runs before others, and holds nothing of its starter."""

from __future__ import annotations

import contextlib
import os

__all__ = ["let_go", "take_precedence"]


def take_precedence() -> None:
    """Have this process run whenever it can; if the kernel refuses, as it did before.

    By a real-time policy, since a nice value counts only within a session (sched(7), autogroups); the kernel
    keeps a share of each core from those (sched_rt_runtime_us). What it starts does not inherit it.
    """
    policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def let_go() -> None:
    """Hold nothing of whoever started this process: no pipes, whose end they wait for, and no terminal."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
