"""A job whose nodes have all joined: what its members send to the scheduler, and what it answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import ChunkSizes
from netstorm.protocol.frames import Peer
from netstorm.pslite.proofs import proof_for_resume
from netstorm.scheduler.failures import LinkFailures, LinkSuspicions
from netstorm.scheduler.job_rounds import JobRounds
from netstorm.scheduler.members import REMIND_EVERY_S, JobBarriers, JobLocalSteps, Members, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import Awareness, InitialAssumptions
from netstorm.scheduler.replay_log import Began, LoggedOutbox, RankFinished, ReplayedJob
from netstorm.scheduler.rounds import ReplicaCheck
from netstorm.scheduler.snapshot import Announcements
from netstorm.scheduler.views import JobViews
from netstorm.topology.policy import Policy, owner_weights

__all__ = ["Job"]


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
