"""A job as its replay log describes it: what another scheduler process needs to take it over. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from netstorm.errors import UsageError
from netstorm.protocol.messages import KeySpec, Member
from netstorm.scheduler.replay_log import records as r
from netstorm.scheduler.replay_log.leases import LEASE
from netstorm.scheduler.rounds.consistency import policies_needed
from netstorm.topology.policy import Policy

__all__ = ["ReplayedJob"]


@dataclass(slots=True, kw_only=True)
class ReplayedJob:
    """The state of a job after all records of its log."""

    began: r.Began
    policies: dict[int, Policy]
    """By version."""
    version: int
    """The policy in force."""
    keys: list[tuple[int, KeySpec]] = field(default_factory=list)
    """The rank that registered each key first, and the key, in the order of their numbers."""
    rows: list[list[tuple[int, int]]] = field(default_factory=list)
    """By key: (first round, version)."""
    granted: list[int] = field(default_factory=list)
    """By key: no round beyond this one was granted."""
    barriers: list[int]
    """By rank: at how many barriers it has arrived."""
    finished: dict[int, dict[int, int]] = field(default_factory=dict)
    """By rank that will push no more: the last round that it pushed, by key."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes, by rank."""
        return self.began.members

    @classmethod
    def replay(cls, records: Iterable[r.Record], name: str) -> ReplayedJob | None:
        """Return the job that a log describes; None if there is none, or it is over.

        Args:
            records: of the log.
            name: what errors call the log.

        Raises:
            UsageError: the records contradict each other.
        """
        job: ReplayedJob | None = None
        for record in records:
            if isinstance(record, r.Began):
                first = record.policy
                job = cls(
                    began=record,
                    policies={first.version: first},
                    version=first.version,
                    barriers=[0] * len(record.members),
                )
            elif isinstance(record, r.Ended):
                job = None
            elif job is None:
                raise UsageError(f"{name} begins in the middle of a job: remove the file to begin anew")
            else:
                try:
                    job.apply(record)
                except (IndexError, KeyError) as error:
                    raise UsageError(
                        f"{name} contradicts itself ({error!r}): remove it to begin anew"
                    ) from None
        if job is not None:
            job.prune()
        return job

    def apply(self, record: r.Record) -> None:
        """Apply one more record of a job that has begun."""
        match record:
            case r.KeyAdded():
                self.keys.append((record.rank, record.spec))
                self.rows.append([(0, record.version)])
                self.granted.append(0)
            case r.Leased():
                for key, round in record.rounds:
                    self.granted[key] = max(self.granted[key], round)
            case r.Installed():
                self.policies[record.policy.version] = record.policy
                self.version = record.policy.version
                for key, start in record.starts:
                    rows = self.rows[key]
                    while rows and rows[-1][0] >= start:
                        rows.pop()
                    rows.append((start, self.version))
            case r.BarrierArrival():
                self.barriers[record.rank] = record.number + 1
            case r.Finished():
                self.finished[record.rank] = record.last_rounds

    def prune(self) -> None:
        """Forget policies that no round needs any more: ranks are never many rounds apart."""
        for rows, granted in zip(self.rows, self.granted, strict=True):
            while len(rows) > 1 and rows[1][0] <= granted - 2 * LEASE:
                rows.pop(0)
        used = {self.version}.union(version for rows in self.rows for _, version in rows)
        self.policies = policies_needed(self.policies, used)
