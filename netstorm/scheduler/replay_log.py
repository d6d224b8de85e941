"""A job as its replay log describes it: what another scheduler process needs to take it over. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from netstorm.errors import UsageError
from netstorm.protocol.codecs import granted_at_first
from netstorm.protocol.messages import Departure, KeyGrant, KeySpec, Member
from netstorm.scheduler.replay_log import records as r
from netstorm.scheduler.replay_log.consistent import contradiction
from netstorm.scheduler.replay_log.leases import LEASE
from netstorm.scheduler.rounds.consistency import policies_needed, under_way_of
from netstorm.topology.policy import Policy

__all__ = ["ReplayedJob", "departure_text"]


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
    grants: tuple[KeyGrant, ...] = ()
    """The numbers of the keys, if they were not given out in the order of this log."""
    members: tuple[Member, ...]
    """The nodes, by rank. Without a port: a place that no node has."""
    taken_over: bool = False
    """The members were asked, instead of a log: a new view must begin before anything else."""
    agreed_size: int = 0
    """How many nodes the last view had that was agreed on."""
    view: int = 0
    view_version: int = -1
    """Version of the policy of the view; -1: no view has replaced the first one."""
    departed: dict[int, str] = field(default_factory=dict)
    """By incarnation of a process that is in the job no more: why."""
    barriers: list[int]
    """By rank: at how many barriers it has arrived."""
    finished: dict[int, dict[int, int]] = field(default_factory=dict)
    """By rank that will push no more: the last round that it pushed, by key."""

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
                    members=record.members,
                    agreed_size=sum(member.port > 0 for member in record.members),
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
            problem = contradiction(job)
            if problem:
                raise UsageError(f"{name} contradicts itself (it has {problem}): remove it to begin anew")
            job.prune()
        return job

    def apply(self, record: r.Record) -> None:
        """Apply one more record of a job that has begun."""
        match record:
            case r.KeyAdded():
                self.keys.append((record.rank, record.spec))
                self.rows.append([(0, record.version)])
                self.granted.append(granted_at_first(under_way_of(record.spec)))
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
            case r.Viewed() if record.members:
                self._apply_view(record)
            case r.Viewed():
                self.agreed_size = sum(member.port > 0 for member in self.members)
            case r.BarrierArrival():
                self.barriers[record.rank] = record.number + 1
            case r.Finished():
                self.finished[record.rank] = record.last_rounds

    def _apply_view(self, record: r.Viewed) -> None:
        self.view, self.view_version = record.view, record.version
        for departure in record.departures:
            member = self.members[departure.rank]
            self.departed[member.incarnation] = departure_text(departure, record.view)
            self.finished.pop(departure.rank, None)
        here = {member.rank: member for member in record.members}
        self.members = tuple(
            here.get(member.rank, Member(member.rank, member.host, 0, member.site, 0))
            for member in self.members
        )

    def prune(self) -> None:
        """Forget policies that no round needs any more: ranks are never many rounds apart."""
        for (_, spec), rows, granted in zip(self.keys, self.rows, self.granted, strict=True):
            while len(rows) > 1 and rows[1][0] <= granted - 2 * (LEASE + under_way_of(spec)):
                rows.pop(0)
        used = {self.version, max(self.view_version, 0)}.union(
            version for rows in self.rows for _, version in rows
        )
        self.policies = policies_needed(self.policies, used)


def departure_text(departure: Departure, view: int) -> str:
    """Return what a process is told that is in the job no more, since a view."""
    return f"rank {departure.rank} is out of the job since view {view}: {departure.reason}"
