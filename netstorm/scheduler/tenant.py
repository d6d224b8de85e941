"""One of several jobs on a scheduler, and which questions are whose. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from netstorm.protocol.ids import Peer
from netstorm.scheduler.adaptation import Assumed
from netstorm.scheduler.ending import Phase
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.past import Past
from netstorm.scheduler.records import Ended, Record
from netstorm.scheduler.shares import Claim
from netstorm.settings import Settings

__all__ = ["Log", "Questions", "Resumed", "Tenant"]


class Log(Protocol):
    """Where a job is written down, and what another process has written there; see `StateFile`."""

    @property
    def past(self) -> Past | None:
        """The job that it tells of."""

    def write(self, records: Iterable[Record]) -> None:
        """Append records."""

    def close(self) -> None:
        """Close it. Twice does no harm; what is written later is lost."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job that another process has served before."""

    log: Log
    past: Past
    settings: Settings
    planned: Assumed
    """What its policies are formed for."""


class Tenant:
    """One job.

    Attributes:
        link_share: of its network, that it was last told to plan with.
        peers: processes that have asked to join it, and that it has not parted with.
        broken: an error of ours has ended it.
        log: where it is written down; None: nowhere.
    """

    def __init__(self, machine: SchedulerMachine, settings: Settings, log: Log | None = None) -> None:
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


class Questions:
    """Questions whose answers come later: the jobs' own numbers are not unique."""

    def __init__(self) -> None:
        self._numbers: Final = itertools.count(1)
        self._asked: dict[int, tuple[Tenant, int]] = {}

    def number(self, tenant: Tenant, own: int) -> int:
        """Return a number for a question of a job, which has a number `own` for it."""
        number = next(self._numbers)
        self._asked[number] = (tenant, own)
        return number

    def whose(self, number: int) -> tuple[Tenant | None, int]:
        """Return whose question is answered, and its own number of it; None: nobody's."""
        return self._asked.pop(number, (None, 0))
