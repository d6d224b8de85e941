"""Opening a job on a scheduler of several: its settings, its log and its machine. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from netstorm.protocol import messages as m
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.scheduler.jobs.job_settings import check_room, job_settings
from netstorm.scheduler.jobs.job_slot import JobLog, JobSlot, LoggedJob
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.membership.process_registry import ProcessRegistry
from netstorm.scheduler.options import SchedulerOptions
from netstorm.settings import Settings

__all__ = ["JobOpening"]

_log = logging.getLogger(__name__)


class JobOpening:
    """Makes the slots of new jobs, and of jobs that another process served.

    Attributes:
        closed: no further job may begin, because the scheduler is being stopped.
    """

    def __init__(
        self,
        settings: Settings,
        registry: ProcessRegistry,
        *,
        release: str,
        network_nodes: int,
        boot: str,
        open_log: Callable[[str], JobLog] | None,
        secret: SchedulerSecret | None,
    ) -> None:
        """Open no job yet; see `SeveralJobs` for the arguments. `registry`: the processes of all jobs."""
        self.closed = False
        self._settings: Final = settings
        self._registry: Final = registry
        self._release: Final = release
        self._network_nodes: Final = network_nodes
        self._boot: Final = boot
        self._open_log: Final = open_log
        self._secret: Final = secret

    def new(self, name: str, join: m.Join, slots: Iterable[JobSlot], *, ended: int, now: float) -> JobSlot:
        """Open a job for the first node that asks to join it.

        Args:
            name: of the job.
            join: what the node says.
            slots: of all jobs that are here.
            ended: how many jobs have ended and left no slot.
            now: the time.

        Raises:
            UsageError: there is no room, or no job can have these settings; says what to do.
        """
        slots = list(slots)
        present = [slot.name for slot in slots if not slot.ending]
        check_room(
            self._settings,
            name,
            present,
            ended=ended + len(slots) - len(present),
            stopping=self.closed,
        )
        settings = job_settings(
            self._settings, name, join.num_workers, join.must_agree, network_nodes=self._network_nodes
        )
        for slot in slots:
            if slot.name == name:
                slot.close_log()
        log = None if self._open_log is None else self._open_log(name)
        machine = SchedulerMachine(
            self._options(settings, join.must_agree),
            None,
            now=now,
            registry=self._registry,
            write=None if log is None else log.write,
        )
        if self._network_nodes and not settings.network_file:
            _log.warning(
                "job %r has %d nodes, NETSTORM_NETWORK describes %d: all its links are assumed equal",
                name,
                settings.num_workers,
                self._network_nodes,
            )
        return JobSlot(machine, settings, log)

    def resumed(self, job: LoggedJob, now: float) -> JobSlot:
        """Go on with a job that another process served."""
        machine = SchedulerMachine(
            self._options(job.settings, job.replayed.began.first_node_settings),
            job.replayed.policies[job.replayed.version],
            now=now,
            registry=self._registry,
            assumed=job.planned if job.settings.awareness else None,
            planned=job.planned,
            write=job.log.write,
            replayed=job.replayed,
        )
        slot = JobSlot(machine, job.settings, job.log)
        slot.peers.update(machine.view.peers)
        return slot

    def _options(self, settings: Settings, first_node_settings: Mapping[str, str]) -> SchedulerOptions:
        return SchedulerOptions.from_settings(
            settings,
            release=self._release,
            boot=self._boot,
            first_node_settings=first_node_settings,
            secret=self._secret,
        )
