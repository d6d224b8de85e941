"""A scheduler of jobs that come and go, on a thread of a process that does other things, too."""

from __future__ import annotations

import contextlib
import importlib
from typing import Final

from netstorm.errors import Closed
from netstorm.scheduler.process.hosted import plan_hosting
from netstorm.scheduler.process.scheduler_process import start_on_threads
from netstorm.scheduler.several_jobs import SeveralJobs
from netstorm.settings import Settings, declarations

__all__ = ["SchedulerThread"]

_OF_ONE_JOB: Final = ("num_workers", "rank", "job", "jobs", "scheduler_host", "scheduler_port", "state_dir")
"""Settings of the process that are not this scheduler's: it learns them from the nodes."""

_MOST_RESERVED: Final = 1024
"""Connections that wait for jobs to come: one of each process that was in the last one, of several jobs."""


class SchedulerThread:
    """A scheduler of any number of jobs. It ends with the process.

    Attributes:
        port: at which nodes reach it.
    """

    def __init__(self, settings: Settings, host: str) -> None:
        """Listen.

        Args:
            settings: of this process; those that say which node it is are not used.
            host: address at which nodes reach it.

        Raises:
            UsageError: nothing can listen there, others can reach it while there is no key, or settings that
                contradict each other.
        """
        unused = {declarations()[name].variable for name in _OF_ONE_JOB}
        variables = {name: value for name, value in settings.as_variables().items() if name not in unused}
        own = Settings.from_environment(variables, role="scheduler", jobs="0", scheduler_host=host)
        importlib.import_module("netstorm.topology.detours")  # 0.1 s, which the first job would wait
        self._running: Final = start_on_threads(
            own, plan_hosting(own), lambda _: None, any_port=True, reserved=_MOST_RESERVED
        )
        self.port: Final = self._running.driver.port

    def give_up(self, job: str, limit_s: float) -> None:
        """End a job if not every node has come, which all those hear that have. It has had `limit_s`."""
        machine = self._running.driver.machine
        assert isinstance(machine, SeveralJobs)
        with contextlib.suppress(Closed):
            self._running.driver.thread.post(lambda now: machine.give_up(job, limit_s, now))

    def close(self) -> None:
        """Let the last messages leave, and stop. Twice does no harm."""
        self._running.close()
