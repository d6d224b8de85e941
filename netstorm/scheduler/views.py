"""The views of a job that nodes may leave and join: who is in, and how everybody learns of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.scheduler.job_rounds import JobRounds
from netstorm.scheduler.membership.member_texts import describe_member, list_some
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.observe.snapshot import ViewChange
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox
from netstorm.scheduler.replay_log.records import Viewed
from netstorm.scheduler.replay_log.replay import ReplayedJob, departure_text
from netstorm.scheduler.views.agreement import Agreement
from netstorm.topology.policy import Policy

__all__ = ["JobViews"]

_log = logging.getLogger(__name__)

_REMEMBERED: Final = 50
"""Changes of the view that are shown to people."""


class JobViews:
    """The views of one job. A method that finds that the job cannot go on returns the reason.

    Attributes:
        number: of the present view.
        silent: ranks that have joined and do not have the job's state yet.
        later: ranks that have joined later.
        departed: by incarnation of a process that is in the job no more: why.
        events: the last changes, the newest last.
    """

    def __init__(
        self, members: Members, rounds: JobRounds, outbox: Outbox, options: SchedulerOptions
    ) -> None:
        """Begin with the first view.

        Args:
            members: the nodes.
            rounds: end and go on under the policy of each view.
            outbox: takes log records.
            options: of the job. If another scheduler may take over, only a majority goes on.
        """
        self._majority: Final = options.majority
        self.number = 0
        self.silent: tuple[int, ...] = ()
        self.later: tuple[int, ...] = ()
        self.departed: Final[dict[int, str]] = {}
        self.events: Final[deque[ViewChange]] = deque(maxlen=_REMEMBERED)
        self._members: Final = members
        self._rounds: Final = rounds
        self._outbox: Final = outbox
        self._agreed_size = len(members.present)
        self._must_begin = False
        self._taking_over = False
        """The first view of this scheduler, which took the job over from its nodes, is not agreed on yet."""
        self._agreement: Agreement | None = None
        self._announcement: m.NewView | None = None
        """Of the present view."""

    def restore(self, replayed: ReplayedJob) -> None:
        """Go on where another process stopped."""
        self.number = replayed.view
        self.silent = replayed.policies[replayed.version].silent
        self.later = replayed.policies[replayed.version].later
        self.departed.update(replayed.departed)
        self._must_begin = self._taking_over = replayed.taken_over
        self._agreed_size = replayed.agreed_size or self._agreed_size

    def welcomed(self, rank: int) -> None:
        """Announce the present view to a rank that has just been told that it has joined, perhaps once more:
        if its session broke before it could hear that, it has missed the view, too.
        """
        if self._agreement is not None and self._announcement is not None and rank in self._agreement.missing:
            self._members.send([rank], self._announcement)

    def resumed(self, rank: int, view: int, *, changing: bool, now: float) -> None:
        """Handle a rank whose session with another scheduler process ended. If it may have missed what was
        said of a view, a new one begins.
        """
        if self._agreement is not None and self._announcement is not None:
            if rank in self._agreement.missing and view != self.number:
                self._members.send([rank], self._announcement)  # it could not be told before
        elif changing or view != self.number or self._must_begin:
            self._begin(
                (), (), f"rank {rank} may not know view {self.number}: the scheduler was restarted", now
            )

    @property
    def changing(self) -> bool:
        """Whether the present view is not agreed on yet."""
        return self._agreement is not None

    def waiting_text(self) -> str:
        """Return for whose reports the present view waits; empty: for none."""
        if self._agreement is None:
            return ""
        missing = list_some(map(self._members.describe, sorted(self._agreement.missing)))
        return f"view {self.number} waits for reports of {missing}"

    def remove(self, ranks: Iterable[int], reason: str, now: float) -> m.PeerGone | None:
        """Go on without ranks, and tell them why if they are alive."""
        gone = sorted(set(ranks) & set(self._members.present))
        if not gone:
            return None
        for rank in gone:
            member = self._members.all[rank]
            self.departed[member.incarnation] = departure_text(m.Departure(rank, reason), self.number + 1)
            self._members.remove(rank)
            self._rounds.without(rank)
        self.silent = tuple(rank for rank in self.silent if rank not in gone)
        self.later = tuple(rank for rank in self.later if rank not in gone)
        contributors = set(self._members.present) - set(self.silent)
        if not contributors:
            return m.PeerGone(
                rank=gone[-1], kind="lost", reason=f"{reason}; no rank is left that has the job's state"
            )
        text = self._others_may_go_on()
        if text:
            return m.PeerGone(rank=-1, kind="lost", reason=f"{reason}; {text}")
        self._begin(tuple(m.Departure(rank, reason) for rank in gone), (), reason, now)
        return None

    def _others_may_go_on(self) -> str:
        """Return why another scheduler may go on with the ranks that are not here; empty: none can."""
        here, before = len(self._members.present), self._agreed_size
        if self._majority and 2 * here <= before:
            return (
                f"with {here} of {before} nodes left there is no majority here, and another scheduler may go "
                "on with the others"
            )
        if self._taking_over and not self._majority and here < before:
            return (
                f"this scheduler takes the job over, for which it needs all {before} nodes, since the one "
                "before may go on with any (NETSTORM_RECOVERABLE)"
            )
        return ""

    def add(self, rank: int, member: m.Member, now: float) -> None:
        """Go on with one more node, which has no state yet. It has been told that it has joined."""
        self.silent = tuple(sorted({*self.silent, rank}))
        self.later = tuple(sorted({*self.later, rank}))
        self._begin((), (rank,), f"{describe_member(member)} has come", now)

    def waits_for(self, rank: int, view: int) -> bool:
        """Return whether a rank is to report on a view."""
        agreement = self._agreement
        return agreement is not None and agreement.view == view and rank in agreement.missing

    def report(self, rank: int, message: m.ViewReport) -> m.PeerGone | None:
        """Handle a member's report; once all have reported, tell them what is agreed. Returns with which
        member that is impossible, if so.

        Raises:
            ProtocolViolation: the rank was not asked, or has reported before.
        """
        if self._agreement is None:
            raise ProtocolViolation(f"rank {rank} reports on view {message.view}, which is agreed on")
        agreed = self._agreement.report(rank, message)
        if self._agreement.ahead:
            reason = "it has the state of a rank that was ahead of all others, and has left the job since"
            return m.PeerGone(rank=self._agreement.ahead[0], kind="lost", reason=reason)
        if agreed is not None:
            self._agreement, self._taking_over = None, False
            self._agreed_size = len(self._members.present)
            self._outbox.record(Viewed(view=self.number, agreed=True))
            self._members.send_all(agreed)
            _log.info("view %d is agreed on: %s", self.number, _summary(agreed))
        return None

    def caught_up(self, rank: int) -> None:
        """Let a silent rank contribute to all rounds that no rank has been granted yet."""
        if rank in self.silent:
            self.silent = tuple(other for other in self.silent if other != rank)
            self._rounds.silent = self.silent
            starts = self._rounds.install(self._policy(f"rank {rank} contributes"))
            self._rounds.with_contributor(rank, starts)
            _log.info("rank %d has the job's state, and contributes from now on", rank)

    def _begin(
        self, departures: tuple[m.Departure, ...], arrivals: tuple[int, ...], text: str, now: float
    ) -> None:
        self.number += 1
        self._must_begin = False
        present = self._members.present
        _log.warning("view %d: %d nodes; %s", self.number, len(present), text)
        self.events.append(ViewChange(now, self.number, len(present), text))
        self._rounds.install_view(self._policy(f"view {self.number}: {text}"), self.silent)
        members = tuple(self._members.all[rank] for rank in present)
        self._outbox.record(
            Viewed(
                view=self.number,
                version=self._rounds.policy.version,
                members=members,
                departures=departures,
            )
        )
        self._agreement = Agreement(self.number, present, self.silent, self._rounds.members_of)
        self._announcement = m.NewView(
            view=self.number,
            policy=self._rounds.policy,
            members=members,
            departures=departures,
            arrivals=arrivals,
        )
        self._members.send_all(self._announcement)

    def _policy(self, reason: str) -> Policy:
        before = self._rounds.policy
        return msgspec.structs.replace(
            before,
            version=before.version + 1,
            members=self._members.present,
            silent=self.silent,
            later=self.later,
            takes_over=False,
            slow=(),
            keeps_begun=False,
            reason=reason,
        )


def _summary(agreed: m.ViewAgreed) -> str:
    recovered = sum(int.from_bytes(one.chunks, "little").bit_count() for one in agreed.recoveries)
    return f"{recovered} results are sent again" if recovered else "nothing is sent again"
