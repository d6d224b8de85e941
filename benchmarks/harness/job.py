"""Runs a job to its end: workers that are programs of their own, and their helpers."""

from __future__ import annotations

import time

from harness.child import Child, ChildError
from systems.base import Launch

__all__ = ["run_job"]

_HELPER_GRACE_S = 5.0
_POLL_S = 0.02


def run_job(launch: Launch, *, timeout_s: float) -> None:
    """Start all processes, wait until every worker has ended well, and stop the rest.

    Raises:
        ChildError: a worker or helper failed, or they took longer than `timeout_s`.
    """
    helpers: list[Child] = []
    workers: list[Child] = []
    try:
        helpers += [Child(process.name, process.command, process.environment) for process in launch.helpers]
        workers += [Child(process.name, process.command, process.environment) for process in launch.workers]
        deadline = time.monotonic() + timeout_s
        while waiting := [child for child in workers if child.alive()]:
            for child in (*helpers, *workers):
                if child.exit_code() not in {None, 0}:
                    raise ChildError(child.describe(f"ended with exit code {child.exit_code()}"))
            if time.monotonic() > deadline:
                raise ChildError(waiting[0].describe(f"took longer than {timeout_s:g} s"))
            time.sleep(_POLL_S)
        for child in workers:
            if child.exit_code():
                raise ChildError(child.describe(f"ended with exit code {child.exit_code()}"))
        deadline = time.monotonic() + _HELPER_GRACE_S
        while any(child.alive() for child in helpers) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    finally:
        for child in (*workers, *helpers):
            child.stop(0.0)
