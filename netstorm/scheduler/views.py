"""Views: who is in a job that nodes may leave and join, and how its rounds go on when that changes. Pure."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer, bits_from_wire, bits_to_wire, ranks_in
from netstorm.protocol.messages import Member, Recovery, RoundResults, ViewAgreed, ViewReport
from netstorm.scheduler.job import Job
from netstorm.scheduler.members import Members, describe_member, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import InitialAssumptions
from netstorm.scheduler.rendezvous import Applicant, Refusal, join_problem
from netstorm.scheduler.replay_log import LoggedOutbox, ReplayedJob, Viewed, departure_text
from netstorm.scheduler.snapshot import ViewChange
from netstorm.topology.policy import Policy

__all__ = ["JobWithViews", "Latecomers", "RankPlace", "ViewAgreement", "with_free_places"]


# The views of a job that nodes may leave and join: who is in, and how everybody learns of it.

_log = logging.getLogger(__name__)

_NO_STATE: Final = "no rank is left that has the job's state"

_REMEMBERED: Final = 50
"""Changes of the view that are shown to people."""


class JobWithViews(Job):
    """A job that nodes may leave and join.

    Attributes:
        view: number of the present view.
        later: ranks that have joined later.
        departed: by incarnation of a process that is in the job no more: why.
        changes: the last ones, the newest last.
    """

    def __init__(
        self,
        members: Sequence[tuple[Peer, Member]],
        policy: Policy,
        options: SchedulerOptions,
        outbox: LoggedOutbox,
        now: float,
        *,
        assumed: InitialAssumptions | None = None,
        planned: InitialAssumptions | None = None,
        replayed: ReplayedJob | None = None,
        reproducible: bool = False,
    ) -> None:
        """Begin with the first view, or go on where another process stopped; see `Job`."""
        super().__init__(
            members,
            policy,
            options,
            outbox,
            now,
            assumed=assumed,
            planned=planned,
            replayed=replayed,
            reproducible=reproducible,
        )
        self.view = 0 if replayed is None else replayed.view
        self.later: tuple[int, ...] = policy.later if replayed is not None else ()
        self.departed: Final[dict[int, str]] = {} if replayed is None else dict(replayed.departed)
        self.changes: Final[deque[ViewChange]] = deque(maxlen=_REMEMBERED)
        self._agreed_size = (replayed.agreed_size if replayed else 0) or len(self.members.present)
        self._must_begin = replayed is not None and replayed.taken_over
        self._taking_over = self._must_begin
        """The first view of this scheduler, which took the job over from its nodes, is not agreed on yet."""
        self._agreement: ViewAgreement | None = None
        self._announcement: m.NewView | None = None
        """Of the present view."""

    @property
    def changing(self) -> bool:
        """Whether the present view is not agreed on yet."""
        return self._agreement is not None

    # --------------------------------------------------------------------------------- what `Job` leaves open

    def welcome(self, rank: int, now: float) -> None:
        """Tell a node that it has joined, perhaps once more: if its session broke before it could hear that,
        it has missed the view, too.
        """
        super().welcome(rank, now)
        if self._agreement is not None and self._announcement is not None and rank in self._agreement.missing:
            self._send(rank, self._announcement)

    def _joined(self, rank: int, policy: Policy) -> m.Joined:
        numbers = range(len(self.keys))
        return msgspec.structs.replace(
            super()._joined(rank, policy),
            later=rank in self.silent,
            keys=tuple(map(self.keys.spec, numbers)),
            grants=tuple(map(self.keys.grant, numbers)),
        )

    def receive(self, rank: int, message: m.Message, now: float) -> m.PeerGone | None:
        """Handle a member's message. Returns with which rank the job cannot go on, if so.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        match message:
            case m.ViewReport():
                return self._report(rank, message, now)
            case m.CaughtUp():
                self._caught_up(rank)
                return None
            case _:
                return super().receive(rank, message, now)

    def _resume_view(self, rank: int, message: m.Resume, now: float) -> None:
        """Begin a new view if the rank may have missed what was said of the present one."""
        if self._agreement is not None and self._announcement is not None:
            if rank in self._agreement.missing and message.view != self.view:
                self._send(rank, self._announcement)  # it could not be told before
        elif message.changing or message.view != self.view or self._must_begin:
            text = f"rank {rank} may not know view {self.view}: the scheduler was restarted"
            self._begin_view((), (), text, now)

    def _with_members(self, policy: Policy) -> Policy:
        return msgspec.structs.replace(
            policy, members=self.members.present, silent=self.silent, later=self.later
        )

    def view_waiting_text(self) -> str:
        """Return for whose reports the present view waits; empty: for none."""
        if self._agreement is None:
            return ""
        missing = list_some(map(self.members.describe, sorted(self._agreement.missing)))
        return f"view {self.view} waits for reports of {missing}"

    # ------------------------------------------------------------------------------------ leaving and joining

    def go_on_without(self, rank: int, reason: str, now: float) -> m.PeerGone | None:
        """Go on without a rank, and tell it why if it is alive. Returns why the job cannot go on, if so."""
        if rank not in self.members.present:
            return m.PeerGone(rank=rank, kind="lost", reason=reason)
        self.finished.pop(rank, None)
        self.link_failures.without(rank)
        self._replicas.set_ranks(set(self.members.present) - {rank})
        gone = self._remove(rank, reason, now)
        if gone is None:
            self._send_reached(self._barriers.remove(rank))
            gone = self._in_vain()
        self._regrant_steps()
        if gone is None and self.link_failures.failures:
            self._announce_links()  # detours over this rank lead over others now
        if gone is None and self.awareness is not None:
            self.awareness.members_changed(f"rank {rank} has left the job")
        return gone

    def _remove(self, rank: int, reason: str, now: float) -> m.PeerGone | None:
        departure = m.Departure(rank, reason)
        self.departed[self.members.all[rank].incarnation] = departure_text(departure, self.view + 1)
        self.members.remove(rank)
        self._consistency.without(rank)
        self._calls.without(rank)
        self.silent = tuple(other for other in self.silent if other != rank)
        self.later = tuple(other for other in self.later if other != rank)
        if not self.members.present:
            return m.PeerGone(rank=rank, kind="lost", reason=f"{reason}; {_NO_STATE}")
        text = self._others_may_go_on()
        if text:
            return m.PeerGone(rank=-1, kind="lost", reason=f"{reason}; {text}")
        self._begin_view((departure,), (), reason, now)
        return None

    def _others_may_go_on(self) -> str:
        """Return why another scheduler may go on with the ranks that are not here; empty: none can. If
        another scheduler may take over, only a majority goes on.
        """
        here, before = len(self.members.present), self._agreed_size
        if self._options.majority and 2 * here <= before:
            return (
                f"with {here} of {before} nodes left there is no majority here, and another scheduler may go "
                "on with the others"
            )
        if self._taking_over and not self._options.majority and here < before:
            return (
                f"this scheduler takes the job over, for which it needs all {before} nodes, since the one "
                "before may go on with any (NETSTORM_RECOVERABLE)"
            )
        return ""

    def admit_later(self, rank: int, peer: Peer, member: Member, now: float) -> None:
        """Go on with one more node, at a place that is free. It has no state yet."""
        self.members.add(peer, member, now)
        self._send_reached(self._barriers.remove(rank))
        self.link_failures.with_rank(rank)
        self.silent = tuple(sorted({*self.silent, rank}))
        self.later = tuple(sorted({*self.later, rank}))
        self.welcome(rank, now)
        self._begin_view((), (rank,), f"{describe_member(member)} has come", now)

    def _caught_up(self, rank: int) -> None:
        """Let a silent rank contribute to all rounds that no rank has been granted yet."""
        if rank in self.silent:
            self.silent = tuple(other for other in self.silent if other != rank)
            starts = self.install(self._next_policy(f"rank {rank} contributes"))
            self._consistency.with_rank(rank, starts)
            _log.info("rank %d has the job's state, and contributes from now on", rank)
        if self.awareness is not None:
            self.awareness.members_changed(f"rank {rank} contributes")
        self._barriers.include(rank)
        self._regrant_steps()
        self._replicas.set_ranks(set(self.members.present) - set(self.silent))

    # ------------------------------------------------------------------------------------------------- views

    def _begin_view(
        self, departures: tuple[m.Departure, ...], arrivals: tuple[int, ...], text: str, now: float
    ) -> None:
        """Let everything that has no result yet run under the policy of a new view, and ask who has what."""
        self.view += 1
        self._must_begin = False
        present = self.members.present
        _log.warning("view %d: %d nodes; %s", self.view, len(present), text)
        self.changes.append(ViewChange(now, self.view, len(present), text))
        policy = self._next_policy(f"view {self.view}: {text}")
        self._bind(policy)
        self._consistency.begin_view(policy.version, self.silent)
        for rank in self.silent:
            self._consistency.without(rank)
        self._moves.clear()
        members = tuple(self.members.all[rank] for rank in present)
        viewed = Viewed(view=self.view, version=policy.version, members=members, departures=departures)
        self._outbox.record(viewed)
        self._agreement = ViewAgreement(self.view, present, self.silent, self._members_of)
        self._announcement = m.NewView(
            view=self.view, policy=policy, members=members, departures=departures, arrivals=arrivals
        )
        self.members.send_all(self._announcement)

    def _next_policy(self, reason: str) -> Policy:
        before = self.policy
        return msgspec.structs.replace(
            before,
            version=before.version + 1,
            members=self.members.present,
            silent=self.silent,
            later=self.later,
            takes_over=False,
            slow=(),
            keeps_begun=False,
            reason=reason,
        )

    def _members_of(self, key: int) -> tuple[int, ...]:
        """Return the ranks that take part in a key; empty: all, or the key is not known. A group whose ranks
        have all left has none (-1).
        """
        members = self.keys.spec(key).members if key in self.keys else ()
        return tuple(rank for rank in members if rank not in self.later) or (-1,) * bool(members)

    def _report(self, rank: int, message: ViewReport, now: float) -> m.PeerGone | None:
        """Handle a member's report of its results. All wait for it, so a wrong one is the member's end. Once
        all have reported, tell them what is agreed.

        Raises:
            ProtocolViolation: the rank was not asked, or has reported before.
        """
        agreement = self._agreement
        if agreement is None:
            raise ProtocolViolation(f"rank {rank} reports on view {message.view}, which is agreed on")
        if agreement.view == message.view and rank in agreement.missing:
            problem = self.authority.report_problem(message)
            if problem:
                reason = f"{self.members.describe(rank)} reports {problem}, which no correct node can have"
                return m.PeerGone(rank=rank, kind="failed", reason=reason)
        agreed = agreement.report(rank, message)
        if agreement.ahead:
            reason = "it has the state of a rank that was ahead of all others, and has left the job since"
            return m.PeerGone(rank=agreement.ahead[0], kind="lost", reason=reason)
        if agreed is not None and agreement.all_are_newcomers:
            return self._go_on_with_newcomers(now)
        if agreed is not None:
            self._agreement, self._taking_over = None, False
            self._agreed_size = len(self.members.present)
            self._outbox.record(Viewed(view=self.view, agreed=True))
            self.members.send_all(agreed)
            _log.info("view %d is agreed on: %s", self.view, _summary(agreed))
        return None

    def _go_on_with_newcomers(self, now: float) -> m.PeerGone | None:
        """Go on with newcomers alone: those that have fetched the state have said so before they reported.
        Their sums begin in a view of its own, since in the present one nobody contributes.
        """
        heirs = [rank for rank in self.members.present if rank not in self.silent]
        if not heirs:
            last = next(reversed(self.departed.values()), "all have left")
            return m.PeerGone(rank=-1, kind="lost", reason=f"{last}; {_NO_STATE}")
        names = list_some(map(self.members.describe, heirs))
        self._consistency.forget_who_began()
        self._begin_view((), (), f"only newcomers are left; the state is with {names}", now)
        return None


def _summary(agreed: m.ViewAgreed) -> str:
    recovered = sum(int.from_bytes(one.chunks, "little").bit_count() for one in agreed.recoveries)
    return f"{recovered} results are sent again" if recovered else "nothing is sent again"


# Agreement on a new view: which results are sent to whom, once all members have reported theirs.
#
# `kvstore.rounds.views.ViewChanges` is the nodes' side, and explains the protocol.


class ViewAgreement:
    """The reports of the members of one new view.

    Attributes:
        view: its number.
        missing: the members that have not reported.
        all_are_newcomers: none has the state, as far as was known when the view began.
        ahead: members whose state has results that others lack and nobody can send them. Once all have
            reported, the view cannot be agreed on with these.
    """

    def __init__(
        self,
        view: int,
        members: Iterable[int],
        newcomers: Iterable[int],
        members_of_key: Callable[[int], tuple[int, ...]],
    ) -> None:
        """Begin without reports.

        Args:
            view: its number.
            members: the ranks in the view.
            newcomers: those among them that have no state: they get all results from the first round on that
                some other rank has not completed.
            members_of_key: returns the ranks that take part in a key; empty: all.
        """
        self.view: Final = view
        self.missing: Final = set(members)
        self.all_are_newcomers: Final = self.missing.issubset(newcomers)
        self.ahead: tuple[int, ...] = ()
        self._newcomers: Final = frozenset(newcomers)
        self._members_of_key: Final = members_of_key
        self._reports: Final[dict[int, ViewReport]] = {}

    def report(self, rank: int, message: ViewReport) -> ViewAgreed | None:
        """Record a member's report; return what is agreed, once all have reported and none is ahead.

        Raises:
            ProtocolViolation: the rank was not asked, or has reported before.
        """
        if message.view != self.view:
            return None  # of a view that was given up
        if rank not in self.missing:
            raise ProtocolViolation(f"rank {rank} reports twice, or is not in view {self.view}")
        self.missing.discard(rank)
        self._reports[rank] = message
        if self.missing:
            return None
        self.ahead = self._find_ahead()
        return None if self.ahead else self._agreed()

    def _find_ahead(self) -> tuple[int, ...]:
        """Return the members that have fetched a state from a rank that has left, and that was ahead of all
        others: they must not go on without its contributions, and cannot with them.
        """
        ahead = set()
        for rank, report in self._reports.items():
            for key, begins in report.begins.items():
                for round in range(report.complete.get(key, -1) + 1, begins):
                    needy = any(self._needs(other, key, round) for other in self._reports if other != rank)
                    if needy and not self._is_known(key, round):
                        ahead.add(rank)
        others = self._reports.keys() - self._newcomers - ahead
        return tuple(sorted(ahead)) if others else ()

    def _needs(self, rank: int, key: int, round: int) -> bool:
        """Return whether a member's program waits for a round, or will."""
        report, of_key = self._reports[rank], self._members_of_key(key)
        if of_key and rank not in of_key:
            return False
        if rank in self._newcomers and key not in report.begins:
            return False
        return max(report.complete.get(key, -1), report.begins.get(key, 0) - 1) < round

    def _is_given_up(self, key: int, round: int) -> bool:
        """Return whether nobody waits for a round, and some results of it are nowhere: they were lost with a
        rank of which all members with the job's state have their state.
        """
        return not any(self._needs(rank, key, round) for rank in self._reports) and not self._is_known(
            key, round
        )

    def _is_known(self, key: int, round: int) -> bool:
        """Return whether some member has each result of a round."""
        chunks = of = 0
        for report in self._reports.values():
            for results in report.results:
                if (results.key, results.round) == (key, round):
                    chunks, of = chunks | bits_from_wire(results.chunks), results.of
        return of > 0 and chunks == (1 << of) - 1

    def _agreed(self) -> ViewAgreed:
        first_rounds = self._first_rounds()
        complete = {
            rank: {
                key: first - 1 if report.fresh else report.complete.get(key, -1)
                for key, first in first_rounds.items()
            }
            for rank, report in self._reports.items()
        }
        recoveries: list[Recovery] = []
        lost: list[RoundResults] = []
        for key, round in self._rounds(first_rounds, complete):
            if self._is_given_up(key, round):
                lost.append(RoundResults(key, round, b""))
                continue
            of_key = self._members_of_key(key)
            needy = [
                rank
                for rank in self._reports
                if complete[rank].get(key, -1) < round and (not of_key or rank in of_key)
            ]
            recovered, gone = self._recoveries(key, round, needy, first_rounds.get(key, 0))
            recoveries += recovered
            lost += gone
        return ViewAgreed(
            view=self.view, recoveries=tuple(recoveries), first_rounds=first_rounds, lost=tuple(lost)
        )

    def _first_rounds(self) -> dict[int, int]:
        """Return, by key, the first round that some member with the job's state has not completed."""
        found: dict[int, int] = {}
        for rank, report in self._reports.items():
            if rank not in self._newcomers:
                for key, complete in report.complete.items():
                    of_key = self._members_of_key(key)
                    if not of_key or rank in of_key:
                        found[key] = min(found.get(key, complete + 1), complete + 1)
        return found

    def _rounds(
        self, first_rounds: dict[int, int], complete: dict[int, dict[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield the rounds of which somebody has results, those before the begin of a program that lacks
        them, and those that only newcomers lack.
        """
        rounds = {
            (results.key, results.round) for report in self._reports.values() for results in report.results
        }
        for report in self._reports.values():
            for key, begins in report.begins.items():
                rounds.update((key, round) for round in range(report.complete.get(key, -1) + 1, begins))
        for rank in self._newcomers & self._reports.keys():
            for key, first in first_rounds.items():
                rounds.update((key, round) for round in range(complete[rank][key] + 1, first))
        yield from sorted(rounds)

    def _recoveries(
        self, key: int, round: int, needy: list[int], first_round: int
    ) -> tuple[list[Recovery], list[RoundResults]]:
        holders: dict[int, list[int]] = {}
        here: dict[int, int] = {}
        known = 0
        for rank, report in self._reports.items():
            for results in report.results:
                if (results.key, results.round) == (key, round):
                    chunks = bits_from_wire(results.chunks)
                    known |= bits_from_wire(results.known)
                    here[rank] = chunks | bits_from_wire(results.known)
                    for chunk in ranks_in(chunks):
                        holders.setdefault(chunk, []).append(rank)
        if not needy:
            return [], []
        if not holders and not known:
            return [], [RoundResults(key, round, b"")] if round < first_round else []
        sends: dict[tuple[int, int], int] = {}
        for target in needy:
            for chunk, ranks in holders.items():
                if not here.get(target, 0) >> chunk & 1:
                    source = ranks[(chunk + target) % len(ranks)]
                    sends[source, target] = sends.get((source, target), 0) | 1 << chunk
        recoveries = [
            Recovery(key, round, source, target, bits_to_wire(chunks))
            for (source, target), chunks in sends.items()
        ]
        nowhere = known & ~sum(1 << chunk for chunk in holders)
        return recoveries, [RoundResults(key, round, bits_to_wire(nowhere))] if nowhere else []


# Nodes that ask to join a job that has begun: which place each gets, and when.
#
# A node that was started again comes before it is certain that its process before has died. So a node whose
# place is taken waits until that is decided, by heartbeats.

_BEATS_MISSED: Final = 3
"""A waiting node that has missed this many heartbeats in a row has probably died."""

_MOST_WAITS: Final = 3
"""Heartbeat time-outs that a node waits for its place: one for the death of the process that has it, one for
the death of another that asked for it before."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank that a node gets."""

    applicant: Applicant
    rank: int
    replaces: bool = False
    """The process that has the rank is gone: another one has its address."""


class Latecomers:
    """The nodes that wait for a place in one job."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options: Final = options
        self._waiting: dict[Peer, Applicant] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._waiting

    def add(self, applicant: Applicant, now: float) -> Refusal | None:
        """Add a node; return why it is refused, if it is."""
        problem = join_problem(applicant.join, self._options)
        if problem is not None:
            return Refusal(applicant.peer, problem)
        known = self._waiting.get(applicant.peer)
        applicant.came_at = now if known is None else known.came_at
        self._waiting[applicant.peer] = applicant
        return None

    def heard(self, peer: Peer, now: float) -> None:
        """Record a sign of life of a process that may be waiting."""
        applicant = self._waiting.get(peer)
        if applicant is not None:
            applicant.heard_at = now

    def remove(self, peer: Peer) -> None:
        """Forget a node that has gone."""
        self._waiting.pop(peer, None)

    def place(self, members: Members, now: float) -> Iterator[RankPlace | Refusal]:
        """Yield the places of those that can have one now, and who has waited too long. Each is forgotten."""
        for peer, applicant in list(self._waiting.items()):
            silent = now - applicant.heard_at
            if silent > self._options.heartbeat_timeout_s:
                del self._waiting[peer]
            if silent > _BEATS_MISSED * self._options.heartbeat_interval_s:
                continue  # it may have died while it waited
            found = self._decide(applicant, members, now)
            if found is not None:
                del self._waiting[peer]
                yield found

    def _decide(self, applicant: Applicant, members: Members, now: float) -> RankPlace | Refusal | None:
        join = applicant.join
        for rank in members.present:
            member = members.all[rank]
            if (member.host, member.port) == (join.host, join.port):  # no two processes can listen there
                asked = join.asked_rank if join.asked_rank >= 0 else rank
                return (
                    RankPlace(applicant, rank, replaces=True)
                    if asked == rank
                    else self._free(applicant, members)
                )
        return self._free(applicant, members) or self._late(applicant, members, now)

    def _free(self, applicant: Applicant, members: Members) -> RankPlace | None:
        asked, taken = applicant.join.asked_rank, set(members.present)
        if asked >= 0:
            return None if asked in taken else RankPlace(applicant, asked)
        free = (rank for rank in range(len(members)) if rank not in taken)
        rank = next(free, None)
        return None if rank is None else RankPlace(applicant, rank)

    def _late(self, applicant: Applicant, members: Members, now: float) -> Refusal | None:
        limit = _MOST_WAITS * self._options.heartbeat_timeout_s
        if now - applicant.came_at < limit:
            return None
        asked = applicant.join.asked_rank
        if asked >= 0:
            reason = (
                f"the node at {applicant} asks for rank {asked}, and {members.describe(asked)} is alive: "
                "NETSTORM_RANK must differ from node to node, or be -1 for any"
            )
        else:
            reason = (
                f"the node at {applicant} is one too many: NETSTORM_ELASTIC allows {len(members)} nodes, and "
                f"the job has {list_some(map(members.describe, members.present))}"
            )
        return Refusal(applicant.peer, reason)


def with_free_places(members: Iterable[tuple[Peer, Member]], places: int) -> list[tuple[Peer, Member]]:
    """Return the nodes of a job by rank, with a member without a port at each place that no node has."""
    by_rank = {member.rank: (peer, member) for peer, member in members}
    return [by_rank.get(rank, (SCHEDULER, Member(rank, "", 0, "", 0))) for rank in range(places)]
