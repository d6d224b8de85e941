"""The scheduler of one job as a pure state machine: events and the time in, instructions out.

Processes are numbered in the order in which they come, by incarnation (`ProcessRegistry`). Until all nodes
have joined they wait (`Startup`); then they get ranks, and `Job` serves them. `JobLifecycle` says how a job
ends, `JobPolicies` under which policy it runs, and `JobView` what observers see of it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, check_authority, not_authorised
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer
from netstorm.protocol.messages import Member
from netstorm.pslite.machine import Admission, Admit, Call, Instruction, Refuse, refuse_other_key
from netstorm.pslite.proofs import SchedulerSecret, proof_for_resume
from netstorm.scheduler.awareness import FailedLinkRecord, LinkEstimate
from netstorm.scheduler.job import FirstPolicy, Job, JobLifecycle, JobPolicies, abort_reason
from netstorm.scheduler.launched_ranks import LaunchedRanks, RankEnded
from netstorm.scheduler.members import format_address, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import Awareness, FormationRequest, FormationResult, InitialAssumptions
from netstorm.scheduler.rendezvous import Applicant, ProcessRegistry, Refusal, Startup, job_full_reason
from netstorm.scheduler.replay_log import LoggedOutbox, Record, ReplayedJob
from netstorm.scheduler.snapshot import JobPhase, JobSnapshot, NodeSnapshot, Outcome, ViewSnapshot
from netstorm.scheduler.views import Latecomers, with_free_places
from netstorm.topology.policy import Policy

__all__ = ["SchedulerMachine"]


_log = logging.getLogger(__name__)


class SchedulerMachine:
    """The scheduler of one job. Implements `pslite.machine.Machine`.

    Attributes:
        options: of the job.
        counters: of the job.
        policies: the policy in force, and what replaces it.
        view: what observers read.
        on_over: called with the outcome when the job is over.
        on_form: called with each policy to form; the result goes to `policy_formed`. None: none is formed.
        on_all_joined: called once all nodes have joined if the first policy is not known; it goes to
            `set_first_policy`.
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
        self.on_over: Callable[[Outcome], None] | None = None
        self.on_form: Callable[[FormationRequest], None] | None = None
        self.on_all_joined: Callable[[], None] | None = None
        self.on_begun: Callable[[], None] | None = None
        self.policies: Final = JobPolicies(
            policy,
            nodes=options.num_workers,
            assumed=assumed,
            planned=planned,
            counters=self.counters,
            now=now,
        )
        self._outbox: Final = LoggedOutbox(write)
        self._registry: Final = registry or ProcessRegistry()
        self._startup: Final = Startup(options, self._outbox, self.counters, now)
        self._lifecycle: Final = JobLifecycle(options, self._outbox, self._startup)
        self.view: Final = JobView(options, self.counters, self._lifecycle, self.policies, now)
        self._changes: Final = MemberChanges(options, self._lifecycle, self._startup, self._registry)
        self._launched: Final = LaunchedRanks(options.begin_with or options.num_workers)
        self._last_tick = now
        if replayed is not None:
            self._resume(replayed, now)

    # ------------------------------------------------------------------------------------ what drivers need

    @property
    def phase(self) -> JobPhase:
        """Where the job is in its life."""
        return self._lifecycle.phase

    @property
    def outcome(self) -> Outcome | None:
        """How the job went; None until it is over."""
        return self._lifecycle.outcome

    @property
    def abandoned(self) -> bool:
        """Whether every process left before the job began."""
        return self._lifecycle.abandoned

    def policy_formed(self, answer: FormationResult, now: float) -> None:
        """Receive the result of a formation that `on_form` was called for."""
        if self.phase is JobPhase.RUNNING:
            self.policies.formed(answer, now)

    def set_first_policy(self, first: FirstPolicy | str, now: float) -> None:
        """Receive the policy that the job begins under, which `on_all_joined` was called for; or why none can
        be formed, which ends the job.

        Raises:
            UsageError: the policy is for another number of nodes than the job has.
        """
        if isinstance(first, str):
            self._lifecycle.fail(m.PeerGone(rank=-1, kind="refused", reason=first), now)
            return
        self.policies.set_first(first, now)
        if self.phase is JobPhase.GATHERING and self._startup.complete():  # no node has left since
            self._begin(now)

    def stop(self, reason: str, now: float) -> None:
        """End the job because this process must end. A finished job just waits for its nodes no longer."""
        self._lifecycle.stop(reason, now)

    def abort(self, error: Exception, now: float) -> None:
        """End the job because this process cannot go on."""
        self.stop(abort_reason(error), now)

    def snapshots(self, now: float) -> tuple[JobSnapshot, ...]:
        """Return the snapshot of the one job."""
        return (self.view.snapshot(now),)

    # ------------------------------------------------------------------------------ what the endpoint needs

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Number each process. Who may join is decided when it asks to, so that it is told why not."""
        if hello.receiver != SCHEDULER:
            return Refuse(f"this is the scheduler of job {self.options.job!r}, not rank {hello.receiver}")
        departed = self._lifecycle.departure_of(hello.incarnation)
        if departed is not None and not user:  # with a key it is told what it believes, as answer to `Resume`
            return Refuse(departed)
        if self._registry.is_taken(hello.incarnation, user):
            return refuse_other_key("the process of this number", user, self.view.members)
        peer = self._registry.find(hello.incarnation)
        if peer is None and departed is None and hello.sender >= 0:
            return Refuse(
                f"the scheduler of job {self.options.job!r} does not know this rank {hello.sender}: it was "
                "restarted, or another scheduler has taken the address of the one before"
            )
        return Admit(self._registry.register(hello.incarnation, hello.job, user))

    def has_departed(self, incarnation: int) -> bool:
        """Return whether a process is in the job no more, which goes on without it."""
        return self._lifecycle.departure_of(incarnation) is not None

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message."""
        job, rank = self._lifecycle.job, self._changes.ranks.get(peer)
        if isinstance(message, m.Join):
            self._join(peer, message, now)
        elif rank is None or job is None:
            self._receive_before_join(peer, message, now)
        else:
            job.members.liveness.heard(rank, now)
            if self.phase is JobPhase.RUNNING:
                check_authority(message, Role.MEMBER, Role.SCHEDULER, f"rank {rank}")
                self._receive_from_member(job, rank, message, now)
            elif isinstance(message, (m.Leave, m.Failed)):
                self._lifecycle.rank_left(rank, now)
            elif isinstance(message, m.Resume):
                proof, failure = self._proof(peer, message), self._lifecycle.failure
                if self.phase is JobPhase.FINISHED:
                    self._outbox.send([peer], m.Resumed(proof=proof))
                    self._outbox.send([peer], m.AllFinished())
                elif failure is not None:
                    self._outbox.send([peer], msgspec.structs.replace(failure, proof=proof))

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        job, rank = self._lifecycle.job, self._changes.ranks.get(peer)
        if rank is None or job is None:
            self._lifecycle.process_left(peer, reason, now)
        else:
            if self.phase is JobPhase.RUNNING and self._changes.go_on_without(
                job, job.lost(rank, reason, now), now
            ):
                return
            self._lifecycle.rank_left(rank, now)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """Learn that a node's connection is gone. See `ConnectionWatcher`."""
        job, rank = self._lifecycle.job, self._changes.ranks.get(peer)
        if job is None or rank is None:
            if self._startup.connection_gone(peer, reason, refused=refused):
                self._lifecycle.process_left(peer, f"its process has ended: {reason}", now)
        elif self.phase is JobPhase.RUNNING:
            gone = job.refused(rank, reason, now) if refused else job.disconnected(rank, now)
            if gone is not None:
                self._changes.go_on_without(job, gone, now)
        elif refused:
            self._lifecycle.rank_left(rank, now)
        else:
            job.members.inquire([rank])

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`. Nobody knows more of a node than its own connection says."""
        return True

    def peer_busy(self, peer: Peer, seconds: float, now: float) -> None:
        """Learn that a node is busy. See `ConnectionWatcher`."""
        job, rank = self._lifecycle.job, self._changes.ranks.get(peer)
        if job is None or rank is None:
            self._startup.busy(peer, seconds, now)
        else:
            job.members.liveness.busy(rank, now)

    def rank_ended(self, ended: RankEnded, now: float) -> None:
        """Learn from the launcher how the process has ended that it had started for a rank."""
        self._launched.record(ended, now, in_the_job=self._lifecycle.job is not None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for ended in self._launched.due(now):
            self._handle_end(ended, now)
        job = self._lifecycle.job
        self._last_tick = now
        if self.phase is JobPhase.GATHERING:
            self._check_startup(now)
        elif job is not None and self.phase is JobPhase.RUNNING:
            gone = job.tick(now)
            if gone is not None:
                self._changes.go_on_without(job, gone, now)
            else:
                self._check_policy(now)
            self._changes.place_latecomers(job, now)
        outcome, on_over = self._lifecycle.end_if_due(now), self.on_over
        if outcome is not None and on_over is not None:
            self._outbox.add(Call(function=lambda: on_over(outcome)))

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.phase is JobPhase.OVER:
            return math.inf
        due = min(self._last_tick + self.options.heartbeat_interval_s, self._lifecycle.end_at)
        due = min(due, self._launched.next_due())
        if self._lifecycle.job is None or self.phase is not JobPhase.RUNNING:
            return due
        return min(due, self._lifecycle.job.next_tick(), self.policies.due())

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        return self._outbox.take()

    # ---------------------------------------------------------------------------- until all nodes have joined

    def _join(self, peer: Peer, join: m.Join, now: float) -> None:
        job, own = self._lifecycle.job, self.options.job
        address = format_address(join.host, join.port, join.site)
        asked = self._registry.job_of(peer)
        if asked != own:
            reason = (
                f"the node at {address} is of job {asked!r}, the scheduler of job {own!r}: give both the "
                "same NETSTORM_JOB, or the node another DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            )
            self._startup.refuse(peer, reason)
        elif self._lifecycle.failure is not None:
            self._startup.refuse(peer, f"the job has already ended: {self._lifecycle.failure.reason}")
        elif job is None:
            self._launched.has_come(join.asked_rank)
            self._startup.join(self._changes.applicant(peer, join, now), now)
            self._check_gone(now)
            if self._startup.complete() and self.phase is JobPhase.GATHERING:
                self._all_joined(now)
        elif peer not in self._changes.ranks and job.views is not None and self.phase is JobPhase.RUNNING:
            self._changes.join(job, peer, join, now)
        elif peer in self._changes.ranks:  # its session broke before it could read that it had joined
            job.welcome(self._changes.ranks[peer], now)
        else:
            self._startup.refuse(peer, job_full_reason(own, job.members.all, address, join.asked_rank))

    def _receive_before_join(self, peer: Peer, message: m.Message, now: float) -> None:
        """Handle a message of a process that has no rank, or none any more: it was stopped for too long."""
        departed = self._lifecycle.departure_of(self._registry.incarnation_of(peer))
        if departed is not None and not isinstance(message, (m.Leave, m.Failed)):
            proof = self._proof(peer, message)
            self._outbox.send([peer], m.PeerGone(rank=-1, kind="removed", reason=departed, proof=proof))
            return
        match message:
            case m.Heartbeat():
                self._startup.heard(peer, now)
                self._changes.latecomers.heard(peer, now)
            case m.Leave() | m.Failed() if peer in self._changes.latecomers:
                self._changes.latecomers.remove(peer)
            case m.Leave():
                self._lifecycle.process_left(peer, "it left", now)
            case m.Failed():
                self._lifecycle.process_left(peer, f"it failed: {message.reason}", now)
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
                self._lifecycle.fail(late, now)

    def _handle_end(self, ended: RankEnded, now: float) -> None:
        """Go on without a rank whose process has ended, or end the job."""
        job = self._lifecycle.job
        if job is None:
            self._lifecycle.ranks_to_come = self._launched.some_run
            peer = self._startup.asking_for(ended.rank)
            if peer is not None:
                self._lifecycle.process_left(peer, f"its process has ended: {ended.text}", now)
            self._check_gone(now)
        elif ended.rank in job.members.present and ended.rank not in self._lifecycle.left:
            gone = job.lost(ended.rank, f"its process has ended: {ended.text}", now)
            if self.phase is not JobPhase.RUNNING or not self._changes.go_on_without(job, gone, now):
                self._lifecycle.rank_left(ended.rank, now)

    def _check_gone(self, now: float) -> None:
        """End a job that has not begun if too many of its ranks have ended; or expect fewer."""
        gone = self._launched.gone
        if not gone or self.phase is not JobPhase.GATHERING:
            return
        nodes, elastic = self.options.begin_with or self.options.num_workers, self.options.elastic
        if elastic is not None and nodes - len(gone) >= elastic[0]:
            self._startup.begin_with(nodes - len(gone))
            return
        failed = [ended for ended in gone if ended.code] or (list(gone) if self._startup.peers() else [])
        if failed:
            first = failed[0]
            self._lifecycle.fail(m.PeerGone(rank=first.rank, kind="lost", reason=_never_joined(first)), now)
        elif not self._launched.some_run:
            self._lifecycle.nobody_joined(now)

    def _all_joined(self, now: float) -> None:
        if self.policies.ready:
            self._begin(now)
        elif not self._startup.forming_policy and self.on_all_joined is not None:
            self._startup.forming_policy = True
            self._outbox.add(Call(function=self.on_all_joined))

    def _begin(self, now: float) -> None:
        """Give ranks, and begin the job."""
        members, policy = list(self._startup.assign_ranks()), self.policies.in_force
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
            len(job.rounds.keys),
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
        job = Job(
            members,
            policy,
            self.options,
            self._outbox,
            now,
            assumed=self.policies.assumed,
            planned=self.policies.planned,
            replayed=replayed,
            reproducible=reproducible or self.options.reproducible,
        )
        self._lifecycle.begin(job)
        self.policies.begin(job)
        self._changes.begin(job)
        return job

    # ------------------------------------------------------------------------------------- while the job runs

    def _receive_from_member(self, job: Job, rank: int, message: m.Message, now: float) -> None:
        leaves = isinstance(message, (m.Leave, m.Failed))
        if leaves and job.views is None:  # before the others are told, so that it is not
            self._lifecycle.rank_left(rank, now)
        gone = job.receive(rank, message, now)
        goes_on = gone is not None and self._changes.go_on_without(job, gone, now)
        if leaves and not goes_on:
            self._lifecycle.rank_left(rank, now)
        if self.phase is JobPhase.RUNNING and job.all_finished:
            self._lifecycle.finish(job.members.peers)

    def _check_policy(self, now: float) -> None:
        """Ask for a new policy if one is wanted. Forming takes long, so another process does it."""
        on_form = self.on_form
        if on_form is None:
            return
        request = self.policies.check(now)
        if request is not None:
            self._outbox.add(Call(function=lambda: on_form(request)))


def _never_joined(ended: RankEnded) -> str:
    """Return why a job cannot begin without a rank."""
    text = f"rank {ended.rank} ({ended.host}) ended before all nodes had joined: {ended.text}"
    if ended.code == 0:
        text += "; the others wait for it: its script must make a NetStorm group or store, too"
    return text


# What observers read of one job: members, status text, snapshots. Nothing here changes the job.

_MOST_ESTIMATED: Final = 24
"""Nodes of a job whose link estimates are computed for a snapshot: that takes 14 ms of the scheduler's thread
with 24 nodes, 0.5 s with 128. Of larger jobs people see what nodes reported."""


class JobView:
    """Reads one job, in every phase."""

    def __init__(
        self,
        options: SchedulerOptions,
        counters: Counters,
        lifecycle: JobLifecycle,
        policies: JobPolicies,
        started_at: float,
    ) -> None:
        self._options: Final = options
        self._counters: Final = counters
        self._lifecycle: Final = lifecycle
        self._policies: Final = policies
        self._started_at: Final = started_at

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes, by rank; empty until all have joined."""
        job = self._lifecycle.job
        return () if job is None else job.members.all

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The numbers of the nodes' processes, by rank; empty until all have joined."""
        job = self._lifecycle.job
        return () if job is None else job.members.peers

    @property
    def awareness(self) -> Awareness | None:
        """What is measured, and what follows from it; None: awareness is off, or nodes are missing."""
        job = self._lifecycle.job
        return None if job is None else job.awareness

    @property
    def failed_links(self) -> tuple[FailedLinkRecord, ...]:
        """The links that have failed and are not restored."""
        job = self._lifecycle.job
        return () if job is None else tuple(job.link_failures.failures.values())

    def status_text(self, now: float = -math.inf) -> str:
        """Return how the job is doing, in one line; without the time, not who is busy."""
        lifecycle = self._lifecycle
        return lifecycle.startup.status_text() if lifecycle.job is None else lifecycle.job.status_text(now)

    def snapshot(self, now: float) -> JobSnapshot:
        """Return everything that people and programs may want to know of the job. Cheap."""
        options, lifecycle, policies = self._options, self._lifecycle, self._policies
        job, failure, awareness = lifecycle.job, lifecycle.failure, self.awareness
        return JobSnapshot(
            now=now,
            started_at=self._started_at,
            job=options.job,
            release=options.release,
            num_workers=options.num_workers,
            phase=lifecycle.phase,
            text=self.status_text(now) if failure is None else failure.reason,
            nodes=lifecycle.startup.snapshots() if job is None else self._node_snapshots(job, now),
            policy=policies.in_force,
            policy_since=policies.history.since,
            former=policies.history.former(),
            keys=0 if job is None else len(job.rounds.keys),
            key_bytes=0 if job is None else job.rounds.keys.total_bytes,
            considered="" if awareness is None else awareness.adaptation.reason,
            links=tuple if job is None else _link_estimates(job, now),
            counters=self._counters.snapshot(),
            failed_links=self.failed_links,
            link_share=policies.link_share,
            routed=frozenset() if awareness is None else awareness.collector.routed,
            contended=awareness is not None and awareness.collector.contended,
            view=None if job is None else _view(job, options),
        )

    def _node_snapshots(self, job: Job, now: float) -> tuple[NodeSnapshot, ...]:
        caps = {} if job.awareness is None else job.awareness.collector.access_caps(now)
        found = []
        for rank, member in enumerate(job.members.all):
            if not member.host:
                continue  # a place that no node has had
            heard = job.members.liveness.last_sign(rank)
            egress, ingress = caps.get(rank, (0.0, 0.0))
            found.append(
                NodeSnapshot(
                    member=member,
                    joined=True,
                    heard_at=heard.at,
                    busy_s=job.members.liveness.busy_for(rank, now),
                    last_event=heard.event,
                    waiting_for=heard.waiting_for,
                    finished=rank in job.finished,
                    left=rank in self._lifecycle.left or not member.port,
                    silent=job.views is not None and rank in job.views.silent,
                    reports=job.announcements.reports(rank),
                    egress=egress,
                    ingress=ingress,
                )
            )
        return tuple(found)


def _view(job: Job, options: SchedulerOptions) -> ViewSnapshot | None:
    """Return the view of a job that nodes may leave and join."""
    if job.views is None or options.elastic is None:
        return None
    fewest, most = options.elastic
    return ViewSnapshot(
        number=job.views.number,
        fewest=fewest,
        most=most,
        silent=job.views.silent,
        waiting=job.views.waiting_text(),
        changes=tuple(job.views.events),
    )


def _link_estimates(job: Job, now: float) -> Callable[[], Sequence[LinkEstimate]]:
    """Return a function that makes the estimates of all links as of now. Any thread may call it."""
    if job.awareness is None or len(job.members) > _MOST_ESTIMATED:
        return job.announcements.links(now)
    estimates = job.awareness.collector.link_estimates(now)
    return lambda: estimates


# Nodes that leave a running job, and those that come later: who is who, and whether the job goes on.


class MemberChanges:
    """The changes of one job's members.

    Attributes:
        ranks: of the processes that are in the job.
        latecomers: nodes that have come after the job began, and wait for a place.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        lifecycle: JobLifecycle,
        startup: Startup,
        registry: ProcessRegistry,
    ) -> None:
        """Begin without members.

        Args:
            options: of the job.
            lifecycle: ends the job if it cannot go on.
            startup: refuses nodes.
            registry: the numbers of processes.
        """
        self.ranks: Final[dict[Peer, int]] = {}
        self.latecomers: Final = Latecomers(options)
        self._lifecycle: Final = lifecycle
        self._startup: Final = startup
        self._registry: Final = registry

    def begin(self, job: Job) -> None:
        """Record who is who when a job begins, or goes on in this process."""
        for rank, peer in zip(job.members.present, job.members.peers, strict=True):
            self._record(rank, peer)

    def applicant(self, peer: Peer, join: m.Join, now: float) -> Applicant:
        """Return a process that asks to join."""
        return Applicant(
            peer=peer,
            incarnation=self._registry.incarnation_of(peer),
            join=join,
            heard_at=now,
            user=self._registry.user_of(peer),
        )

    def join(self, job: Job, peer: Peer, message: m.Join, now: float) -> None:
        """Handle that a process asks to join a job that has begun, and that nodes may join."""
        refusal = self.latecomers.add(self.applicant(peer, message, now), now)
        if refusal is not None:
            self._startup.refuse(peer, refusal.reason)
        self.place_latecomers(job, now)

    def place_latecomers(self, job: Job, now: float) -> None:
        """Let nodes in that have come after the job began, as far as there are places."""
        for found in self.latecomers.place(job.members, now):
            if isinstance(found, Refusal):
                self._startup.refuse(found.peer, found.reason)
                continue
            peer, rank = found.applicant.peer, found.rank
            if found.replaces:
                reason = f"another process has come as the node at {found.applicant}"
                if not self.go_on_without(job, m.PeerGone(rank=rank, kind="lost", reason=reason), now):
                    return
            self._record(rank, peer)
            job.admit_later(rank, peer, found.applicant.member(rank), now)

    def go_on_without(self, job: Job, gone: m.PeerGone, now: float) -> bool:
        """Go on without a node that is lost or has failed, or end the job. Returns whether it goes on."""
        end: m.PeerGone | None = gone
        if gone.rank >= 0 and gone.kind in ("lost", "failed") and job.views is not None:
            peer = job.members.peer_of(gone.rank)
            end = job.go_on_without(gone.rank, gone.reason, now)
            if end is None and peer is not None:
                del self.ranks[peer]
                self._lifecycle.departed(peer, self._registry.incarnation_of(peer))
        if end is not None:
            self._lifecycle.fail(end, now)
        return end is None

    def _record(self, rank: int, peer: Peer) -> None:
        self.ranks[peer] = rank
        self._registry.pin(peer)
