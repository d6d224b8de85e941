"""The scheduler of one job as a pure state machine: events and the time in, instructions out.

A process gets a number when it first connects (`ProcessRegistry`). Until all nodes have joined they wait
(`Startup`); then they get ranks, and `Job` answers what they send. This machine says who is who, under which
policy the job runs, when it goes on without a node, and how it ends.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from netstorm.errors import NetStormError
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, check_authority, not_authorised
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Instruction, Refuse, refuse_other_key
from netstorm.pslite.proofs import SchedulerSecret, proof_for_resume
from netstorm.scheduler.awareness import FailedLinkRecord, LinkEstimate
from netstorm.scheduler.job import Job
from netstorm.scheduler.launched_ranks import LaunchedRanks, RankEnded
from netstorm.scheduler.members import format_address, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import (
    Awareness,
    FormationRequest,
    FormationResult,
    InitialAssumptions,
    check_policy,
    placeholder_policy,
    workload_of,
)
from netstorm.scheduler.rendezvous import Applicant, ProcessRegistry, Refusal, Startup, job_full_reason
from netstorm.scheduler.replay_log import JobEnded, LoggedOutbox, Record, ReplayedJob
from netstorm.scheduler.snapshot import (
    JobPhase,
    JobSnapshot,
    NodeSnapshot,
    Outcome,
    PolicyHistory,
    ViewSnapshot,
)
from netstorm.scheduler.views import JobWithViews, Latecomers, with_free_places
from netstorm.topology.policy import Policy

__all__ = ["FirstPolicy", "SchedulerMachine", "abort_reason"]


_log = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S: Final = 5.0
"""How long the scheduler of a failed job stays, so that every node hears why."""

_MOST_ESTIMATED: Final = 24
"""Nodes of a job whose link estimates are computed for a snapshot: that takes 14 ms of the scheduler's thread
with 24 nodes, 0.5 s with 128. Of larger jobs people see what nodes reported."""

_MOST_KEYS_SHOWN: Final = 200
"""Keys that a snapshot has; a model may have thousands, and nobody reads their list to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPolicy:
    """The policy that a job begins under, if it was formed only once all nodes had joined."""

    policy: Policy
    planned: InitialAssumptions
    """What it was formed for, and later policies are."""
    aware: bool
    """Later policies follow what is measured."""
    link_share: float = 1.0
    """The part of each link's rate that the job plans with."""


class SchedulerMachine:
    """The scheduler of one job. Implements `pslite.machine.Machine`.

    Attributes:
        options: of the job.
        counters: of the job.
        phase: where the job is in its life.
        job: the nodes and what they share, once all have joined; None before.
        outcome: how the job went; None until it is over.
        take_instructions: returns what is to be done.
        on_over: called with the outcome when the job is over.
        on_form: called with each policy to form; the result goes to `policy_formed`. None: none is formed.
        on_all_joined: called once all nodes have joined if the first policy is not known; it goes to
            `set_first_policy`.
        on_came: called with the rank of each node that comes before that: it hears how the job goes.
        on_begun: called once all nodes have joined, when the job begins.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        policy: Policy | None,
        *,
        now: float,
        counters: Counters | None = None,
        assumed: InitialAssumptions | None = None,
        planned: InitialAssumptions | None = None,
        registry: ProcessRegistry | None = None,
        write: Callable[[list[Record]], None] | None = None,
        replayed: ReplayedJob | None = None,
    ) -> None:
        """Wait for nodes, or go on with a job that another process served.

        Args:
            options: of the job.
            policy: the policy that the job begins under, formed for what is `assumed`. None: it is asked for
                once all nodes have joined.
            now: the time.
            counters: None: new ones.
            assumed: what policies that follow measurements are formed for. None: the policy stays until
                another one is installed, or a link fails.
            planned: what policies are formed for when links fail, even if nothing is `assumed`.
            registry: numbers the processes; None: one of its own.
            write: writes records to the replay log, from which another process can take over; None: no log.
            replayed: the job as another process left it; None: a new job.

        Raises:
            UsageError: the policy is for another number of nodes than the job has.
        """
        if replayed is not None and replayed.began.secret.key:  # the nodes know this one
            options = dataclasses.replace(options, secret=SchedulerSecret(replayed.began.secret.key))
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.phase = JobPhase.GATHERING
        self.job: Job | None = None
        self.outcome: Outcome | None = None
        self.on_over: Callable[[Outcome], None] | None = None
        self.on_form: Callable[[FormationRequest], None] | None = None
        self.on_all_joined: Callable[[], None] | None = None
        self.on_came: Callable[[int], None] | None = None
        self.on_begun: Callable[[], None] | None = None
        self._outbox: Final = LoggedOutbox(write)
        self.take_instructions: Final[Callable[[], list[Instruction]]] = self._outbox.take
        self._registry: Final = registry or ProcessRegistry()
        self._startup: Final = Startup(options, self._outbox, self.counters, now)
        self._launched: LaunchedRanks | None = None
        """Once a launcher has said that a rank's process has ended."""
        self._latecomers: Final = None if options.elastic is None else Latecomers(options)
        self._ranks: Final[dict[Peer, int]] = {}
        """Of the processes that are in the job."""
        self._left: Final[set[int]] = set()
        """Ranks that have left the job as it ends."""
        self._policy_known = policy is not None
        self._first_policy = placeholder_policy(options.num_workers) if policy is None else policy
        check_policy(self._first_policy, nodes=options.num_workers, after=-1)
        self._history = PolicyHistory(self._first_policy, now)
        self._assumed = assumed
        self._planned = planned
        self._link_share = 1.0
        self._failure: m.PeerGone | None = None
        self._end_at = math.inf
        """When this waits no longer for nodes to leave; inf if the job has not ended."""
        self._ranks_to_come = False
        """A job that fails before it begins waits for ranks that have not come yet, and must hear why."""
        self._stopped = False
        self._nobody_joined = False
        self._started_at: Final = now
        self._last_tick = now
        if replayed is not None:
            self._resume(replayed, now)

    # ------------------------------------------------------------------------------------ what drivers need

    @property
    def abandoned(self) -> bool:
        """Whether every process left before the job began."""
        return self.phase is JobPhase.GATHERING and not self._startup.peers()

    def stop(self, reason: str, now: float) -> None:
        """End the job because this process must end. A finished job just waits for its nodes no longer."""
        self._stopped = True
        if self.phase is JobPhase.FINISHED:
            self._end_at = now
        else:
            self._fail(m.PeerGone(rank=-1, kind="stopped", reason=reason), now)

    def give_up(self, limit_s: float, now: float) -> None:
        """End the job if it has not begun: not every node came within `limit_s`."""
        if self.phase is JobPhase.GATHERING:
            reason = f"not every node came within {limit_s:g} s: {self._startup.status_text()}"
            self._fail(m.PeerGone(rank=-1, kind="timeout", reason=reason), now)

    def abort(self, error: Exception, now: float) -> None:
        """End the job because this process cannot go on."""
        self.stop(abort_reason(error), now)

    def rank_ended(self, ended: RankEnded, now: float) -> None:
        """Learn from the launcher how the process has ended that it had started for a rank."""
        if self._launched is None:
            self._launched = LaunchedRanks(self.options.begin_with or self.options.num_workers)
        self._launched.record(ended, now, in_the_job=self.job is not None)

    # ------------------------------------------------------------------------------ what the endpoint needs

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Number each process. Who may join is decided when it asks to, so that it is told why not."""
        if hello.receiver != SCHEDULER:
            return Refuse(f"this is the scheduler of job {self.options.job!r}, not rank {hello.receiver}")
        departed = self._departure_of(hello.incarnation)
        if departed is not None and not user:  # with a key it is told what it believes, as answer to `Resume`
            return Refuse(departed)
        if self._registry.is_taken(hello.incarnation, user):
            return refuse_other_key("the process of this number", user, self.members)
        peer = self._registry.find(hello.incarnation)
        if peer is None and departed is None and hello.sender >= 0:
            return Refuse(
                f"the scheduler of job {self.options.job!r} does not know this rank {hello.sender}: it was "
                "restarted, or another scheduler has taken the address of the one before"
            )
        return Admit(self._registry.register(hello.incarnation, hello.job, user))

    def has_departed(self, incarnation: int) -> bool:
        """Return whether a process is in the job no more, which goes on without it."""
        return self._departure_of(incarnation) is not None

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message."""
        job, rank = self.job, self._ranks.get(peer)
        if isinstance(message, m.Join):
            self._join(peer, message, now)
        elif rank is None or job is None:
            self._receive_before_join(peer, message, now)
        else:
            job.members.liveness.heard(rank, now)
            if self.phase is JobPhase.RUNNING:
                check_authority(message, Role.MEMBER, Role.SCHEDULER, f"rank {rank}")
                self._receive_from_member(job, rank, message, now)
            else:
                self._receive_at_the_end(peer, rank, message, now)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        job, rank = self.job, self._ranks.get(peer)
        if rank is None or job is None:
            self._process_left(peer, reason, now)
        elif self.phase is not JobPhase.RUNNING or not self._go_on_without(
            job, job.lost(rank, reason, now), now
        ):
            self._rank_left(rank, now)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """Learn that a node's connection is gone. See `ConnectionWatcher`."""
        job, rank = self.job, self._ranks.get(peer)
        if job is None or rank is None:
            if self._startup.connection_gone(peer, reason, refused=refused):
                self._process_left(peer, f"its process has ended: {reason}", now)
        elif self.phase is JobPhase.RUNNING:
            gone = job.refused(rank, reason, now) if refused else job.disconnected(rank, now)
            if gone is not None:
                self._go_on_without(job, gone, now)
        elif refused:
            self._rank_left(rank, now)
        else:
            job.members.inquire([rank])

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`. Nobody knows more of a node than its own connection says."""
        return True

    def peer_busy(self, peer: Peer, seconds: float, now: float, *, late: bool = False) -> None:
        """Learn that a node is busy. See `ConnectionWatcher`."""
        job, rank = self.job, self._ranks.get(peer)
        if job is None or rank is None:
            self._startup.busy(peer, seconds, now, late=late)
        else:
            job.members.liveness.busy(rank, late=late)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for ended in () if self._launched is None else self._launched.due(now):
            self._handle_end(ended, now)
        self._last_tick = now
        if self.phase is JobPhase.GATHERING:
            self._check_startup(now)
        elif self.job is not None and self.phase is JobPhase.RUNNING:
            gone = self.job.tick(now)
            if gone is not None:
                self._go_on_without(self.job, gone, now)
            else:
                self._check_policy(self.job, now)
            self._place_latecomers(self.job, now)
            self._history.installed(self.policy, now)  # views bring policies of their own
        self._end_if_due(now)

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.phase is JobPhase.OVER:
            return math.inf
        due = min(self._last_tick + self.options.heartbeat_interval_s, self._wait_until())
        if self._launched is not None:
            due = min(due, self._launched.next_due())
        job = self.job
        if job is None or self.phase is not JobPhase.RUNNING:
            return due
        if job.awareness is not None:
            due = min(due, job.awareness.due())
        return min(due, job.next_tick(), job.link_failures.due())

    # ---------------------------------------------------------------------------- until all nodes have joined

    def _join(self, peer: Peer, join: m.Join, now: float) -> None:
        job, own = self.job, self.options.job
        address = format_address(join.host, join.port, join.site)
        asked = self._registry.job_of(peer)
        if job is None and join.asked_rank >= 0 and self.on_came is not None:
            self._outbox.add(Call(function=partial(self.on_came, join.asked_rank)))
        if asked != own:
            reason = (
                f"the node at {address} is of job {asked!r}, the scheduler of job {own!r}: give both the "
                "same NETSTORM_JOB, or the node another DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            )
            self._startup.refuse(peer, reason)
        elif self._failure is not None:
            self._startup.refuse(peer, f"the job has already ended: {self._failure.reason}")
        elif job is None:
            if self._launched is not None:
                self._launched.has_come(join.asked_rank)
            self._startup.join(self._applicant(peer, join, now), now)
            self._check_launched(now)
            if self._startup.complete() and self.phase is JobPhase.GATHERING:
                self._all_joined(now)
        elif peer in self._ranks:  # its session broke before it could read that it had joined
            job.welcome(self._ranks[peer], now)
        elif self._latecomers is not None and self.phase is JobPhase.RUNNING:
            refusal = self._latecomers.add(self._applicant(peer, join, now), now)
            if refusal is not None:
                self._startup.refuse(peer, refusal.reason)
            self._place_latecomers(job, now)
        else:
            self._startup.refuse(peer, job_full_reason(own, job.members.all, address, join.asked_rank))

    def _applicant(self, peer: Peer, join: m.Join, now: float) -> Applicant:
        return Applicant(
            peer=peer,
            incarnation=self._registry.incarnation_of(peer),
            join=join,
            heard_at=now,
            user=self._registry.user_of(peer),
        )

    def _receive_before_join(self, peer: Peer, message: m.Message, now: float) -> None:
        """Handle a message of a process that has no rank, or none any more: it was stopped for too long."""
        departed = self._departure_of(self._registry.incarnation_of(peer))
        if departed is not None and not isinstance(message, (m.Leave, m.Failed)):
            proof = self._proof(peer, message)
            self._outbox.send([peer], m.PeerGone(rank=-1, kind="removed", reason=departed, proof=proof))
            return
        match message:
            case m.Heartbeat():
                self._startup.heard(peer, now)
                if self._latecomers is not None:
                    self._latecomers.heard(peer, now)
            case m.Leave() | m.Failed() if self._latecomers is not None and peer in self._latecomers:
                self._latecomers.remove(peer)
            case m.Leave():
                self._process_left(peer, "it left", now)
            case m.Failed():
                self._process_left(peer, f"it failed: {message.reason}", now)
            case _:
                raise not_authorised(message, "a process that has not joined")

    def _proof(self, peer: Peer, message: m.Message) -> bytes:
        """Return what goes with the answer to a process that asks whether this is its scheduler."""
        if not isinstance(message, m.Resume):
            return b""
        incarnation, user = self._registry.incarnation_of(peer), self._registry.user_of(peer)
        process = m.Member(rank=-1, host="", port=0, site="", incarnation=incarnation, user=user)
        return proof_for_resume(self.options.secret.key_for(self.options.job, process), message.number)

    def _check_startup(self, now: float) -> None:
        self._startup.check(now)
        if self._startup.complete():
            self._all_joined(now)
        if self.phase is JobPhase.GATHERING:
            late = self._startup.remind(now)
            if late is not None:
                self._fail(late, now)

    def _check_launched(self, now: float) -> None:
        """End a job that has not begun if too many of its ranks have ended; or expect fewer."""
        launched = self._launched
        if launched is None or not launched.gone or self.phase is not JobPhase.GATHERING:
            return
        gone = launched.gone
        nodes, elastic = self.options.begin_with or self.options.num_workers, self.options.elastic
        if elastic is not None and nodes - len(gone) >= elastic[0]:
            self._startup.begin_with(nodes - len(gone))
            return
        failed = [ended for ended in gone if ended.code] or (list(gone) if self._startup.peers() else [])
        if failed:
            first = failed[0]
            self._fail(m.PeerGone(rank=first.rank, kind="lost", reason=_never_joined(first)), now)
        elif not launched.some_run:
            self.phase, self._end_at, self._nobody_joined = JobPhase.FAILED, now, True

    def _all_joined(self, now: float) -> None:
        if self._policy_known:
            self._begin(now)
        elif not self._startup.forming_policy and self.on_all_joined is not None:
            self._startup.forming_policy = True
            self._outbox.add(Call(function=self.on_all_joined))

    def set_first_policy(self, first: FirstPolicy | str, now: float) -> None:
        """Receive the policy that the job begins under, which `on_all_joined` was called for; or why none can
        be formed, which ends the job.

        Raises:
            UsageError: the policy is for another number of nodes than the job has.
        """
        if isinstance(first, str):
            self._fail(m.PeerGone(rank=-1, kind="refused", reason=first), now)
            return
        check_policy(first.policy, nodes=self.options.num_workers, after=-1)
        self._policy_known = True
        self._first_policy, self._link_share = first.policy, first.link_share
        self._assumed, self._planned = first.planned if first.aware else None, first.planned
        self._history = PolicyHistory(first.policy, now)
        if self.phase is JobPhase.GATHERING and self._startup.complete():  # no node has left since
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Give ranks, and begin the job."""
        members, policy = list(self._startup.assign_ranks()), self.policy
        if self.options.elastic is not None:
            policy = msgspec.structs.replace(policy, members=tuple(member.rank for _, member in members))
            members = with_free_places(members, self.options.num_workers)
        job = self._start_job(members, policy, now, reproducible=self._startup.reproducible)
        _log.info("all nodes are here: %s", list_some(map(job.members.describe, job.members.present)))
        for rank in job.members.present:
            job.welcome(rank, now)
        if self.on_begun is not None:
            self._outbox.add(Call(function=self.on_begun))

    def _resume(self, replayed: ReplayedJob, now: float) -> None:
        """Go on with a job that another process served."""
        policy = replayed.policies[replayed.version]
        peers = [
            self._registry.register(member.incarnation, self.options.job, member.user)
            if member.port
            else SCHEDULER
            for member in replayed.members
        ]
        job = self._start_job(list(zip(peers, replayed.members, strict=True)), policy, now, replayed)
        _log.warning(
            "job %r goes on: %d nodes, %d keys, policy version %d",
            self.options.job,
            len(peers),
            len(job.keys),
            policy.version,
        )

    def _start_job(
        self,
        members: Sequence[tuple[Peer, m.Member]],
        policy: Policy,
        now: float,
        replayed: ReplayedJob | None = None,
        *,
        reproducible: bool = False,
    ) -> Job:
        job_class = Job if self.options.elastic is None else JobWithViews
        self.job = job = job_class(
            members,
            policy,
            self.options,
            self._outbox,
            now,
            assumed=self._assumed,
            planned=self._planned,
            replayed=replayed,
            reproducible=reproducible or self.options.reproducible,
        )
        self.phase = JobPhase.FINISHED if job.all_finished else JobPhase.RUNNING
        for rank, peer in zip(job.members.present, job.members.peers, strict=True):
            self._give_rank(rank, peer)
        return job

    def _give_rank(self, rank: int, peer: Peer) -> None:
        self._ranks[peer] = rank
        self._registry.pin(peer)

    # ------------------------------------------------------------------------------------- while the job runs

    def _receive_from_member(self, job: Job, rank: int, message: m.Message, now: float) -> None:
        leaves = isinstance(message, (m.Leave, m.Failed))
        if leaves and not isinstance(job, JobWithViews):  # before the others are told, so that it is not
            self._rank_left(rank, now)
        gone = job.receive(rank, message, now)
        goes_on = gone is not None and self._go_on_without(job, gone, now)
        if leaves and not goes_on:
            self._rank_left(rank, now)
        if job.finished and self.phase is JobPhase.RUNNING and job.all_finished:
            self.phase = JobPhase.FINISHED
            _log.info("all nodes have finished")
            self._outbox.send(job.members.peers, m.AllFinished())  # so that they leave

    def _go_on_without(self, job: Job, gone: m.PeerGone, now: float) -> bool:
        """Go on without a node that is lost or has failed, or end the job. Returns whether it goes on."""
        end: m.PeerGone | None = gone
        if gone.rank >= 0 and gone.kind in ("lost", "failed") and isinstance(job, JobWithViews):
            peer = job.members.peer_of(gone.rank)
            end = job.go_on_without(gone.rank, gone.reason, now)
            if end is None and peer is not None:
                del self._ranks[peer]
                reason = self._departure_of(self._registry.incarnation_of(peer))
                if reason is not None:  # if it was only stopped, it hears of that when it goes on
                    self._outbox.send([peer], m.PeerGone(rank=-1, kind="removed", reason=reason))
                self._outbox.add(Disconnect(peer=peer))
        if end is not None:
            self._fail(end, now)
        return end is None

    def _departure_of(self, incarnation: int) -> str | None:
        """Return why a process is in the job no more; None: it may be in it."""
        return self.job.departed.get(incarnation) if isinstance(self.job, JobWithViews) else None

    def _place_latecomers(self, job: Job, now: float) -> None:
        """Let nodes in that have come after the job began, as far as there are places."""
        if self._latecomers is None or not isinstance(job, JobWithViews):
            return
        for placed in self._latecomers.place(job.members, now):
            if isinstance(placed, Refusal):
                self._startup.refuse(placed.peer, placed.reason)
                continue
            peer, rank = placed.applicant.peer, placed.rank
            if placed.replaces:
                reason = f"another process has come as the node at {placed.applicant}"
                if not self._go_on_without(job, m.PeerGone(rank=rank, kind="lost", reason=reason), now):
                    return
            self._give_rank(rank, peer)
            job.admit_later(rank, peer, placed.applicant.member(rank), now)

    def _handle_end(self, ended: RankEnded, now: float) -> None:
        """Go on without a rank whose process has ended, or end the job."""
        job = self.job
        if job is None:
            self._ranks_to_come = self._launched is not None and self._launched.some_run
            peer = self._startup.asking_for(ended.rank)
            if peer is not None:
                self._process_left(peer, f"its process has ended: {ended.text}", now)
            self._check_launched(now)
        elif ended.rank in job.members.present and ended.rank not in self._left:
            gone = job.lost(ended.rank, f"its process has ended: {ended.text}", now)
            if self.phase is not JobPhase.RUNNING or not self._go_on_without(job, gone, now):
                self._rank_left(ended.rank, now)

    # ------------------------------------------------------------------------------------------- its policies

    @property
    def policy(self) -> Policy:
        """The policy of all rounds that no node has been granted yet."""
        return self._first_policy if self.job is None else self.job.policy

    def install(self, policy: Policy, now: float) -> None:
        """Let a new policy apply, in each key, from the first round that no node has been granted.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        job = self.job
        if job is None:
            check_policy(policy, nodes=self.options.num_workers, after=self._first_policy.version)
            self._first_policy = policy
        else:
            starts = job.install(policy)
            if job.awareness is not None:
                job.awareness.adaptation.rounds.begin(job.policy, max(starts.values(), default=0))
            if job.reproducible:
                _log.warning(
                    "policy version %d (%s): sums are rounded otherwise from here on than in a run without "
                    "this (NETSTORM_REPRODUCIBLE)",
                    policy.version,
                    policy.reason,
                )
        self._history.installed(policy, now)
        self.counters.add("policies")

    def set_link_share(self, share: float, why: str) -> None:
        """Plan with another part of each link's rate from now on; `why`: for a person."""
        self._link_share = share
        if self.awareness is not None:
            self.awareness.set_link_share(share, why)

    def _check_policy(self, job: Job, now: float) -> None:
        """Ask for a new policy if one is wanted: forming takes long, so another process does it. Install one
        that needs no forming. Failed links come first.
        """
        on_form, awareness, policy = self.on_form, job.awareness, job.policy
        if on_form is None:
            return
        wanted: Policy | FormationRequest | None = None
        if job.link_failures.due() <= now:
            estimate = None if awareness is None else awareness.collector.estimate(now)
            restoring = awareness is None or not awareness.active
            workload = workload_of(job.keys)
            wanted = job.link_failures.check(policy, workload, estimate, restoring=restoring)
        elif awareness is not None:
            wanted = awareness.poll(policy, job.keys, now)
        if isinstance(wanted, Policy):
            self.install(wanted, now)
        elif wanted is not None:
            request = wanted
            self._outbox.add(Call(function=lambda: on_form(request)))

    def policy_formed(self, answer: FormationResult, now: float) -> None:
        """Receive the result of a formation that `on_form` was called for. Install it if it is worth it."""
        job = self.job
        if job is None or self.phase is not JobPhase.RUNNING:
            return
        in_force, formed = job.policy, None
        if answer.number < 0:  # `LinkFailures` numbers its formations below 0
            formed = job.link_failures.formed(answer, in_force)
        elif job.awareness is not None:
            formed = job.awareness.decide(answer, in_force)
            if formed is not None and not job.link_failures.usable(formed):
                return
        if formed is not None:
            self.install(formed, now)

    # ------------------------------------------------------------------------------------------ how it ends

    def _fail(self, failure: m.PeerGone, now: float) -> None:
        """End the job, and tell every node that has not left why. Only the first failure counts."""
        if self.phase not in (JobPhase.GATHERING, JobPhase.RUNNING):
            return
        waiting = self._startup.peers() if self.job is None else self.job.members.peers_but(self._left)
        self.phase = JobPhase.FAILED
        self._failure = failure
        self._outbox.record(JobEnded(text=failure.reason))
        self._end_at = now + _LEAVE_TIMEOUT_S if waiting else now
        # Without nodes, the last line that the process prints is enough.
        _log.log(logging.ERROR if waiting else logging.DEBUG, "the job ends: %s", failure.reason)
        self._outbox.send(waiting, failure)
        if self.job is not None:
            for rank in list(self.job.members.liveness.ended.certain):  # they hear nothing, and never leave
                self._rank_left(rank, now)

    def _receive_at_the_end(self, peer: Peer, rank: int, message: m.Message, now: float) -> None:
        """Handle a member's message after the job has ended: it leaves, or has not heard how."""
        if isinstance(message, (m.Leave, m.Failed)):
            self._rank_left(rank, now)
        elif isinstance(message, m.Resume):
            proof = self._proof(peer, message)
            if self.phase is JobPhase.FINISHED:
                self._outbox.send([peer], m.Resumed(proof=proof))
                self._outbox.send([peer], m.AllFinished())
            elif self._failure is not None:
                self._outbox.send([peer], msgspec.structs.replace(self._failure, proof=proof))

    def _process_left(self, peer: Peer, reason: str, now: float) -> None:
        """A process without a rank has left, or its session is lost."""
        self._startup.remove(peer, reason, quietly=self.phase is not JobPhase.GATHERING)
        if self.phase is JobPhase.FAILED and not self._startup.peers():
            self._end_at = now

    def _rank_left(self, rank: int, now: float) -> None:
        """A member has left, or its session is lost."""
        job = self.job
        if job is None or rank in self._left:
            return
        self._left.add(rank)
        job.members.liveness.stop_watching(rank)
        peer = job.members.peer_of(rank)
        if peer is not None:
            self._outbox.add(Disconnect(peer=peer))
        if self._left.issuperset(job.members.present):
            self._end_at = now

    def _wait_until(self) -> float:
        waits_for_ranks = self._ranks_to_come and self.job is None and not self._stopped
        return math.inf if waits_for_ranks else self._end_at

    def _end_if_due(self, now: float) -> None:
        """Silent nodes of an ended job count as left."""
        job, on_over = self.job, self.on_over
        if job is not None and self.phase in (JobPhase.FINISHED, JobPhase.FAILED):
            for rank in job.members.liveness.silent(now):
                self._rank_left(rank, now)
        if now < self._wait_until() or self.phase is JobPhase.OVER:
            return
        self.phase = JobPhase.OVER
        if self._nobody_joined:
            outcome = Outcome.nobody_joined(self.options.job)
        else:
            nodes = self.options.num_workers if job is None else len(job.members.present)
            keys = 0 if job is None else len(job.keys)
            outcome = Outcome.of(self.options.job, self._failure, nodes=nodes, keys=keys)
        self.outcome = outcome
        self._outbox.record(JobEnded(text=outcome.text))
        if on_over is not None:
            self._outbox.add(Call(function=lambda: on_over(outcome)))

    # --------------------------------------------------------------------------------- what observers read

    @property
    def members(self) -> tuple[m.Member, ...]:
        """The nodes, by rank; empty until all have joined."""
        return () if self.job is None else self.job.members.all

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The numbers of the nodes' processes, by rank; empty until all have joined."""
        return () if self.job is None else self.job.members.peers

    @property
    def awareness(self) -> Awareness | None:
        """What is measured, and what follows from it; None: awareness is off, or nodes are missing."""
        return None if self.job is None else self.job.awareness

    @property
    def failed_links(self) -> tuple[FailedLinkRecord, ...]:
        """The links that have failed and are not restored."""
        return () if self.job is None else tuple(self.job.link_failures.failures.values())

    def status_text(self, now: float = -math.inf) -> str:
        """Return how the job is doing, in one line; without the time, not who is busy."""
        return self._startup.status_text() if self.job is None else self.job.status_text(now)

    def snapshots(self, now: float) -> tuple[JobSnapshot, ...]:
        """Return the snapshot of the one job."""
        return (self.snapshot(now),)

    def snapshot(self, now: float) -> JobSnapshot:
        """Return everything that people and programs may want to know of the job. Cheap."""
        options, job, awareness = self.options, self.job, self.awareness
        self._history.installed(self.policy, now)  # a view has come since the last tick
        return JobSnapshot(
            now=now,
            started_at=self._started_at,
            job=options.job,
            release=options.release,
            num_workers=options.num_workers,
            phase=self.phase,
            text=self.status_text(now) if self._failure is None else self._failure.reason,
            nodes=self._startup.snapshots() if job is None else self._node_snapshots(job, now),
            policy=self.policy,
            policy_since=self._history.since,
            former=self._history.former(),
            keys=0 if job is None else len(job.keys),
            key_bytes=0 if job is None else job.keys.total_bytes,
            first_keys=() if job is None else job.keys.first(_MOST_KEYS_SHOWN),
            considered="" if awareness is None else awareness.adaptation.reason,
            links=tuple if job is None else _link_estimates(job, now),
            counters=self.counters.snapshot(),
            failed_links=self.failed_links,
            link_share=self._link_share,
            routed=frozenset() if awareness is None else awareness.collector.routed,
            contended=awareness is not None and awareness.collector.contended,
            view=None if job is None else _view(job, options),
            planned=None if self._planned is None else self._planned.network,
        )

    def _node_snapshots(self, job: Job, now: float) -> tuple[NodeSnapshot, ...]:
        caps = {} if job.awareness is None else job.awareness.collector.access_caps(now)
        described = () if self._planned is None else self._planned.network.nodes
        nodes = []
        for rank, member in enumerate(job.members.all):
            if not member.host:
                continue  # a place that no node has had
            heard = job.members.liveness.last_sign(rank)
            egress, ingress = caps.get(rank, (0.0, 0.0))
            nodes.append(
                NodeSnapshot(
                    member=member,
                    joined=True,
                    heard_at=heard.at,
                    busy_s=job.members.liveness.busy_for(rank, now),
                    last_event=heard.event,
                    waiting_for=heard.waiting_for,
                    finished=rank in job.finished,
                    left=rank in self._left or not member.port,
                    silent=rank in job.silent,
                    reports=job.announcements.reports(rank),
                    egress=egress,
                    ingress=ingress,
                    described=described[rank] if rank < len(described) else None,
                )
            )
        return tuple(nodes)


def abort_reason(error: Exception) -> str:
    """Return what nodes are told when the scheduler's process cannot go on because of `error`."""
    text = str(error) if isinstance(error, NetStormError) else f"its I/O thread has died: {error!r}"
    return f"the scheduler has stopped: {text}"


def _never_joined(ended: RankEnded) -> str:
    """Return why a job cannot begin without a rank."""
    text = f"rank {ended.rank} ({ended.host}) ended before all nodes had joined: {ended.text}"
    if ended.code == 0:
        text += "; the others wait for it: its script must make a NetStorm group or store, too"
    return text


def _view(job: Job, options: SchedulerOptions) -> ViewSnapshot | None:
    """Return the view of a job that nodes may leave and join."""
    if not isinstance(job, JobWithViews) or options.elastic is None:
        return None
    fewest, most = options.elastic
    return ViewSnapshot(
        number=job.view,
        fewest=fewest,
        most=most,
        silent=job.silent,
        waiting=job.view_waiting_text(),
        changes=tuple(job.changes),
    )


def _link_estimates(job: Job, now: float) -> Callable[[], Sequence[LinkEstimate]]:
    """Return a function that makes the estimates of all links as of now. Any thread may call it."""
    if job.awareness is None or len(job.members) > _MOST_ESTIMATED:
        return job.announcements.links(now)
    estimates = job.awareness.collector.link_estimates(now)
    return lambda: estimates
