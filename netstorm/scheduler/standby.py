"""A standby scheduler: takes a job over when a majority of its nodes have lost their scheduler. Pure.

A node that cannot reach its scheduler for a heartbeat time-out tries the next address that it knows, and ends
its session with the scheduler before. So it counts at one scheduler only. A scheduler that has standbys ends
its side of the job when it is left with half of the members or fewer. So of two schedulers at most one goes
on.

A *recovering* scheduler is a standby at an address that no node knows. It asks nodes to come (`PeerInquiry`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from netstorm.addresses import host_port
from netstorm.errors import PeerError, ProtocolViolation
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, check_authority
from netstorm.protocol.codecs import ITEM_BYTES, granted_at_first
from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Buffer, Peer
from netstorm.protocol.messages import Departure, JobReport, KeyGrant, KeySpec, Member, Resume
from netstorm.pslite.machine import (
    Admission,
    Admit,
    Call,
    Connect,
    Disconnect,
    Instruction,
    Refuse,
    Send,
    refuse_other_key,
)
from netstorm.pslite.proofs import is_about_keys, proof_for_offer
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import FormationRequest, FormationResult, InitialAssumptions
from netstorm.scheduler.rendezvous import ProcessRegistry
from netstorm.scheduler.replay_log import Began, Record, ReplayedJob, departure_text
from netstorm.scheduler.rounds import MOST_KEYS, under_way_of
from netstorm.scheduler.snapshot import JobSnapshot, Outcome
from netstorm.topology.policy import Policy

__all__ = ["PeerInquiry", "ReportedJob", "StandbyMachine", "check_report"]


_log = logging.getLogger(__name__)

_STATUS_EVERY_S: Final = 60.0
_RECOVERING_STATUS_EVERY_S: Final = 5.0
"""Of a scheduler that somebody has started to take a job over now, and watches."""


class StandbyMachine:
    """The standby scheduler of one job. Implements `pslite.machine.Machine`.

    Attributes:
        options: of the job.
        counters: of the process.
        job: the machine that serves the job; None until it is taken over.
        on_over: see `SchedulerMachine`.
        on_form: see `SchedulerMachine`.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        now: float,
        counters: Counters | None = None,
        assumed: InitialAssumptions | None = None,
        planned: InitialAssumptions | None = None,
        write: Callable[[list[Record]], None] | None = None,
        inquiry: PeerInquiry | None = None,
    ) -> None:
        """Wait for nodes that have lost their scheduler; for the other arguments see `SchedulerMachine`.

        Args:
            inquiry: asks nodes to come; None: they know this scheduler's address.
        """
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.job: SchedulerMachine | None = None
        self._assumed: Final = assumed
        self._planned: Final = planned
        self._write: Final = write
        self._inquiry: Final = inquiry
        self._registry: Final = ProcessRegistry()
        self._reported: Final = ReportedJob()
        self._resumes: Final[dict[Peer, m.Resume]] = {}
        self._since = math.inf
        self._status_at = now + self._status_every_s
        self._instructions: list[Instruction] = []
        self.on_over: Callable[[Outcome], None] | None = None
        self.on_form: Callable[[FormationRequest], None] | None = None
        self._ended: Outcome | None = None

    # ------------------------------------------------------------------------------- what its process needs

    @property
    def _status_every_s(self) -> float:
        return _STATUS_EVERY_S if self._inquiry is None else _RECOVERING_STATUS_EVERY_S

    @property
    def outcome(self) -> Outcome | None:
        """How the job went; None until it is over."""
        return self._ended if self.job is None else self.job.outcome

    def policy_formed(self, answer: FormationResult, now: float) -> None:
        """Receive the result of a formation."""
        if self.job is not None:
            self.job.policy_formed(answer, now)

    def snapshots(self, now: float) -> tuple[JobSnapshot, ...]:
        """Return the snapshot of the job, once it is taken over."""
        return () if self.job is None else self.job.snapshots(now)

    def stop(self, reason: str, now: float) -> None:
        """End because this process must end."""
        if self.job is not None:
            self.job.stop(reason, now)
        else:
            self._ended = Outcome(0, f"standby of job {self.options.job!r}: {reason}; it was not needed")
            if self.on_over is not None:
                self.on_over(self._ended)

    def abort(self, error: Exception, now: float) -> None:
        """End the job because this process cannot go on."""
        if self.job is not None:
            self.job.abort(error, now)

    # ------------------------------------------------------------------------------ what the endpoint needs

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Admit nodes that have lost their scheduler."""
        if self.job is not None:
            return self.job.admit(hello, user)
        if hello.receiver != SCHEDULER or hello.job != self.options.job:
            return Refuse(f"this is a standby scheduler of job {self.options.job!r}")
        if hello.sender < 0:
            return Refuse(
                f"this is a standby scheduler of job {self.options.job!r}: it takes over when a majority of "
                "the nodes have lost the scheduler before it, and lets nodes join then"
            )
        if self._registry.is_taken(hello.incarnation, user):
            return refuse_other_key("the process of this number", user, self._reported.members())
        return Admit(self._registry.register(hello.incarnation, hello.job, user))

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message."""
        if peer <= UNKNOWN:
            check_authority(message, Role.MEMBER, Role.RECOVERER, "a node that was asked")
            assert isinstance(message, m.RecoverAnswer)  # the one message of its authority
            if self._inquiry is not None and self.job is None:
                self._inquiry.answered(peer, message, now)
                if not message.accepted:
                    self._reported.remove_rank(message.rank)
            return
        if self.job is not None:
            self.job.receive(peer, message, payload, payload_crc, now)
            return
        check_authority(message, Role.MEMBER, Role.SCHEDULER, f"process {peer}")
        if isinstance(message, m.Resume):
            incarnation, user = self._registry.incarnation_of(peer), self._registry.user_of(peer)
            check_report(message, incarnation, user, self.options.num_workers)
            if not self._reported:
                self._since = now
            self._reported.add(incarnation, user, message)
            self._resumes[peer] = message
            _log.warning("%s", self._reported.waiting_text())
            self._take_over_if_due(now)
        elif isinstance(message, (m.Leave, m.Failed)):
            self._forget(peer)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        if peer <= UNKNOWN:
            if self._inquiry is not None:
                self._inquiry.lost(peer, reason)
        elif self.job is not None:
            self.job.peer_lost(peer, reason, now)
        else:
            self._forget(peer)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """See `ConnectionWatcher`."""
        if self.job is not None and peer > UNKNOWN:
            self.job.connection_gone(peer, reason, now, refused=refused)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`."""
        return self.job is not None and peer > UNKNOWN and self.job.may_be_busy(peer, now)

    def peer_busy(self, peer: Peer, seconds: float, now: float, *, late: bool = False) -> None:
        """See `ConnectionWatcher`."""
        if self.job is not None and peer > UNKNOWN:
            self.job.peer_busy(peer, seconds, now, late=late)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.job is not None:
            self.job.tick(now)
            return
        if self._ended is not None:
            return
        if now >= self._status_at:
            self._status_at = now + self._status_every_s
            said = "" if self._inquiry is None else f"; {self._inquiry.status_text()}"
            _log.info("standby of job %r: %s%s", self.options.job, self._reported.waiting_text(), said)
        self._take_over_if_due(now)
        if self._inquiry is not None and self.job is None:
            self._ask(self._inquiry, now)

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.job is not None:
            return self.job.next_tick()
        if self._ended is not None:
            return math.inf
        due = min(self._status_at, self._since + self.options.heartbeat_timeout_s)
        return due if self._inquiry is None else min(due, self._inquiry.next_tick())

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken, self._instructions = self._instructions, []
        if self._inquiry is not None:
            taken += self._inquiry.take_instructions()
        return taken if self.job is None else [*taken, *self.job.take_instructions()]

    # ------------------------------------------------------------------------------------------------ inside

    def _ask(self, inquiry: PeerInquiry, now: float) -> None:
        """Ask nodes to come, or end if that is in vain."""
        missing = self._reported.missing_text(elastic=self.options.elastic is not None)
        inquiry.tick(now, missing)
        if inquiry.error:
            self._ended = ended = Outcome(2, f"job {self.options.job!r} is not taken over: {inquiry.error}")
            on_over = self.on_over
            if on_over is not None:
                self._instructions.append(Call(function=lambda: on_over(ended)))

    def _forget(self, peer: Peer) -> None:
        self._resumes.pop(peer, None)
        self._reported.remove(self._registry.incarnation_of(peer))
        self._instructions.append(Disconnect(peer=peer))
        if not self._reported:
            self._since = math.inf

    def _take_over_if_due(self, now: float) -> None:
        """Take over with all nodes, or, after a while, with a majority of them."""
        waited = now - self._since >= self.options.heartbeat_timeout_s
        enough = self.options.elastic is not None and self._reported.has_majority()
        if not self._reported.is_complete() and not (waited and enough):
            if waited:
                self._since = now
            return
        replayed = self._reported.replayed(self.options)
        _log.warning("taking over job %r: %s", self.options.job, self._reported.waiting_text())
        if self._inquiry is not None:
            self._inquiry.end()
        majority = self.options.recoverable or self._reported.majority
        self.job = SchedulerMachine(
            dataclasses.replace(self.options, recoverable=majority),
            replayed.policies[replayed.version],
            now=now,
            counters=self.counters,
            assumed=self._assumed,
            planned=self._planned,
            registry=self._registry,
            write=self._write,
            replayed=replayed,
        )
        self.job.on_over, self.job.on_form = self.on_over, self.on_form
        for peer, resume in self._resumes.items():
            try:
                self.job.receive(peer, resume, None, None, now)
            except PeerError as error:  # of one node: the others must be answered
                self.counters.add("dropped_refused")
                _log.warning("refused what process %d says of the job: %s", peer, error)


# How a scheduler that takes a job over finds its nodes, given the addresses of some of them.
#
# It asks each for the members of the job, and tells it where it listens itself. A node that has lost its
# scheduler comes. So one peer that is alive is enough, and what a peer says of others decides only whom to
# ask.

_ASK_EVERY_S: Final = 1.0
"""Between two questions to a node: it may lose its scheduler at any time, or go over to another one."""

_SHOWN: Final = 4
"""Peers that a message for people describes."""


@dataclass(slots=True)
class _Asked:
    """One address at which there may be a node."""

    host: str
    port: int
    named: bool
    """The user has named it."""
    asked: bool = False
    """A question is under way."""
    problem: str = "no answer yet"
    answer: m.RecoverAnswer | None = None
    proof: bytes = b""
    """That this is a scheduler of its job; empty: not made, or not wanted."""

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)


class PeerInquiry:
    """The questions of one scheduler.

    Attributes:
        error: why the job cannot be taken over; empty: it may be.
    """

    def __init__(
        self,
        peers: Sequence[tuple[str, int]],
        listens_at: tuple[str, int],
        options: SchedulerOptions,
        now: float,
    ) -> None:
        """Begin to ask.

        Args:
            peers: addresses of nodes.
            listens_at: where nodes reach this scheduler.
            options: of the job.
            now: the time.
        """
        self.error = ""
        self._options: Final = options
        self._listens_at: Final = listens_at
        self._asked: Final[dict[Peer, _Asked]] = {}
        self._instructions: list[Instruction] = []
        self._ask_at = now
        self._ends_at = now + options.join_timeout_s
        self._has_answers = False
        self._alive_at = math.inf
        """By then the nodes have noticed it if their scheduler is gone."""
        for host, port in peers:
            self._add(host, port, named=True)

    def answered(self, peer: Peer, message: m.RecoverAnswer, now: float) -> None:
        """Handle a node's answer."""
        asked = self._asked.get(peer)
        if asked is None:
            return
        if len(message.members) != self._options.num_workers or message.elastic != self._options.elastic:
            if asked.named:
                self.error = self._other_job(asked, message)
            return
        if message.unproven:
            self._prove(asked, message, now)
            return
        if not self._has_answers:
            self._has_answers, self._alive_at = True, now + self._notice_s
        asked.asked, asked.problem, asked.answer = False, "", message
        known = {(one.host, one.port) for one in self._asked.values()}
        ranks = {one.answer.rank for one in self._asked.values() if one.answer is not None}
        for member in message.members:
            if member.port and member.rank not in ranks and (member.host, member.port) not in known:
                self._add(member.host, member.port)

    def lost(self, peer: Peer, reason: str) -> None:
        """Handle that a node does not answer, or refuses to."""
        asked = self._asked.get(peer)
        if asked is None:
            return
        if asked.problem != reason:
            _log.warning("the node at %s does not answer: %s", asked.address, reason)
        asked.asked, asked.problem, asked.answer = False, reason, None
        if (
            not self._has_answers
            and asked.named
            and (is_about_keys(reason) or _OTHER_JOB in reason or _SCHEDULER in reason)
        ):
            self.error = f"--peers {asked.address}: {reason}: expected a node of job {self._options.job!r}"

    def tick(self, now: float, waiting: str) -> None:
        """Ask, and find out whether that is in vain.

        Args:
            now: the time.
            waiting: who is missing, for a person; empty: nobody has come.
        """
        if now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            for peer, asked in self._asked.items():
                if not asked.asked:
                    asked.asked = True
                    host, port = self._listens_at
                    self._instructions += [
                        Connect(peer=peer, host=asked.host, port=asked.port),
                        Send(peer=peer, message=m.Recover(host=host, port=port, proof=asked.proof)),
                    ]
        if now >= self._alive_at:
            self._alive_at = now + self._notice_s
            self.error = self.error or ("" if waiting else self._alive())
        if not self.error and now >= self._ends_at:
            limit = f"within {self._options.join_timeout_s:g} s (NETSTORM_JOIN_TIMEOUT)"
            self.error = f"{waiting}, {limit}" if waiting else f"{self._nobody()}, {limit}"

    def next_tick(self) -> float:
        """Return when something is due."""
        return min(self._ask_at, self._ends_at, self._alive_at)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken, self._instructions = self._instructions, []
        return taken

    def end(self) -> None:
        """Ask no more."""
        self._instructions = [Disconnect(peer=peer) for peer in self._asked]
        self._asked.clear()
        self._ask_at = self._ends_at = self._alive_at = math.inf

    def status_text(self) -> str:
        """Return what the nodes say, for a person."""
        return "; ".join(_some(self._text(one) for one in self._asked.values()))

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _notice_s(self) -> float:
        """How long a node may take to notice that its scheduler is gone: until its connection is broken,
        and until it cannot make another one.
        """
        return 2 * self._options.link_timeout_s + self._options.heartbeat_timeout_s

    def _prove(self, asked: _Asked, message: m.RecoverAnswer, now: float) -> None:
        """Ask a node once more, with the proof that it wants."""
        mine = [one for one in message.members if one.rank == message.rank]
        key = self._options.secret.key_for(self._options.job, mine[0]) if mine else b""
        proof = proof_for_offer(key, *self._listens_at)
        asked.asked, asked.answer = False, None
        if proof and proof != asked.proof:
            asked.proof, self._ask_at = proof, now
            return
        asked.problem = (
            "it follows only schedulers with the secret of the one before: expected that one's "
            "NETSTORM_SCHEDULER_KEY, which it must have had from the job's beginning"
        )
        if asked.named and not self._has_answers:
            self.error = f"--peers {asked.address}: {asked.problem}"

    def _add(self, host: str, port: int, *, named: bool = False) -> None:
        self._asked[Peer(UNKNOWN - len(self._asked))] = _Asked(host, port, named)
        self._ask_at = -math.inf

    def _text(self, asked: _Asked) -> str:
        answer = asked.answer
        if answer is None:
            return f"{asked.address}: {asked.problem}"
        says = "comes here" if answer.accepted else f"follows the scheduler at {answer.scheduler}"
        return f"rank {answer.rank} at {asked.address} {says}"

    def _alive(self) -> str:
        """Return that the nodes have a scheduler; empty: they have not."""
        answers = [one.answer for one in self._asked.values() if one.answer is not None]
        if not answers or any(answer.accepted for answer in answers):
            return ""
        where = ", ".join(_some(sorted({answer.scheduler for answer in answers})))
        return (
            f"job {self._options.job!r} has a scheduler, at {where}: {len(answers)} nodes follow it, and did "
            f"not lose it in {self._notice_s:g} s (NETSTORM_LINK_TIMEOUT and PS_HEARTBEAT_TIMEOUT): expected "
            "one that is gone; if it does not work, end its process first"
        )

    def _nobody(self) -> str:
        return (
            f"no node of job {self._options.job!r} comes: {self.status_text()}: expected addresses at which "
            "its nodes listen, as their log and `netstorm top` show them (NETSTORM_PORT)"
        )

    def _other_job(self, asked: _Asked, answer: m.RecoverAnswer) -> str:
        own, elastic = self._options, answer.elastic
        theirs = f"NETSTORM_ELASTIC={elastic[0]}:{elastic[1]}" if elastic else "no NETSTORM_ELASTIC"
        ours = f"{own.elastic[0]}:{own.elastic[1]}" if own.elastic else "none"
        return (
            f"--peers {asked.address}: its job has {len(answer.members)} ranks and {theirs}, this scheduler "
            f"{own.num_workers} and {ours}: give this scheduler the settings of the one before (-n, "
            "NETSTORM_ELASTIC)"
        )


_OTHER_JOB: Final = "this is a node of job"
"""Part of the refusal of a node of another job."""

_SCHEDULER: Final = ", not rank"
"""Part of the refusal of a scheduler."""


def _some(texts: Iterable[str]) -> list[str]:
    listed = list(texts)
    return listed[:_SHOWN] + [f"{len(listed) - _SHOWN} more"] * (len(listed) > _SHOWN)


# A job as its nodes report it: what another scheduler needs to take it over without a log.

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
    by_number = []
    for key in range(max(known, default=-1) + 1):
        name = f"key {key} of ranks that are gone"
        nobody = (KeySpec(-1, name, (), "float32"), KeyGrant(-1, name, key, 0, 0, 1))
        by_number.append(known.get(key, nobody))
    return [spec for spec, _ in by_number], tuple(grant for _, grant in by_number)


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
    in_order = sorted(rows.items()) or [(0, newest)]
    return in_order if in_order[-1][1] == newest else [*in_order, (granted + 1, newest)]


# Checks of what a node reports of its job: whether the parts fit together, and are the node's own.
#
# A node could still report a job that never was. A standby scheduler goes on only with a majority of the
# newest view's members, each of which has reported itself.


def check_report(message: Resume, incarnation: int, user: str, places: int) -> None:
    """Check a node's report of its job, if there is one.

    Args:
        message: the node's.
        incarnation: of the node's process.
        user: text of the key that it has; empty: the job has none.
        places: most nodes that the job can have.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    report = message.job
    if report is None:
        return
    if (incarnation, user) not in {(one.incarnation, one.user) for one in report.members if one.port}:
        raise ProtocolViolation("a node reports a job that it is not a member of")
    problem = _problem(message, report, places)
    if problem:
        raise ProtocolViolation(f"a node reports a job with {problem}")


def _problem(message: Resume, report: JobReport, places: int) -> str:
    """Return what does not fit together; empty: nothing."""
    size = len(report.members)
    ranks = range(size)
    if size != places or [member.rank for member in report.members] != list(ranks):
        return f"{size} members: expected ranks 0 to {places - 1}, in order"
    present = [member.incarnation for member in report.members if member.port]
    if len(set(present)) < len(present):
        return "one process at two places"
    if report.policy.size != size or message.view < 0 or report.barriers < 0:
        return f"policy for {report.policy.size} nodes, view {message.view} and {report.barriers} barriers"
    names = [(spec.namespace, spec.name) for spec in report.specs]
    if [(one.namespace, one.name) for one in report.grants] != names or len(set(names)) < len(names):
        return f"{len(names)} keys and {len(report.grants)} numbers of others"
    if any(one.key >= other.key for one, other in pairwise(report.grants)):
        return "keys that are not in the order of their numbers"
    if any(min(one.key, one.offset, one.first_slot, one.chunk_size - 1) < 0 for one in report.grants):
        return "keys without a number or a place"
    if any(one.key >= MOST_KEYS for one in report.grants):
        return f"a key with a number of {MOST_KEYS} or more"
    if any(spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 0 for spec in report.specs):
        return f"keys that cannot be summed: the types that can be are {', '.join(ITEM_BYTES)}"
    versions = {policy.version for policy in (report.policy, *report.policies)}
    if any(policy.size != size for policy in report.policies) or any(
        not rows or any(start < 0 or version not in versions for start, version in rows)
        for rows in report.rows.values()
    ):
        return "rounds under policies that it does not describe, or that are for another number of nodes"
    if min(report.granted, default=0) < 0 or not set(report.finished) <= set(ranks):
        return f"finished ranks {list(report.finished)[:16]}"
    return ""
