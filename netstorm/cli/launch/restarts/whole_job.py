"""A job that cannot go on without one of its processes is started again as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.cli.launch.job import Job
from netstorm.cli.launch.output.console import Console
from netstorm.cli.launch.restarts.budget import RestartBudget
from netstorm.cli.launch.shutdown import Shutdown
from netstorm.cli.launch.signals import signals_to_descriptor
from netstorm.cli.launch.supervisor import CANNOT_RUN, NOT_FOUND

__all__ = ["for_attempt", "run_with_restarts", "state_folder"]

_JOB: Final = "job"


def state_folder(
    environment: Mapping[str, str], scratch: Path, attempt: int, *, is_local: bool
) -> str | None:
    """Return the folder for the log from which a scheduler of the job goes on; None: it has none.

    Each attempt has its own: its scheduler must not go on with the job of the attempt before.

    Args:
        environment: of the job; NETSTORM_STATE_DIR there wins.
        scratch: folder for temporary files on this machine.
        attempt: from 0.
        is_local: whether the scheduler runs on this machine.
    """
    given = environment.get("NETSTORM_STATE_DIR", "").strip()
    if not given and not is_local:
        return None
    base = given or str(scratch / "state")
    return f"{base}/restart-{attempt}" if attempt else base


def for_attempt(job: Job, attempt: int, state: str | None) -> Job:
    """Return a job whose nodes know how often it was started again, and whose scheduler keeps a log.

    Args:
        job: as it is started first.
        attempt: from 0.
        state: folder of the log; None: none, so a scheduler that ends cannot be started again.
    """
    again = attempt > 0
    own = {"NETSTORM_RESTART": str(attempt)}
    kept = {} if state is None else {"NETSTORM_STATE_DIR": state}
    scheduler, scheduler_at, nodes = job.scheduler, job.scheduler_at, job.nodes
    return dataclasses.replace(
        job,
        scheduler=None if scheduler is None else scheduler.with_variables(kept, is_restart=again),
        scheduler_at=None
        if scheduler_at is None or state is None
        else lambda port: scheduler_at(port).with_variables(kept),
        nodes=lambda port: [process.with_variables(own, is_restart=again) for process in nodes(port)],
    )


def run_with_restarts(attempt: Callable[[int], Shutdown], limit: int, console: Console) -> int:
    """Run a job until it ends well, is stopped, or has been started again `limit` times.

    Args:
        attempt: runs the job once, given how often it has been started again; returns how it ended.
        limit: number of restarts.
        console: says so.

    Returns:
        The exit code of the last attempt, or 128 + the signal that stopped the job.
    """
    budget = RestartBudget(limit)
    count = 0
    with signals_to_descriptor() as woken:
        while True:
            budget.started(_JOB, clock.monotonic())
            ended = attempt(count)
            code = ended.exit_code
            if code in {0, CANNOT_RUN, NOT_FOUND} or ended.was_stopped:
                return code
            planned = budget.after_failure(_JOB, clock.monotonic())
            if planned is None:
                return code
            console.report(f"all processes are started again {planned.in_words()}")
            console.flush(None)
            stopped = _wait(woken, planned.at)
            if stopped is not None:
                return 128 + stopped
            count = planned.count


def _wait(woken: int, until: float) -> int | None:
    """Wait until a time; return the signal that has come meanwhile and ends the job."""
    while (left := until - clock.monotonic()) > 0:
        poller = select.poll()
        poller.register(woken, select.POLLIN)
        if poller.poll(left * 1000 + 1):
            with contextlib.suppress(BlockingIOError):
                for number in os.read(woken, 64):
                    if number != signal.SIGCHLD:
                        return int(number)
    return None
