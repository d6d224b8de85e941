"""One of several jobs on a scheduler, and which questions are whose. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from netstorm.protocol.ids import Peer
from netstorm.scheduler.job_phase import Phase
from netstorm.scheduler.jobs.link_shares import Claim
from netstorm.scheduler.log.records import Ended, Record
from netstorm.scheduler.log.replay import ReplayedJob
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.settings import Settings

__all__ = ["JobLog", "JobSlot", "PendingRequests", "Resumed"]


class JobLog(Protocol):
    """Where a job is written down, and what another process has written there; see `StateFile`."""

    @property
    def past(self) -> ReplayedJob | None:
        """The job that it tells of."""

    def write(self, records: Iterable[Record]) -> None:
        """Append records."""

    def close(self) -> None:
        """Close it. Twice does no harm; what is written later is lost."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job that another process has served before."""

    log: JobLog
    past: ReplayedJob
    settings: Settings
    planned: InitialAssumptions
    """What its policies are formed for."""


class JobSlot:
    """One job.

    Attributes:
        link_share: of its network, that it was last told to plan with.
        peers: processes that have asked to join it, and that it has not parted with.
        broken: an error of ours has ended it.
        log: where it is written down; None: nowhere.
    """

    def __init__(self, machine: SchedulerMachine, settings: Settings, log: JobLog | None = None) -> None:
        self.machine: Final = machine
        self.settings: Final = settings
        self.name: Final = settings.job
        self.claim: Final = Claim(settings.network_file, settings.job_weight)
        self.link_share = 1.0
        self.peers: Final[set[Peer]] = set()
        self.broken = False
        self.log: Final = log

    @property
    def ending(self) -> bool:
        """Whether it only says good-bye."""
        return self.machine.phase not in (Phase.GATHERING, Phase.RUNNING)

    def close_log(self) -> None:
        """Note that there is nothing to take over. Twice does no harm."""
        if self.log is not None:
            self.log.write([Ended(text=f"job {self.name!r} is over")])
            self.log.close()


class PendingRequests:
    """Questions whose answers come later: the jobs' own numbers are not unique."""

    def __init__(self) -> None:
        self._numbers: Final = itertools.count(1)
        self._asked: dict[int, tuple[JobSlot, int]] = {}

    def number(self, tenant: JobSlot, own: int) -> int:
        """Return a number for a question of a job, which has a number `own` for it."""
        number = next(self._numbers)
        self._asked[number] = (tenant, own)
        return number

    def whose(self, number: int) -> tuple[JobSlot | None, int]:
        """Return whose question is answered, and its own number of it; None: nobody's."""
        return self._asked.pop(number, (None, 0))
