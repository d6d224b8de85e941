"""One job of a scheduler of several: its machine, its processes and its log. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from netstorm.protocol.frames import Peer
from netstorm.scheduler.job_phase import Phase
from netstorm.scheduler.jobs.link_shares import Claim
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.replay_log.records import Ended, Record
from netstorm.scheduler.replay_log.replay import ReplayedJob
from netstorm.settings import Settings

__all__ = ["JobLog", "JobSlot", "LoggedJob"]


class JobLog(Protocol):
    """The replay log of a job. `StateFile` is one."""

    @property
    def replayed(self) -> ReplayedJob | None:
        """The job as another process left it; None: the log was empty, or the job is over."""

    def write(self, records: Iterable[Record]) -> None:
        """Append records."""

    def close(self) -> None:
        """Close the log. Twice does no harm; what is written later is lost."""


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """A job that another process served before."""

    log: JobLog
    replayed: ReplayedJob
    settings: Settings
    planned: InitialAssumptions
    """What its policies are formed for."""


class JobSlot:
    """One job.

    Attributes:
        machine: its scheduler.
        settings: of the job.
        name: of the job; another job of that name may come once this one is ending.
        claim: what it asks of the network.
        link_share: the part of each link's rate that it was last told to plan with.
        peers: processes that have asked to join it and have not left it.
        broken: an error in the scheduler itself has ended it.
    """

    def __init__(self, machine: SchedulerMachine, settings: Settings, log: JobLog | None = None) -> None:
        self.machine: Final = machine
        self.settings: Final = settings
        self.name: Final = settings.job
        self.claim: Final = Claim(settings.network_file, settings.job_weight)
        self.link_share = 1.0
        self.peers: Final[set[Peer]] = set()
        self.broken = False
        self._log: Final = log

    @property
    def running(self) -> bool:
        """Whether all nodes have joined, and some will push more."""
        return self.machine.phase is Phase.RUNNING

    @property
    def ending(self) -> bool:
        """Whether it only waits for its nodes to leave."""
        return self.machine.phase not in (Phase.GATHERING, Phase.RUNNING)

    def close_log(self) -> None:
        """Log that there is nothing to take over, and close the log. Twice does no harm."""
        if self._log is not None:
            self._log.write([Ended(text=f"job {self.name!r} is over")])
            self._log.close()
