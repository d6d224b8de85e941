"""A job whose nodes are all here: what its members ask of the scheduler, and what it answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.chunks import ChunkSizes
from netstorm.protocol.ids import Peer
from netstorm.scheduler.adaptation import Assumed
from netstorm.scheduler.awareness import Awareness, summed_of
from netstorm.scheduler.barrier import BarrierCount
from netstorm.scheduler.collector import Seen
from netstorm.scheduler.consistency import Consistency, needed
from netstorm.scheduler.failed_links import LinkFailures
from netstorm.scheduler.failure import Failure
from netstorm.scheduler.forming import Formation, Formed
from netstorm.scheduler.liveness import Liveness, Suspicion
from netstorm.scheduler.membership import describe, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox
from netstorm.scheduler.past import Leases, Past
from netstorm.scheduler.records import BarrierCome, Began, Finished, Installed, KeyAdded
from netstorm.scheduler.registry import KeyConflict, KeyRegistry
from netstorm.scheduler.replicas import ReplicaCheck
from netstorm.scheduler.sayings import Sayings
from netstorm.scheduler.snapshot import NodeSnapshot
from netstorm.topology.network import Rank
from netstorm.topology.owners import owner_weights
from netstorm.topology.policy import Policy, Tree

__all__ = ["SAY_EVERY_S", "Job", "check_policy", "unformed"]

_log = logging.getLogger(__name__)

SAY_EVERY_S: Final = 3.0
"""How often those who wait are told for whom."""

_STATUS_EVERY_S: Final = 30.0
"""How often the log says how the job is doing."""

_MOST_PICTURED: Final = 24
"""Nodes of whose links people see what is planned with: 14 ms of the scheduler's thread; of 128 0.5 s."""


class Job:
    """The members and all that they share. What may end the job is returned: its owner decides.

    Attributes:
        members, peers: by rank.
        finished: by rank, the last round that it pushed of each key, once it will push no more.
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
        assumed: Assumed | None = None,
        planned: Assumed | None = None,
        past: Past | None = None,
    ) -> None:
        """Begin with `seats`, by rank, under `policy`, formed for what is `assumed`; None: it stays, unless
        links fail, for what is `planned`. `past`: what another process has left of this job.
        """
        self.peers: Final = tuple(peer for peer, _ in seats)
        self.members: Final = tuple(member for _, member in seats)
        self.finished: Final[dict[int, dict[int, int]]] = {}
        # Who must find a scheduler that is back needs time for it.
        self.liveness: Final = Liveness(self.members, options, now + (options.link_timeout_s if past else 0))
        chunks = options.local_chunks if _on_one_machine(self.members) else options.chunks
        self.keys: Final = KeyRegistry(chunks if past is None else ChunkSizes(*past.began.chunks))
        self.awareness: Final = (
            None
            if assumed is None
            else Awareness(assumed, policy, now, one_machine=_on_one_machine(self.members))
        )
        self.sayings: Final = Sayings(len(seats))
        self.links: Final = LinkFailures(len(seats), assumed or planned)
        self._options: Final = options
        self._outbox: Final = outbox
        self._owners: Final = owner_weights(policy) if past is None else past.began.owners
        self._policies: dict[int, Policy] = {policy.version: policy}
        self._consistency: Final = Consistency(len(seats), policy.version)
        self._barriers: Final = BarrierCount(len(seats))
        self._moves: Final[dict[tuple[int, int], list[m.Moved]]] = {}
        """By key and round: what a node must hear that has lost its session with a scheduler before."""
        self._replicas: Final = ReplicaCheck(len(seats))
        self._leases: Final = Leases(() if past is None else past.granted)
        if past is None:
            outbox.note(
                Began(
                    job=options.job,
                    release=options.release,
                    boot=options.boot,
                    chunks=(chunks.smallest, chunks.largest, chunks.enough),
                    members=self.members,
                    policy=policy,
                    owners=self._owners,
                )
            )
        else:
            self._restore(past, now)
        self._say_at = now + SAY_EVERY_S
        self._status_at = now + _STATUS_EVERY_S

    def _restore(self, past: Past, now: float) -> None:
        """Go on where another process has stopped."""
        self._policies = dict(past.policies)
        for rank, spec in past.keys:
            self.keys.register(rank, spec)
        for key, (rows, granted) in enumerate(zip(past.rows, past.granted, strict=True)):
            self._consistency.restore(key, rows, granted)
        self.finished.update(past.finished)
        for rank in past.finished if self._options.joins else ():
            self._barriers.excuse(rank)
        self._barriers.restore(past.barriers, now)

    @property
    def policy(self) -> Policy:
        """The policy that rounds which nobody has been granted will run under."""
        return self._policies[self._consistency.version]

    @property
    def all_finished(self) -> bool:
        """Whether nobody will push any more."""
        return len(self.finished) == len(self.members)

    def welcome(self, rank: int, now: float) -> None:
        """Tell a node that it has joined, and all that it may need to know."""
        self.liveness.heard(rank, now)
        oldest, *newer = (self._policies[version] for version in sorted(self._policies))
        joined = m.Joined(
            rank=rank,
            members=self.members,
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
        check_policy(policy, nodes=len(self.members), after=self._consistency.version)
        before = self.policy
        self._policies[policy.version] = policy
        starts = self._consistency.install(policy.version)
        self._outbox.note(Installed(policy=policy, starts=tuple(starts.items())))
        if self.awareness is not None:
            self.awareness.installed(policy, before, starts)
        in_use = self._consistency.versions_in_use()
        self._policies = needed(self._policies, in_use)
        self._outbox.tell(self.peers, m.NewPolicy(policy=policy))

    def receive(self, rank: int, message: m.Message, now: float) -> m.PeerGone | None:
        """Take a member's message. Returns why the job cannot go on, if so.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        match message:
            case m.Heartbeat():
                self.liveness.busy(rank, message.busy)
            case m.NodeStatus() | m.Measured():
                self._heard(rank, message, now)
            case m.RegisterKeys():
                return self._register(rank, message, now)
            case m.TopologyRequest():
                return self._topology_request(rank, message, now)
            case m.Moved():
                self._moved(rank, message)
            case m.ReplicaDigest():
                return self._replica_digest(rank, message)
            case m.Barrier():
                return self._barrier(rank, message, now)
            case m.Resume():
                return self._resume(rank, message, now)
            case m.Suspect() | m.LinkRestored():
                self._about_link(rank, message, now)
            case m.Finished():
                return self._finish(rank, message, now)
            case m.Failed():
                reason = f"{describe(self.members[rank])} failed: {message.reason}"
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
        text = f"{describe(self.members[rank])} is lost: {reason}; {self.liveness.last_heard(rank, now)}"
        return m.PeerGone(rank=rank, kind="lost", reason=text)

    def tick(self, now: float) -> m.PeerGone | None:
        """Look who is silent, and tell those who wait for whom. Returns why the job cannot go on, if so."""
        gone = self.liveness.verdict(now)
        for one in self.liveness.proven() if gone is None else ():
            gone = gone or self._link_failed(one, now)
        if gone is None and now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            gone = self._say_barrier(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_EVERY_S
            _log.info("%s", self.status_text())
        return gone

    def next_tick(self) -> float:
        """Return when something is due."""
        due = min(self._say_at, self._status_at, self.liveness.next_look(), self.links.due())
        return due if self.awareness is None else min(due, self.awareness.due())

    def take_link_share(self, share: float, why: str) -> None:
        """Plan with another share of each link from now on; `why`: for a person."""
        if self.awareness is not None:
            self.awareness.take_link_share(share, why)

    def look(self, now: float) -> Policy | Formation | None:
        """Return what policy is to be installed or formed, if one is."""
        awareness = self.awareness
        if self.links.due() <= now:
            picture = None if awareness is None else awareness.collector.picture(now)
            restoring = awareness is None or not awareness.active
            return self.links.look(self.policy, summed_of(self.keys), picture, restoring=restoring)
        return None if awareness is None else awareness.look(self.policy, self.keys, now)

    def formed(self, answer: Formed, now: float) -> Policy | None:
        """Return what is to follow the policy in force, now that something has been formed."""
        if answer.number < 0:
            return self.links.formed(answer, self.policy)
        found = None if self.awareness is None else self.awareness.formed(answer, self.policy, now)
        return found if found is not None and self.links.suits(found) else None

    def status_text(self) -> str:
        """Return how the job is doing, in one line."""
        waits = self.liveness.waits()
        return (
            f"job {self._options.job!r}: {len(self.members)} nodes, {len(self.keys)} keys, policy version "
            f"{self.policy.version}, {len(self.finished)} finished"
            + (f"; waiting: {list_some(waits)}" if waits else "")
        )

    def seen_links(self, now: float) -> Callable[[], Sequence[Seen]]:
        """Return what will say, in any thread, what is known of each link now; of very many only what was
        last reported.
        """
        if self.awareness is None or len(self.members) > _MOST_PICTURED:
            return self.sayings.links(now)
        seen = self.awareness.collector.seen(now)
        return lambda: seen

    def node_snapshots(self, left: Collection[int]) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each rank; those in `left` will not be heard of again."""
        caps = self.sayings.caps()
        found = []
        for rank, member in enumerate(self.members):
            heard_at, said, busy = self.liveness.known(rank)
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

    def _heard(self, rank: int, message: m.NodeStatus | m.Measured, now: float) -> None:
        """Keep a rank's word on itself and on its links for people, and act on it."""
        if isinstance(message, m.Measured):
            self.sayings.measured(rank, message, now)
            if self.awareness is not None:
                self.awareness.measured(rank, message, now)
        else:
            self.sayings.status(rank, message, now)
            if self.awareness is not None:
                self.awareness.took(message)

    def _register(self, rank: int, message: m.RegisterKeys, now: float) -> m.PeerGone | None:
        grants, bindings = [], []
        for spec in message.keys:
            known = len(self.keys)
            grant = self.keys.register(rank, spec)
            if isinstance(grant, KeyConflict):
                return m.PeerGone(rank=-1, kind="key", reason=str(grant))
            if grant.key == known:
                self._outbox.note(KeyAdded(rank=rank, spec=spec, version=self._consistency.version))
            self._consistency.add_key(grant.key)
            grants.append(grant)
            bindings += self._consistency.bindings(grant.key, 0)
        self.liveness.heard(rank, now, f"it registered {len(grants)} keys")
        self._tell(rank, m.KeysRegistered(grants=tuple(grants), bindings=tuple(bindings)))
        return None

    def _topology_request(self, rank: int, message: m.TopologyRequest, now: float) -> m.PeerGone | None:
        unknown = next((event.key for event in message.begun if event.key not in self.keys), None)
        if unknown is not None:
            raise ProtocolViolation(f"rank {rank} asks about key {unknown}, which nobody has registered")
        bindings = []
        if self._outbox.keeps_log:
            self._outbox.note(self._leases.take((event.key, event.round + 1) for event in message.begun))
        for event in message.begun:
            conflict = self._consistency.begun(rank, event)
            name = self.keys.name(event.key)
            if conflict is not None:
                reason = f"round {event.round} of {name}: {conflict}"
                return m.PeerGone(rank=-1, kind="disagreement", reason=reason)
            bindings += self._consistency.bindings(event.key, event.round)
            self.liveness.heard(rank, now, f"round {event.round} of {name}")
        self._tell(rank, m.TopologyAnswer(bindings=tuple(bindings)))
        return None

    def _moved(self, rank: int, message: m.Moved) -> None:
        """Tell all nodes which chunks their root has given to a later policy."""
        if message.key not in self.keys or not 0 <= message.version <= self._consistency.version:
            raise ProtocolViolation(
                f"rank {rank} has given chunks of key {message.key} to policy {message.version}: expected "
                f"one of {len(self.keys)} keys, and a version up to {self._consistency.version}"
            )
        kept = self._moves.setdefault((message.key, message.round), [])
        if message not in kept:
            kept.append(message)
        for key, round in [place for place in self._moves if self._consistency.is_over(*place)]:
            del self._moves[key, round]
        self._outbox.tell(self.peers, message)

    def _replica_digest(self, rank: int, message: m.ReplicaDigest) -> m.PeerGone | None:
        if message.key not in self.keys:
            raise ProtocolViolation(f"rank {rank} reports key {message.key}, which nobody has registered")
        drift = self._replicas.note(rank, message.key, message.round, message.digest)
        if drift is None:
            return None
        reason = (
            f"after round {drift.round} of {self.keys.name(drift.key)} rank {drift.rank} holds other values "
            f"than rank {drift.first_rank}: the replicas have drifted apart; the update rule must do the "
            "same on all ranks (no randomness of its own, no values that differ between ranks)"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)

    def _barrier(self, rank: int, message: m.Barrier, now: float) -> m.PeerGone | None:
        self.liveness.heard(rank, now, f"it came to barrier {message.number}")
        reached = self._barriers.come(rank, message.number, now)
        self._outbox.note(BarrierCome(rank=rank, number=message.number))
        self._tell_reached(reached)
        return self._waits_in_vain()

    def _tell_reached(self, barriers: list[int]) -> None:
        for number in barriers:
            come = [peer for rank, peer in enumerate(self.peers) if self._barriers.has_come(rank, number)]
            self._outbox.tell(come, m.BarrierReached(number=number))

    def _resume(self, rank: int, message: m.Resume, now: float) -> m.PeerGone | None:
        """Answer a node whose session ended with another process. Asking twice changes nothing."""
        _log.info("%s is back", describe(self.members[rank]))
        self._tell(rank, m.Resumed())
        for version in sorted(self._policies):
            self._tell(rank, m.NewPolicy(policy=self._policies[version]))
        self._tell_news(rank)
        for target in message.suspected:
            self._suspect(rank, m.Suspect(rank=target, reason="it could not be reached before"), now)
        gone = self._register(rank, m.RegisterKeys(keys=message.keys), now) if message.keys else None
        if gone is None and message.begun:
            gone = self._topology_request(rank, m.TopologyRequest(begun=message.begun), now)
        for told in list(self._moves.values()):
            for moved in told:
                self._tell(rank, moved)
        for moved in message.moved if gone is None else ():
            self._moved(rank, moved)
        for number in message.barriers if gone is None else ():
            if self._barriers.is_reached(number):
                self._tell(rank, m.BarrierReached(number=number))
            elif not self._barriers.has_come(rank, number):
                gone = gone or self._barrier(rank, m.Barrier(number=number), now)
        if gone is None and message.last_rounds is not None and rank not in self.finished:
            gone = self._finish(rank, m.Finished(last_rounds=message.last_rounds), now)
        return gone

    def _about_link(self, rank: int, message: m.Suspect | m.LinkRestored, now: float) -> None:
        if isinstance(message, m.Suspect):
            self._suspect(rank, message, now)
        else:
            self._restored(rank, message)

    def _suspect(self, rank: int, message: m.Suspect, now: float) -> None:
        if message.rank == rank or not 0 <= message.rank < len(self.members):
            raise ProtocolViolation(f"rank {rank} suspects rank {message.rank}")
        target = describe(self.members[message.rank])
        _log.warning("rank %d cannot reach %s: %s", rank, target, message.reason)
        self.liveness.suspect(rank, message.rank, message.reason, now)

    def _link_failed(self, one: Suspicion, now: float) -> m.PeerGone | None:
        """A rank that another one cannot reach is alive: go on without that link, if that is possible."""
        if not self.links.fail(Failure(one.by, one.rank, one.reason, now), self.policy):
            return self.liveness.cut(one, now)
        _log.warning(
            "the link from %s to %s has failed (%s); the job goes on without it",
            describe(self.members[one.by]),
            describe(self.members[one.rank]),
            one.reason,
        )
        self._tell_links()
        return None

    def _restored(self, rank: int, message: m.LinkRestored) -> None:
        if message.rank == rank or not 0 <= message.rank < len(self.members):
            raise ProtocolViolation(f"rank {rank} reaches rank {message.rank} again")
        self.liveness.withdrawn(rank, message.rank)
        if self.links.restore(rank, message.rank):
            target = describe(self.members[message.rank])
            _log.warning("the link from %s to %s works again", describe(self.members[rank]), target)
            self._tell_links()

    def _tell_links(self) -> None:
        if self.awareness is not None:
            self.awareness.avoid(self.links.avoided)
        self._outbox.tell(self.peers, m.FailedLinks(links=self.links.told()))

    def _finish(self, rank: int, message: m.Finished, now: float) -> m.PeerGone | None:
        if rank in self.finished:
            raise ProtocolViolation(f"rank {rank} finishes a second time")
        self.finished[rank] = message.last_rounds
        self._outbox.note(Finished(rank=rank, last_rounds=message.last_rounds))
        self.liveness.heard(rank, now, "it finished")
        others = [peer for other, peer in enumerate(self.peers) if other != rank]
        self._outbox.tell(others, m.PeerFinished(rank=rank, last_rounds=message.last_rounds))
        if self._options.joins:
            self._tell_reached(self._barriers.excuse(rank))
        return self._waits_in_vain()

    # --------------------------------------------------------------------------------------------- barriers

    def _waits_in_vain(self) -> m.PeerGone | None:
        """A rank that has finished comes to no more barriers: do not let the others wait for it."""
        never = self._barriers.never_coming(self.finished)
        if not never:
            return None
        reason = (
            f"{_ranks(self._barriers.waiting())} waits at barrier {self._barriers.oldest}, but "
            f"{_ranks(never)} has finished without coming to it: every rank must come to every barrier"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)

    def _say_barrier(self, now: float) -> m.PeerGone | None:
        missing = self._barriers.missing()
        waited, limit = now - self._barriers.since, self._options.wait_timeout_s
        if not missing or waited < SAY_EVERY_S:
            return None
        text = (
            f"barrier {self._barriers.oldest}: waiting for {len(missing)} of {len(self.members)} nodes: "
            + list_some(describe(self.members[rank]) for rank in missing)
        )
        if self._options.joins:
            text += (
                "; with NETSTORM_UNEVEN=join a rank contributes zeros when its script has ended, not while "
                "it waits at a barrier: those may wait for its pushes"
            )
        if waited >= limit:
            reason = f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT) at {text}"
            return m.PeerGone(rank=-1, kind="timeout", reason=reason)
        _log.info("%s", text)
        self._outbox.tell([self.peers[rank] for rank in self._barriers.waiting()], m.Waiting(text=text))
        return None

    def _tell(self, rank: int, message: m.Message) -> None:
        self._outbox.tell([self.peers[rank]], message)


def check_policy(policy: Policy, *, nodes: int, after: int) -> None:
    """Check that a policy can follow version `after` in a job of so many nodes.

    Raises:
        UsageError: it cannot.
    """
    if policy.size != nodes:
        raise UsageError(f"a policy for {policy.size} nodes in a job of {nodes} (DMLC_NUM_WORKER)")
    if policy.version <= after:
        raise UsageError(f"policy version {policy.version} is not newer than version {after}, now in force")


def unformed(nodes: int) -> Policy:
    """Return what stands for a policy until there is one: a star."""
    parents = tuple(-1 if rank == 0 else 0 for rank in range(nodes))
    tree = Tree.undirected(Rank(0), parents)
    return Policy(version=0, trees=(tree,), weights=(1,), reason="no policy has been formed yet")


def _on_one_machine(members: Sequence[m.Member]) -> bool:
    return len({member.host for member in members}) == 1


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "each of ranks ") + list_some(map(str, ranks))
