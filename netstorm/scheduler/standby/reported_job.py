"""A job as its nodes report it: what another scheduler needs to take it over without a log. Pure."""

from __future__ import annotations

from typing import Final

from netstorm.addresses import host_port
from netstorm.protocol.codecs import granted_at_first
from netstorm.protocol.messages import Departure, JobReport, KeyGrant, KeySpec, Member, Resume
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log.records import Began
from netstorm.scheduler.replay_log.replay import ReplayedJob, departure_text
from netstorm.scheduler.rounds.consistency import under_way_of
from netstorm.topology.policy import Policy

__all__ = ["ReportedJob"]

_AHEAD: Final = 1024
"""Rounds beyond all that were reported as granted which count as granted: a rank that did not report may know
more. All of them run under the policy of the next view, so this costs nothing."""


class ReportedJob:
    """The reports of a job's nodes, by rank.

    The newest view that any of them knows counts. Its members are those who decide: another scheduler takes
    over only with a majority of them, so that no two schedulers can; or with all of them, if the scheduler
    before may go on with a minority, or if nodes may not leave the job.
    """

    def __init__(self) -> None:
        """Begin without reports."""
        self._reports: Final[dict[int, tuple[tuple[int, bool], JobReport]]] = {}
        """By incarnation: the view that a node knows, whether it was agreed on, and its report."""
        self._users: Final[dict[int, str]] = {}
        """By incarnation: the text of the key with which the node has come."""

    def __bool__(self) -> bool:
        return bool(self._reports)

    def add(self, incarnation: int, user: str, message: Resume) -> None:
        """Record the report of a node that has a user's key; without a report, the node is not counted."""
        if message.job is not None:
            self._users[incarnation] = user
            self._reports[incarnation] = ((message.view, not message.changing), message.job)

    def remove(self, incarnation: int) -> None:
        """Forget a node that has gone back to the other scheduler."""
        self._reports.pop(incarnation, None)
        self._users.pop(incarnation, None)

    def remove_rank(self, rank: int) -> None:
        """Forget a rank that has gone over to another scheduler."""
        for incarnation in [member.incarnation for member in self.members() if member.rank == rank]:
            self.remove(incarnation)

    def members(self) -> list[Member]:
        """Return the members of the newest view, by rank."""
        return [member for member in self._newest().members if member.port] if self._reports else []

    def present(self) -> list[int]:
        """Return the ranks of these that have reported, each with the key with which it had joined."""
        users = self._users
        return [member.rank for member in self.members() if users.get(member.incarnation) == member.user]

    @property
    def majority(self) -> bool:
        """Whether the scheduler before goes on only with a majority."""
        return bool(self._reports) and self._newest().majority

    def has_majority(self) -> bool:
        """Return whether enough have reported, though not all."""
        return self.majority and 2 * len(self.present()) > len(self.members())

    def is_complete(self) -> bool:
        """Return whether all of them have reported."""
        return bool(self._reports) and len(self.present()) == len(self.members())

    def waiting_text(self) -> str:
        """Return how many have come, for a person."""
        if not self._reports:
            return "no node has lost its scheduler"
        return f"{len(self.present())} of {len(self.members())} nodes have lost their scheduler and come here"

    def missing_text(self, *, elastic: bool) -> str:
        """Return who has not come, and how many are needed; empty: nobody has come."""
        if not self._reports:
            return ""
        here = set(self.present())
        missing = [member for member in self.members() if member.rank not in here]
        names = ", ".join(
            f"rank {member.rank} ({host_port(member.host, member.port)})" for member in missing[:8]
        )
        if not elastic:
            needed = "expected all, since nodes may not leave this job (NETSTORM_ELASTIC)"
        elif self.majority:
            needed = "expected more than half, so that no other scheduler can go on with the others"
        else:
            needed = (
                "expected all, since the scheduler before was started without NETSTORM_RECOVERABLE=1, and "
                "may go on with any that are not here"
            )
        return f"{len(here)} of {len(self.members())} nodes have come, without {names}: {needed}"

    def replayed(self, options: SchedulerOptions) -> ReplayedJob:
        """Return the job as it goes on: with those that have reported, under the newest policy."""
        view = max(state for state, _ in self._reports.values())[0]
        here = set(self.present())
        members = tuple(
            member if member.rank in here else Member(member.rank, member.host, 0, member.site, 0)
            for member in self._newest().members
        )
        reports = [report for _, report in self._reports.values()]
        policy = max((report.policy for report in reports), key=lambda policy: policy.version)
        keys, grants = _keys(reports)
        finished = {
            rank: rounds for report in reports for rank, rounds in report.finished.items() if rank in here
        }
        barriers = [min(report.barriers for report in reports)] * len(members)
        for member in members:
            if member.incarnation in self._reports:
                barriers[member.rank] = self._reports[member.incarnation][1].barriers
        granted = _granted(reports, keys)
        job = ReplayedJob(
            began=self._began(options, members, policy),
            policies={policy.version: policy},
            version=policy.version,
            keys=[(0, spec) for spec in keys],
            grants=grants,
            rows=[[(0, policy.version)] for _ in keys],
            granted=[round + _AHEAD for round in granted],
            members=members,
            agreed_size=len(self.members()),
            view=view,
            view_version=policy.version,
            barriers=barriers,
            departed={
                member.incarnation: departure_text(
                    Departure(member.rank, "it did not come in time to the scheduler that took over"),
                    view + 1,
                )
                for member in self.members()
                if member.rank not in here
            },
            finished=finished,
            taken_over=True,
        )
        if options.elastic is None:  # all have reported, so no rank knows more than what was reported
            job.granted, job.view_version = granted, -1
            job.policies = {
                one.version: one for report in reports for one in (*report.policies, report.policy)
            }
            job.rows = [_rows(reports, key, granted[key], policy.version) for key in range(len(keys))]
        return job

    def _began(self, options: SchedulerOptions, members: tuple[Member, ...], policy: Policy) -> Began:
        on_one_machine = len({member.host for member in self.members()}) == 1
        chunks = options.local_chunks if on_one_machine else options.chunks
        return Began(
            job=options.job,
            release=options.release,
            boot=options.boot,
            chunks=(chunks.smallest, chunks.largest, chunks.enough),
            members=members,
            policy=policy,
            owners=(1,) * len(members),
            reproducible=self._newest().reproducible,
        )

    def _newest(self) -> JobReport:
        _, report = max(self._reports.values(), key=lambda entry: entry[0])
        return report


def _keys(reports: list[JobReport]) -> tuple[list[KeySpec], tuple[KeyGrant, ...]]:
    """Return all keys that somebody has, in the order of their numbers. A node has those of its own groups
    only; a number that nobody has is that of a group whose ranks are gone.
    """
    known = {
        grant.key: (spec, grant)
        for report in reports
        for spec, grant in zip(report.specs, report.grants, strict=True)
    }
    found = []
    for key in range(max(known, default=-1) + 1):
        name = f"key {key} of ranks that are gone"
        nobody = (KeySpec(-1, name, (), "float32"), KeyGrant(-1, name, key, 0, 0, 1))
        found.append(known.get(key, nobody))
    return [spec for spec, _ in found], tuple(grant for _, grant in found)


def _granted(reports: list[JobReport], keys: list[KeySpec]) -> list[int]:
    """Return the last round of each key that some rank has been granted."""
    return [
        max(granted_at_first(under_way_of(spec)), *(report.granted.get(key, 0) for report in reports))
        for key, spec in enumerate(keys)
    ]


def _rows(reports: list[JobReport], key: int, granted: int, newest: int) -> list[tuple[int, int]]:
    """Return a key's (first round, version): of all rounds that some rank has been granted as it knows them,
    of those behind them the newest policy.
    """
    rows = dict(row for report in reports for row in report.rows.get(key, ()))
    found = sorted(rows.items()) or [(0, newest)]
    return found if found[-1][1] == newest else [*found, (granted + 1, newest)]
