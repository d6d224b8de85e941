"""What a scheduler must know of a job that another process served before it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import UsageError
from netstorm.protocol.messages import KeySpec, Member
from netstorm.scheduler.log import records as r
from netstorm.scheduler.rounds.consistency import needed
from netstorm.topology.policy import Policy

__all__ = ["LEASE", "Leases", "ReplayedJob"]

LEASE: Final = 16
"""Rounds of a key that are written down as granted at once: one record for many answers. After a restart the
next policy applies that much later at most."""


@dataclass(slots=True, kw_only=True)
class ReplayedJob:
    """A job, as its log says."""

    began: r.Began
    policies: dict[int, Policy]
    """By version."""
    version: int
    """The policy in force."""
    keys: list[tuple[int, KeySpec]] = field(default_factory=list)
    """Who registered what first, in the order of their numbers."""
    rows: list[list[tuple[int, int]]] = field(default_factory=list)
    """By key: (first round, version)."""
    granted: list[int] = field(default_factory=list)
    """By key: no round beyond was granted."""
    barriers: list[int]
    """By rank: how many it has come to."""
    finished: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes, by rank."""
        return self.began.members

    @classmethod
    def of(cls, records: Iterable[r.Record], name: str) -> ReplayedJob | None:
        """Return the job that `records` tell of; None if there is none, or it is over.

        Raises:
            UsageError: they make no sense; `name` is what they are called.
        """
        past: ReplayedJob | None = None
        for record in records:
            if isinstance(record, r.Began):
                first = record.policy
                past = cls(
                    began=record,
                    policies={first.version: first},
                    version=first.version,
                    barriers=[0] * len(record.members),
                )
            elif isinstance(record, r.Ended):
                past = None
            elif past is None:
                raise UsageError(f"{name} begins in the middle of a job: remove the file to begin anew")
            else:
                try:
                    past.take(record)
                except (IndexError, KeyError) as error:
                    raise UsageError(f"{name} makes no sense ({error!r}): remove it to begin anew") from None
        if past is not None:
            past.forget()
        return past

    def take(self, record: r.Record) -> None:
        """Take one more record, of a job that has begun."""
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
            case r.BarrierCome():
                self.barriers[record.rank] = record.number + 1
            case r.Finished():
                self.finished[record.rank] = record.last_rounds

    def forget(self) -> None:
        """Forget what no round can need any more: those that ranks are in are close to one another."""
        for rows, granted in zip(self.rows, self.granted, strict=True):
            while len(rows) > 1 and rows[1][0] <= granted - 2 * LEASE:
                rows.pop(0)
        used = {self.version}.union(version for rows in self.rows for _, version in rows)
        self.policies = needed(self.policies, used)


class Leases:
    """Which grants are written down, by key."""

    def __init__(self, granted: Iterable[int] = ()) -> None:
        self._until: Final = dict(enumerate(granted))

    def take(self, grants: Iterable[tuple[int, int]]) -> r.Leased | None:
        """Return what is to be written before these (key, round) are granted; None: it is written."""
        news = {}
        for key, round in grants:
            if round > self._until.get(key, 0):
                self._until[key] = news[key] = round + LEASE
        return r.Leased(rounds=tuple(news.items())) if news else None
