"""A job whose nodes have all joined: what its members send to the scheduler, and what it answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import ChunkSizes
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Disconnect
from netstorm.pslite.proofs import proof_for_resume
from netstorm.scheduler.failures import LinkFailures, LinkSuspicions
from netstorm.scheduler.job_rounds import JobRounds
from netstorm.scheduler.members import REMIND_EVERY_S, JobBarriers, JobLocalSteps, Members, list_some
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
from netstorm.scheduler.rendezvous import Startup
from netstorm.scheduler.replay_log import Began, JobEnded, LoggedOutbox, RankFinished, ReplayedJob
from netstorm.scheduler.rounds import ReplicaCheck
from netstorm.scheduler.snapshot import Announcements, JobPhase, Outcome, PolicyHistory
from netstorm.scheduler.views import JobViews
from netstorm.topology.policy import Policy, owner_weights

__all__ = ["FirstPolicy", "Job", "JobLifecycle", "JobPolicies", "abort_reason"]


_log = logging.getLogger(__name__)

_MOST_CHARACTERS: Final = 2000
"""Of what a node says that it waits for."""

_STATUS_EVERY_S: Final = 30.0
"""How often the log says how the job is doing."""


class Job:
    """The members and all that they share. A method that finds that the job cannot go on returns the reason.

    Attributes:
        members: its nodes.
        finished: by rank, the last round that it pushed of each key. Only ranks that will push no more.
        rounds: the keys, and under which policy each of their rounds runs.
        awareness: what is measured, and what follows from it; None: awareness is off.
        announcements: what nodes report of themselves and of their links, for people.
        link_failures: links that have failed, and policies without them.
        views: who is in the job; None: the loss of a node ends it.
        reproducible: results are the same in each run.
    """

    def __init__(
        self,
        members: Sequence[tuple[Peer, m.Member]],
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
        """Begin, or go on with a job that another process served.

        Args:
            members: by rank, with the numbers of their processes.
            policy: the one in force.
            options: of the job.
            outbox: takes messages and log records.
            now: the time.
            assumed: what policies that follow measurements are formed for; None: policies do not follow them.
            planned: what policies are formed for when links fail, even if nothing is `assumed`.
            replayed: the job as another process left it; None: a new job.
            reproducible: results are the same in each run, so they follow nothing that is measured.
        """
        # Nodes need time to find a scheduler that was restarted.
        heard_at = now + (options.link_timeout_s if replayed else 0)
        self.members: Final = Members(members, options, outbox, heard_at)
        self.finished: Final[dict[int, dict[int, int]]] = {} if replayed is None else dict(replayed.finished)
        self.reproducible: Final = reproducible or (replayed is not None and replayed.began.reproducible)
        chunks = _chunk_sizes(self.members, options, assumed or planned, replayed)
        elastic = options.elastic is not None
        self.rounds: Final = JobRounds(
            self.members, policy, chunks, outbox, replayed, elastic=elastic, reproducible=self.reproducible
        )
        self.views: Final = JobViews(self.members, self.rounds, outbox, options) if elastic else None
        self.awareness: Final = None if assumed is None else self._aware(assumed, policy, now)
        self.announcements: Final = Announcements(len(self.members))
        self.link_failures: Final = LinkFailures(len(self.members), assumed or planned)
        self.link_failures.without_all(set(range(len(self.members))) - set(self.members.present))
        self._suspicions: Final = LinkSuspicions(self.members, self.link_failures, self.awareness)
        self._options: Final = options
        self._outbox: Final = outbox
        self._owners: Final = owner_weights(policy) if replayed is None else replayed.began.owners
        self._barriers: Final = JobBarriers(self.members, self.finished, options, outbox)
        self._replicas: Final = ReplicaCheck(len(self.members))
        self._local_steps: Final = JobLocalSteps(self.members, self.finished, lambda: self.rounds.silent)
        if replayed is not None:
            self._barriers.restore(replayed, now)
            if self.views is not None:
                self.views.restore(replayed)
        else:
            outbox.record(self._began(policy, chunks))
        self._remind_at = now + REMIND_EVERY_S
        self._status_at = now + _STATUS_EVERY_S

    def _aware(self, assumed: InitialAssumptions, policy: Policy, now: float) -> Awareness:
        on_one_machine = self.members.on_one_machine
        return Awareness(assumed, policy, now, one_machine=on_one_machine, fixed=self.reproducible)

    def _began(self, policy: Policy, chunks: ChunkSizes) -> Began:
        """Return the record with which the job's log begins."""
        return Began(
            job=self._options.job,
            release=self._options.release,
            boot=self._options.boot,
            chunks=(chunks.smallest, chunks.largest, chunks.enough),
            members=self.members.all,
            policy=policy,
            owners=self._owners,
            first_node_settings=dict(self._options.first_node_settings),
            secret=self._options.secret.hidden(),
            reproducible=self.reproducible,
        )

    @property
    def all_finished(self) -> bool:
        """Whether no node will push any more."""
        return all(rank in self.finished for rank in self.members.present)

    def welcome(self, rank: int, now: float, *, later: bool = False) -> None:
        """Tell a node that it has joined, and everything that it may need to know."""
        self.members.liveness.heard(rank, now)
        oldest, *newer = self.rounds.policies()
        keys, grants = self.rounds.grants() if self.views is not None else ((), ())
        joined = m.Joined(
            rank=rank,
            members=self.members.all,
            policy=oldest,
            heartbeat_interval_s=self._options.heartbeat_interval_s,
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
            joins=self._options.joins,
            owners=self._owners,
            resume_s=(
                self._options.scheduler_timeout_s if self._outbox.keeps_log or self._options.majority else 0.0
            ),
            elastic=self._options.elastic,
            later=later or (self.views is not None and rank in self.views.silent),
            barriers=self._barriers.reached,
            keys=keys,
            grants=grants,
            majority=self._options.majority,
            proof_key=m.HiddenKey(self._proof_key(rank)),
            reproducible=self.reproducible,
        )
        self._send(rank, joined)
        for policy in newer:
            self._send(rank, m.NewPolicy(policy=policy))
        self._send_events(rank)
        if self.views is not None:
            self.views.welcomed(rank)

    def _send_events(self, rank: int) -> None:
        """Tell a node which links have failed and which ranks have finished."""
        if self.link_failures.failures:
            self._send(rank, m.FailedLinks(links=self.link_failures.detours()))
        for other, last_rounds in self.finished.items():
            self._send(rank, m.PeerFinished(rank=other, last_rounds=last_rounds))

    def receive(self, rank: int, message: m.Message, now: float) -> m.PeerGone | None:
        """Handle a member's message. Returns why the job cannot go on, if so.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        match message:
            case m.Heartbeat():
                self.members.liveness.waiting_for(rank, message.busy[:_MOST_CHARACTERS])
            case m.NodeStatus() | m.Measured() | m.StepTimes():
                self._report(rank, message, now)
            case m.RegisterKeys():
                return self._register(rank, message, now)
            case m.TopologyRequest() | m.CallsWaiting() | m.CallTimedOut():
                return self.rounds.receive(rank, message, now)
            case m.Moved():
                self.rounds.moved(rank, message)
            case m.ReplicaDigest():
                return self._replica_digest(rank, message)
            case m.Barrier():
                return self._barriers.arrive(rank, message.number, now)
            case m.Resume():
                return self._resume(rank, message, now)
            case m.Suspect():
                return self._suspect(rank, message, now)
            case m.LinkRestored():
                self._suspicions.restored(rank, message)
            case m.Finished():
                return self._finish(rank, message, now)
            case m.Failed():
                reason = f"{self.members.describe(rank)} failed: {message.reason}"
                return m.PeerGone(rank=rank, kind="failed", reason=reason)
            case m.Leave():
                return self.lost(rank, "it left before all had finished", now)
            case _:
                return self._view_message(rank, message)
        return None

    def _view_message(self, rank: int, message: m.Message) -> m.PeerGone | None:
        """Handle a member's message about views. Returns with which rank the job cannot go on, if so.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        if self.views is not None and isinstance(message, m.ViewReport):
            return self._view_report(rank, message, self.views)
        if self.views is not None and isinstance(message, m.CaughtUp):
            self._caught_up(rank, self.views)
            return None
        raise ProtocolViolation(
            f"rank {rank} sent a {type(message).__name__}, which the scheduler does not take"
        )

    def _view_report(self, rank: int, message: m.ViewReport, views: JobViews) -> m.PeerGone | None:
        """Handle a member's report of its results. All wait for it, so a wrong one is the member's end."""
        problem = self.rounds.authority.report_problem(message) if views.waits_for(rank, message.view) else ""
        if not problem:
            return views.report(rank, message)
        reason = f"{self.members.describe(rank)} reports {problem}, which no correct node can have"
        return m.PeerGone(rank=rank, kind="failed", reason=reason)

    def go_on_without(self, rank: int, reason: str, now: float) -> m.PeerGone | None:
        """Go on without a rank, if nodes may leave the job. Returns why the job cannot go on, if so."""
        if self.views is None or rank not in self.members.present:
            return m.PeerGone(rank=rank, kind="lost", reason=reason)
        self.finished.pop(rank, None)
        self.link_failures.without(rank)
        self._replicas.set_ranks(set(self.members.present) - {rank})
        gone = self.views.remove([rank], reason, now) or self._barriers.without(rank)
        self._local_steps.members_changed()
        if gone is None and self.link_failures.failures:
            self._suspicions.announce()  # detours over this rank lead over others now
        if gone is None and self.awareness is not None:
            self.awareness.members_changed(f"rank {rank} has left the job")
        return gone

    def admit_later(self, rank: int, peer: Peer, member: m.Member, now: float) -> None:
        """Go on with one more node, at a place that is free."""
        assert self.views is not None
        self.members.add(peer, member, now)
        self._barriers.without(rank)
        self.link_failures.with_rank(rank)
        self.welcome(rank, now, later=True)
        self.views.add(rank, member, now)

    def disconnected(self, rank: int, now: float) -> m.PeerGone | None:
        """Handle the end of a rank's connection. Returns that it is lost, if its process has ended."""
        self.members.liveness.ended.disconnected(rank, now)
        self.members.inquire([rank])
        return self.members.liveness.check(now)

    def refused(self, rank: int, reason: str, now: float) -> m.PeerGone | None:
        """Handle that no process listens at a rank's address. Returns that it is lost, if its process has
        ended.
        """
        self.members.liveness.ended.refused(rank, reason, now)
        return self.members.liveness.check(now)

    def _suspect(self, rank: int, message: m.Suspect, now: float) -> m.PeerGone | None:
        """Handle a rank's report that it cannot reach another one. Returns that it is lost, if it is."""
        if message.busy:
            if message.rank in self.members.present and self.members.liveness.runs(message.rank, now):
                self._send(rank, m.Alive(rank=message.rank))
            return None
        if not message.refused:
            self._suspicions.suspect(rank, message, now)
            return None
        if message.rank not in self.members.present:
            return None
        self._send(message.rank, m.Probe())
        return self.refused(message.rank, f"rank {rank} says: {message.reason}", now)

    def _caught_up(self, rank: int, views: JobViews) -> None:
        views.caught_up(rank)
        if self.awareness is not None:
            self.awareness.members_changed(f"rank {rank} contributes")
        self._barriers.with_rank(rank)
        self._local_steps.members_changed()
        self._replicas.set_ranks(set(self.members.present) - set(views.silent))

    def lost(self, rank: int, reason: str, now: float) -> m.PeerGone:
        """Return the message that a rank is lost, with the last sign of life from it."""
        text = (
            f"{self.members.describe(rank)} is lost: {reason}; {self.members.liveness.last_heard(rank, now)}"
        )
        return m.PeerGone(rank=rank, kind="lost", reason=text)

    def tick(self, now: float) -> m.PeerGone | None:
        """Check heartbeats and barriers. Returns why the job cannot go on, if so."""
        self._watch_busy(now)
        gone = self.members.liveness.check(now) or self._suspicions.check(self.rounds.policy, now)
        gone = gone or self.rounds.tick(now)
        if gone is None and now >= self._remind_at:
            self._remind_at = now + REMIND_EVERY_S
            gone = self._barriers.remind(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_EVERY_S
            _log.info("%s", self.status_text(now))
        return gone

    def _watch_busy(self, now: float) -> None:
        """Ask about ranks whose heartbeats are overdue, and tell all others which of them are busy."""
        liveness = self.members.liveness
        if now >= liveness.next_check():
            self.members.inquire(liveness.overdue(now))
        for text in liveness.take_warnings(now):
            _log.warning("%s", text)
            self.members.send_all(m.Waiting(text=text))

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(
            self._remind_at, self._status_at, self.members.liveness.next_check(), self.rounds.next_tick()
        )

    def status_text(self, now: float) -> str:
        """Return how the job is doing, in one line."""
        busy = self.members.liveness.busy_texts(now)
        waits = self.members.liveness.waiting_texts()
        return (
            f"job {self._options.job!r}: {len(self.members.present)} nodes, {len(self.rounds.keys)} keys, "
            f"policy version {self.rounds.policy.version}, {len(self.finished)} finished"
            + (f"; {text}" if self.views and (text := self.views.waiting_text()) else "")
            + (f"; {list_some(busy)}" if busy else "")
            + (f"; waiting: {list_some(waits)}" if waits else "")
        )

    # ------------------------------------------------------------------------------------- one message each

    def _register(self, rank: int, message: m.RegisterKeys, now: float) -> m.PeerGone | None:
        gone = self.rounds.register(rank, message, now)
        if gone is None and self.awareness is not None:
            self.awareness.record_keys(self.rounds.keys, now)
        return gone

    def _report(self, rank: int, message: m.NodeStatus | m.Measured | m.StepTimes, now: float) -> None:
        """Keep what a rank reports of itself or of its links for people, and let awareness use it."""
        if isinstance(message, m.Measured):
            self.announcements.record_links(rank, message, now)
            if self.awareness is not None:
                self.awareness.record_report(rank, message, now)
        elif isinstance(message, m.StepTimes):
            self._local_steps.report(rank, message, now)
        else:
            self.announcements.record_status(rank, message, now)

    def _replica_digest(self, rank: int, message: m.ReplicaDigest) -> m.PeerGone | None:
        self.rounds.authority.check_digest(rank, message)
        drift = self._replicas.record(rank, message.key, message.round, message.digest)
        if drift is None:
            return None
        reason = (
            f"after round {drift.round} of key {self.rounds.keys.name(drift.key)!r} rank {drift.rank} holds "
            f"other values than rank {drift.first_rank}: the replicas have drifted apart; the update rule "
            "must do the same on all ranks (no randomness of its own, no values that differ between ranks)"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)

    def _resume(self, rank: int, message: m.Resume, now: float) -> m.PeerGone | None:
        """Answer a node whose session with another scheduler process ended. Asking twice changes nothing."""
        _log.info("%s is back", self.members.describe(rank))
        self._send(rank, m.Resumed(proof=proof_for_resume(self._proof_key(rank), message.number)))
        for policy in self.rounds.policies():
            self._send(rank, m.NewPolicy(policy=policy))
        self._send_events(rank)
        if self.views is not None:
            self.views.resumed(rank, message.view, changing=message.changing, now=now)
        for target in message.suspected:
            suspect = m.Suspect(rank=target, reason="it could not be reached before")
            self._suspicions.suspect(rank, suspect, now)
        gone = None
        if message.keys:
            gone = self._register(rank, m.RegisterKeys(keys=message.keys), now)
        if gone is None and message.begun:
            gone = self.rounds.begun(rank, m.TopologyRequest(begun=message.begun), now)
        for moved in self.rounds.moves():
            self._send(rank, moved)
        for moved in message.moved if gone is None else ():
            self.rounds.moved(rank, moved)
        for number in message.barriers if gone is None else ():
            gone = gone or self._barriers.arrive_again(rank, number, now)
        if gone is None and message.last_rounds is not None and rank not in self.finished:
            gone = self._finish(rank, m.Finished(last_rounds=message.last_rounds), now)
        return gone

    def _finish(self, rank: int, message: m.Finished, now: float) -> m.PeerGone | None:
        if rank in self.finished:
            raise ProtocolViolation(f"rank {rank} finishes a second time")
        self.finished[rank] = message.last_rounds
        self._outbox.record(RankFinished(rank=rank, last_rounds=message.last_rounds))
        self.members.liveness.heard(rank, now, "it finished")
        others = [other for other in self.members.present if other != rank]
        self.members.send(others, m.PeerFinished(rank=rank, last_rounds=message.last_rounds))
        self._local_steps.members_changed()
        return self._barriers.finish(rank)

    def _proof_key(self, rank: int) -> bytes:
        return self._options.secret.key_for(self._options.job, self.members.all[rank])

    def _send(self, rank: int, message: m.Message) -> None:
        self.members.send([rank], message)


def _chunk_sizes(
    members: Members,
    options: SchedulerOptions,
    assumed: InitialAssumptions | None,
    replayed: ReplayedJob | None,
) -> ChunkSizes:
    """Return the sizes of chunks: as logged, else as the network asks for, else as the options say."""
    if replayed is not None:
        return ChunkSizes(*replayed.began.chunks)
    if assumed is not None and assumed.chunks is not None:
        return assumed.chunks
    return options.local_chunks if members.on_one_machine else options.chunks


# The phases of a job: how it ends, and how long the scheduler then waits for nodes to leave.

_LEAVE_TIMEOUT_S: Final = 5.0
"""How long the scheduler of a failed job stays, so that every node hears why."""


class JobLifecycle:
    """One job, from its first node to its last.

    Attributes:
        phase: where the job is.
        startup: its nodes until all have joined.
        job: its nodes from then on; None before.
        failure: why it failed; None if it did not.
        outcome: how it went; None until it is over.
        left: ranks that have left the job.
        ranks_to_come: a job that has failed before it began waits for ranks that have not come yet, and must
            hear why.
    """

    def __init__(self, options: SchedulerOptions, outbox: LoggedOutbox, startup: Startup) -> None:
        """Wait for nodes."""
        self.phase = JobPhase.GATHERING
        self.startup: Final = startup
        self.job: Job | None = None
        self.failure: m.PeerGone | None = None
        self.outcome: Outcome | None = None
        self.left: Final[set[int]] = set()
        self.ranks_to_come = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._end_at = math.inf
        self._stopped = False
        self._nobody_joined = False

    @property
    def end_at(self) -> float:
        """When the scheduler waits no longer for nodes to leave; inf if the job has not ended."""
        return math.inf if self.ranks_to_come and self.job is None and not self._stopped else self._end_at

    @property
    def abandoned(self) -> bool:
        """Whether every process left before the job began."""
        return self.phase is JobPhase.GATHERING and not self.startup.peers()

    def begin(self, job: Job) -> None:
        """All nodes have joined, or a job that another process served goes on."""
        self.job = job
        self.phase = JobPhase.FINISHED if job.all_finished else JobPhase.RUNNING

    def finish(self, peers: Sequence[Peer]) -> None:
        """All nodes have finished: tell them, so that they leave."""
        self.phase = JobPhase.FINISHED
        _log.info("all nodes have finished")
        self._outbox.send(peers, m.AllFinished())

    def fail(self, failure: m.PeerGone, now: float) -> None:
        """End the job, and tell every node that has not left why. Only the first failure counts."""
        if self.phase not in (JobPhase.GATHERING, JobPhase.RUNNING):
            return
        waiting = self.startup.peers() if self.job is None else self.job.members.peers_but(self.left)
        self.phase = JobPhase.FAILED
        self.failure = failure
        self._outbox.record(JobEnded(text=failure.reason))
        self._end_at = now + _LEAVE_TIMEOUT_S if waiting else now
        # Without nodes, the last line that the process prints is enough.
        _log.log(logging.ERROR if waiting else logging.DEBUG, "the job ends: %s", failure.reason)
        self._outbox.send(waiting, failure)

    def stop(self, reason: str, now: float) -> None:
        """End the job because this process must end. A finished job just waits for its nodes no longer."""
        self._stopped = True
        if self.phase is JobPhase.FINISHED:
            self._end_at = now
        else:
            self.fail(m.PeerGone(rank=-1, kind="stopped", reason=reason), now)

    def nobody_joined(self, now: float) -> None:
        """End the job: all processes have ended that might have joined it."""
        self.phase, self._end_at, self._nobody_joined = JobPhase.FAILED, now, True

    def departure_of(self, incarnation: int) -> str | None:
        """Return why a process is in the job no more; None: it may be in it."""
        views = None if self.job is None else self.job.views
        return None if views is None else views.departed.get(incarnation)

    def departed(self, peer: Peer, incarnation: int) -> None:
        """End the session with a process that is in the job no more, which goes on without it. If it was only
        stopped, it hears of that when it goes on.
        """
        reason = self.departure_of(incarnation)
        if reason is not None:
            self._outbox.send([peer], m.PeerGone(rank=-1, kind="removed", reason=reason))
        self._outbox.add(Disconnect(peer=peer))

    def process_left(self, peer: Peer, reason: str, now: float) -> None:
        """A process without a rank has left, or its session is lost."""
        self.startup.remove(peer, reason, quietly=self.phase is not JobPhase.GATHERING)
        if self.phase is JobPhase.FAILED and not self.startup.peers():
            self._end_at = now

    def rank_left(self, rank: int, now: float) -> None:
        """A member has left, or its session is lost."""
        if self.job is None or rank in self.left:
            return
        self.left.add(rank)
        self.job.members.liveness.stop_watching(rank)
        peer = self.job.members.peer_of(rank)
        if peer is not None:
            self._outbox.add(Disconnect(peer=peer))
        if self.left.issuperset(self.job.members.present):
            self._end_at = now

    def end_if_due(self, now: float) -> Outcome | None:
        """Return the outcome if the job is over now. Silent nodes of an ended job count as left."""
        if self.job is not None and self.phase in (JobPhase.FINISHED, JobPhase.FAILED):
            for rank in self.job.members.liveness.silent(now):
                self.rank_left(rank, now)
        if now < self.end_at or self.phase is JobPhase.OVER:
            return None
        self.phase = JobPhase.OVER
        job, name = self.job, self._options.job
        if self._nobody_joined:
            self.outcome = Outcome.nobody_joined(name)
        else:
            self.outcome = Outcome.of(
                name,
                self.failure,
                nodes=self._options.num_workers if job is None else len(job.members.present),
                keys=0 if job is None else len(job.rounds.keys),
            )
        self._outbox.record(JobEnded(text=self.outcome.text))
        return self.outcome


def abort_reason(error: Exception) -> str:
    """Return what nodes are told when the scheduler's process cannot go on because of `error`."""
    text = str(error) if isinstance(error, NetStormError) else f"its I/O thread has died: {error!r}"
    return f"the scheduler has stopped: {text}"


# The policies of one job: which one is in force, when a new one is wanted, and what replaces it.


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


class JobPolicies:
    """The policy in force, from before the job begins to its end.

    Attributes:
        ready: the first policy is known; if not, it is formed once all nodes have joined.
        assumed: what policies that follow measurements are formed for; None: policies do not follow them.
        planned: what policies are formed for when links fail, even if nothing is `assumed`.
        link_share: the part of each link's rate that the job plans with.
        history: when the policy in force was installed, and those before it.
    """

    def __init__(
        self,
        first: Policy | None,
        *,
        nodes: int,
        assumed: InitialAssumptions | None,
        planned: InitialAssumptions | None,
        counters: Counters,
        now: float,
    ) -> None:
        """Begin.

        Args:
            first: the policy that the job begins under, formed for what is `assumed`. None: see `set_first`.
            nodes: of the job.
            assumed: see the attribute.
            planned: see the attribute.
            counters: count the policies that are installed.
            now: the time.

        Raises:
            UsageError: the policy is for another number of nodes.
        """
        self.ready = first is not None
        self.assumed = assumed
        self.planned = planned
        self.link_share = 1.0
        self._nodes: Final = nodes
        self._counters: Final = counters
        self._first = placeholder_policy(nodes) if first is None else first
        check_policy(self._first, nodes=nodes, after=-1)
        self.history = PolicyHistory(self._first, now)
        self._job: Job | None = None

    @property
    def in_force(self) -> Policy:
        """The policy of all rounds that no node has been granted yet."""
        return self._first if self._job is None else self._job.rounds.policy

    def set_first(self, first: FirstPolicy, now: float) -> None:
        """Set the policy that the job begins under.

        Raises:
            UsageError: the policy is for another number of nodes.
        """
        check_policy(first.policy, nodes=self._nodes, after=-1)
        self.ready = True
        self._first, self.link_share = first.policy, first.link_share
        self.assumed, self.planned = first.planned if first.aware else None, first.planned
        self.history = PolicyHistory(first.policy, now)

    def begin(self, job: Job) -> None:
        """Go on with the policies of a job whose nodes have all joined."""
        self._job = job

    def install(self, policy: Policy, now: float) -> None:
        """Let a new policy apply, in each key, from the first round that no node has been granted.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        job = self._job
        if job is None:
            check_policy(policy, nodes=self._nodes, after=self._first.version)
            self._first = policy
        else:
            job.rounds.install(policy)
            if job.reproducible:
                _log.warning(
                    "policy version %d (%s): sums are rounded otherwise from here on than in a run without "
                    "this (NETSTORM_REPRODUCIBLE)",
                    policy.version,
                    policy.reason,
                )
        self.history.installed(policy, now)
        self._counters.add("policies")

    def set_link_share(self, share: float, why: str) -> None:
        """Plan with another part of each link's rate from now on; `why`: for a person."""
        self.link_share = share
        if self._job is not None and self._job.awareness is not None:
            self._job.awareness.set_link_share(share, why)

    def due(self) -> float:
        """Return when `check` may have something to do."""
        job = self._job
        if job is None:
            return math.inf
        due = job.link_failures.due()
        return due if job.awareness is None else min(due, job.awareness.due())

    def check(self, now: float) -> FormationRequest | None:
        """Return the formation to ask for, if a new policy is wanted. One that needs none is installed."""
        if self._job is None:
            return None
        wanted = _wanted(self._job, now)
        if isinstance(wanted, Policy):
            self.install(wanted, now)
            return None
        return wanted

    def formed(self, answer: FormationResult, now: float) -> None:
        """Install the result of a formation, if it is worth it."""
        job = self._job
        if job is None:
            return
        in_force, found = job.rounds.policy, None
        if answer.number < 0:  # `LinkFailures` numbers its formations below 0
            found = job.link_failures.formed(answer, in_force)
        elif job.awareness is not None:
            found = job.awareness.decide(answer, in_force)
            if found is not None and not job.link_failures.usable(found):
                return
        if found is not None:
            self.install(found, now)


def _wanted(job: Job, now: float) -> Policy | FormationRequest | None:
    """Return the policy to install or the formation to ask for, if there is one. Failed links come first."""
    awareness, policy = job.awareness, job.rounds.policy
    if job.link_failures.due() <= now:
        estimate = None if awareness is None else awareness.collector.estimate(now)
        restoring = awareness is None or not awareness.active
        return job.link_failures.check(policy, workload_of(job.rounds.keys), estimate, restoring=restoring)
    return None if awareness is None else awareness.poll(policy, job.rounds.keys, now)
