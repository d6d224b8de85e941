"""A job whose nodes are all here: what its members ask of the scheduler, and what it answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.chunks import ChunkSizes
from netstorm.protocol.ids import Peer
from netstorm.scheduler.awareness.network_estimate import LinkEstimate
from netstorm.scheduler.failures.failed_links import LinkFailures
from netstorm.scheduler.failures.link_suspicions import LinkSuspicions
from netstorm.scheduler.job_rounds import JobRounds
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.log.records import Began, Finished
from netstorm.scheduler.log.replay import ReplayedJob
from netstorm.scheduler.membership.barriers import REMIND_EVERY_S, Barriers
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.membership.rendezvous import list_some
from netstorm.scheduler.observe.announcements import Announcements
from netstorm.scheduler.observe.snapshot import NodeSnapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.assumptions import InitialAssumptions, workload_of
from netstorm.scheduler.policies.control_loop import Awareness
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.rounds.replica_check import ReplicaCheck
from netstorm.topology.owners import owner_weights
from netstorm.topology.policy import Policy

__all__ = ["Job"]

_log = logging.getLogger(__name__)

_STATUS_EVERY_S: Final = 30.0
"""How often the log says how the job is doing."""

_MOST_PICTURED: Final = 24
"""Nodes of whose links people see what is planned with: 14 ms of the scheduler's thread; of 128 0.5 s."""


class Job:
    """The members and all that they share. What may end the job is returned: its owner decides.

    Attributes:
        members: its nodes.
        finished: by rank, the last round that it pushed of each key, once it will push no more.
        rounds: their keys, and under which policy each round of them runs.
        awareness: what is measured, and what follows from it; None: nothing does.
        sayings: what nodes say of themselves and their links.
        links: those that have failed.
    """

    def __init__(
        self,
        seats: Sequence[tuple[Peer, m.Member]],
        policy: Policy,
        options: SchedulerOptions,
        outbox: Outbox,
        now: float,
        *,
        assumed: InitialAssumptions | None = None,
        planned: InitialAssumptions | None = None,
        past: ReplayedJob | None = None,
    ) -> None:
        """Begin with `seats`, by rank, under `policy`, formed for what is `assumed`; None: it stays, unless
        links fail, for what is `planned`. `past`: what another process has left of this job.
        """
        # Who must find a scheduler that is back needs time for it.
        heard_at = now + (options.link_timeout_s if past else 0)
        members = Members(seats, options, outbox, heard_at)
        self.members: Final = members
        self.finished: Final[dict[int, dict[int, int]]] = {} if past is None else dict(past.finished)
        chunks = options.local_chunks if members.on_one_machine else options.chunks
        known = assumed or planned
        if known is not None and known.chunks is not None:
            chunks = known.chunks
        if past is not None:
            chunks = ChunkSizes(*past.began.chunks)
        self.rounds: Final = JobRounds(members, policy, chunks, outbox, past)
        self.awareness: Final = (
            None if assumed is None else Awareness(assumed, policy, now, one_machine=members.on_one_machine)
        )
        self.sayings: Final = Announcements(len(members))
        self.links: Final = LinkFailures(len(members), assumed or planned)
        self._complaints: Final = LinkSuspicions(members, self.links, self.awareness)
        self._options: Final = options
        self._outbox: Final = outbox
        self._owners: Final = owner_weights(policy) if past is None else past.began.owners
        self._barriers: Final = Barriers(members, self.finished, options, outbox)
        self._replicas: Final = ReplicaCheck(len(members))
        if past is not None:
            self._barriers.restore(past, now)
        else:
            outbox.note(
                Began(
                    job=options.job,
                    release=options.release,
                    boot=options.boot,
                    chunks=(chunks.smallest, chunks.largest, chunks.enough),
                    members=members.all,
                    policy=policy,
                    owners=self._owners,
                    said=dict(options.said),
                )
            )
        self._say_at = now + REMIND_EVERY_S
        self._status_at = now + _STATUS_EVERY_S

    @property
    def policy(self) -> Policy:
        """The policy that rounds which nobody has been granted will run under."""
        return self.rounds.policy

    @property
    def all_finished(self) -> bool:
        """Whether nobody will push any more."""
        return len(self.finished) == len(self.members)

    def welcome(self, rank: int, now: float) -> None:
        """Tell a node that it has joined, and all that it may need to know."""
        self.members.liveness.heard(rank, now)
        oldest, *newer = self.rounds.policies()
        joined = m.Joined(
            rank=rank,
            members=self.members.all,
            policy=oldest,
            heartbeat_interval_s=self._options.heartbeat_interval_s,
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
            joins=self._options.joins,
            owners=self._owners,
            resume_s=self._options.scheduler_timeout_s if self._outbox.keeps_log else 0.0,
        )
        self._tell(rank, joined)
        for policy in newer:
            self._tell(rank, m.NewPolicy(policy=policy))
        self._tell_news(rank)

    def _tell_news(self, rank: int) -> None:
        if self.links.failures:
            self._tell(rank, m.FailedLinks(links=self.links.told()))
        for other, last_rounds in self.finished.items():
            self._tell(rank, m.PeerFinished(rank=other, last_rounds=last_rounds))

    def install(self, policy: Policy) -> None:
        """Let a new policy apply, in each key, from the first round on that nobody has been granted.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        self.rounds.install(policy)

    def receive(self, rank: int, message: m.Message, now: float) -> m.PeerGone | None:
        """Take a member's message. Returns why the job cannot go on, if so.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        match message:
            case m.Heartbeat():
                self.members.liveness.busy(rank, message.busy)
            case m.NodeStatus() | m.Measured():
                self._heard(rank, message, now)
            case m.RegisterKeys():
                return self._register(rank, message, now)
            case m.TopologyRequest():
                return self.rounds.begun(rank, message, now)
            case m.Moved():
                self.rounds.moved(rank, message)
            case m.ReplicaDigest():
                return self._replica_digest(rank, message)
            case m.Barrier():
                return self._barriers.come(rank, message.number, now)
            case m.Resume():
                return self._resume(rank, message, now)
            case m.Suspect():
                self._complaints.suspect(rank, message, now)
            case m.LinkRestored():
                self._complaints.restored(rank, message)
            case m.Finished():
                return self._finish(rank, message, now)
            case m.Failed():
                reason = f"{self.members.describe(rank)} failed: {message.reason}"
                return m.PeerGone(rank=rank, kind="failed", reason=reason)
            case m.Leave():
                return self.lost(rank, "it left before all had finished", now)
            case _:
                raise ProtocolViolation(
                    f"the scheduler takes no {type(message).__name__}, as rank {rank} sent"
                )
        return None

    def lost(self, rank: int, reason: str, now: float) -> m.PeerGone:
        """Return the word that a rank is lost, with the last thing heard from it."""
        text = (
            f"{self.members.describe(rank)} is lost: {reason}; {self.members.liveness.last_heard(rank, now)}"
        )
        return m.PeerGone(rank=rank, kind="lost", reason=text)

    def tick(self, now: float) -> m.PeerGone | None:
        """Look who is silent, and tell those who wait for whom. Returns why the job cannot go on, if so."""
        gone = self.members.liveness.verdict(now) or self._complaints.look(self.policy, now)
        if gone is None and now >= self._say_at:
            self._say_at = now + REMIND_EVERY_S
            gone = self._barriers.say(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_EVERY_S
            _log.info("%s", self.status_text())
        return gone

    def next_tick(self) -> float:
        """Return when something is due."""
        due = min(self._say_at, self._status_at, self.members.liveness.next_look(), self.links.due())
        return due if self.awareness is None else min(due, self.awareness.due())

    def take_link_share(self, share: float, why: str) -> None:
        """Plan with another share of each link from now on; `why`: for a person."""
        if self.awareness is not None:
            self.awareness.set_link_share(share, why)

    def look(self, now: float) -> Policy | FormationRequest | None:
        """Return what policy is to be installed or formed, if one is."""
        awareness = self.awareness
        if self.links.due() <= now:
            picture = None if awareness is None else awareness.collector.estimate(now)
            restoring = awareness is None or not awareness.active
            return self.links.look(self.policy, workload_of(self.rounds.keys), picture, restoring=restoring)
        return None if awareness is None else awareness.poll(self.policy, self.rounds.keys, now)

    def formed(self, answer: FormationResult, now: float) -> Policy | None:
        """Return what is to follow the policy in force, now that something has been formed."""
        if answer.number < 0:
            return self.links.formed(answer, self.policy)
        found = None if self.awareness is None else self.awareness.decide(answer, self.policy)
        return found if found is not None and self.links.suits(found) else None

    def status_text(self) -> str:
        """Return how the job is doing, in one line."""
        waits = self.members.liveness.waits()
        return (
            f"job {self._options.job!r}: {len(self.members)} nodes, {len(self.rounds.keys)} keys, policy "
            f"version {self.policy.version}, {len(self.finished)} finished"
            + (f"; waiting: {list_some(waits)}" if waits else "")
        )

    def seen_links(self, now: float) -> Callable[[], Sequence[LinkEstimate]]:
        """Return what will say, in any thread, what is known of each link now; of very many only what was
        last reported.
        """
        if self.awareness is None or len(self.members) > _MOST_PICTURED:
            return self.sayings.links(now)
        seen = self.awareness.collector.link_estimates(now)
        return lambda: seen

    def node_snapshots(self, left: Collection[int], now: float) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each rank; those in `left` will not be heard of again."""
        caps = {} if self.awareness is None else self.awareness.collector.access_caps(now)
        found = []
        for rank, member in enumerate(self.members.all):
            heard_at, said, busy = self.members.liveness.known(rank)
            egress, ingress = caps.get(rank, (0.0, 0.0))
            found.append(
                NodeSnapshot(
                    member=member,
                    joined=True,
                    heard_at=heard_at,
                    said=said,
                    busy=busy,
                    finished=rank in self.finished,
                    left=rank in left,
                    reports=self.sayings.reports(rank),
                    egress=egress,
                    ingress=ingress,
                )
            )
        return tuple(found)

    # ------------------------------------------------------------------------------------- one message each

    def _register(self, rank: int, message: m.RegisterKeys, now: float) -> m.PeerGone | None:
        gone = self.rounds.register(rank, message, now)
        if gone is None and self.awareness is not None:
            self.awareness.record_keys(self.rounds.keys, now)
        return gone

    def _heard(self, rank: int, message: m.NodeStatus | m.Measured, now: float) -> None:
        """Keep a rank's word on itself and on its links for people, and act on it."""
        if isinstance(message, m.Measured):
            self.sayings.measured(rank, message, now)
            if self.awareness is not None:
                self.awareness.record_report(rank, message, now)
        else:
            self.sayings.status(rank, message, now)

    def _replica_digest(self, rank: int, message: m.ReplicaDigest) -> m.PeerGone | None:
        if message.key not in self.rounds.keys:
            raise ProtocolViolation(f"rank {rank} reports key {message.key}, which nobody has registered")
        drift = self._replicas.note(rank, message.key, message.round, message.digest)
        if drift is None:
            return None
        reason = (
            f"after round {drift.round} of {self.rounds.keys.name(drift.key)} rank {drift.rank} holds other "
            f"values than rank {drift.first_rank}: the replicas have drifted apart; the update rule must do "
            "the same on all ranks (no randomness of its own, no values that differ between ranks)"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)

    def _resume(self, rank: int, message: m.Resume, now: float) -> m.PeerGone | None:
        """Answer a node whose session ended with another process. Asking twice changes nothing."""
        _log.info("%s is back", self.members.describe(rank))
        self._tell(rank, m.Resumed())
        for policy in self.rounds.policies():
            self._tell(rank, m.NewPolicy(policy=policy))
        self._tell_news(rank)
        for target in message.suspected:
            self._complaints.suspect(
                rank, m.Suspect(rank=target, reason="it could not be reached before"), now
            )
        rounds, gone = self.rounds, None
        if message.keys:
            gone = self._register(rank, m.RegisterKeys(keys=message.keys), now)
        if gone is None and message.begun:
            gone = rounds.begun(rank, m.TopologyRequest(begun=message.begun), now)
        for moved in rounds.moves():
            self._tell(rank, moved)
        for moved in message.moved if gone is None else ():
            rounds.moved(rank, moved)
        for number in message.barriers if gone is None else ():
            gone = gone or self._barriers.come_again(rank, number, now)
        if gone is None and message.last_rounds is not None and rank not in self.finished:
            gone = self._finish(rank, m.Finished(last_rounds=message.last_rounds), now)
        return gone

    def _finish(self, rank: int, message: m.Finished, now: float) -> m.PeerGone | None:
        if rank in self.finished:
            raise ProtocolViolation(f"rank {rank} finishes a second time")
        self.finished[rank] = message.last_rounds
        self._outbox.note(Finished(rank=rank, last_rounds=message.last_rounds))
        self.members.liveness.heard(rank, now, "it finished")
        others = [other for other in range(len(self.members)) if other != rank]
        self.members.tell(others, m.PeerFinished(rank=rank, last_rounds=message.last_rounds))
        return self._barriers.finish(rank)

    def _tell(self, rank: int, message: m.Message) -> None:
        self.members.tell([rank], message)
