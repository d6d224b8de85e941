"""A job whose nodes have all joined: what its members send to the scheduler, and what it answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import ChunkSizes
from netstorm.protocol.frames import Peer
from netstorm.pslite.proofs import proof_for_resume
from netstorm.scheduler.awareness import FailedLinkRecord
from netstorm.scheduler.failures import LinkFailures
from netstorm.scheduler.members import REMIND_EVERY_S, BarrierCount, Members, Suspicion, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import Awareness, InitialAssumptions, check_policy
from netstorm.scheduler.replay_log import (
    BarrierArrival,
    Began,
    Installed,
    KeyAdded,
    Leases,
    LoggedOutbox,
    RankFinished,
    ReplayedJob,
)
from netstorm.scheduler.rounds import (
    CallOrder,
    Consistency,
    Grant,
    KeyConflict,
    KeyRegistry,
    ReplicaCheck,
    RoundAuthority,
    StateServer,
    policies_needed,
)
from netstorm.scheduler.snapshot import Announcements
from netstorm.topology.policy import Policy, owner_weights

__all__ = ["Job"]


_log = logging.getLogger(__name__)

_MOST_CHARACTERS: Final = 2000
"""Of what a node says that it waits for."""

_STATUS_EVERY_S: Final = 30.0
"""How often the log says how the job is doing."""

_LEAD_S: Final = 0.25
"""Rounds granted in advance: nodes need not report each short one, and another policy applies no later than
anybody notices."""

_AWAY_S: Final = 2.5
"""The same if the scheduler can come back: twice what it takes to begin on a quiet machine, and for how long
reports of short rounds may gather."""

_COME_BACK_S: Final = 0.25
"""How long nodes have to come back to a scheduler that was restarted before it looks whether they are there.
Who needs longer loses nothing, as long as its process listens."""


class Job:
    """The members and all that they share. A method that finds that the job cannot go on returns the reason.

    What rounds in progress may need of keys, policies and moved chunks is kept, for nodes that lose their
    session with this scheduler and ask again.

    Attributes:
        members: its nodes.
        finished: by rank, the last round that it pushed of each key. Only ranks that will push no more.
        silent: ranks that have joined later and contribute nothing yet.
        keys: the registered keys.
        authority: checks what nodes say.
        awareness: what is measured, and what follows from it; None: awareness is off.
        announcements: what nodes report of themselves and of their links, for people.
        link_failures: links that have failed, and policies without them.
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
            reproducible: results are the same in each run, so they follow nothing that is measured, and a
                key's trees do not depend on who registers it first.
        """
        # Nodes need time to find a scheduler that was restarted.
        heard_at = now + (options.link_timeout_s if replayed else 0)
        self.members: Final = Members(members, options, outbox, heard_at)
        self.finished: Final[dict[int, dict[int, int]]] = {}
        self.silent: tuple[int, ...] = ()
        self.reproducible: Final = reproducible or (replayed is not None and replayed.began.reproducible)
        chunks = _chunk_sizes(self.members, options, assumed or planned, replayed)
        size = len(members)
        absent = set(range(size)) - set(self.members.present)  # places that no node has yet
        self.keys: Final = KeyRegistry(chunks, by_name=self.reproducible)
        self.awareness: Final = None if assumed is None else self._aware(assumed, policy, now)
        self.announcements: Final = Announcements(size)
        self.link_failures: Final = LinkFailures(size, assumed or planned)
        self.link_failures.without_all(absent)
        self._options: Final = options
        self._outbox: Final = outbox
        self._owners: Final = owner_weights(policy) if replayed is None else replayed.began.owners
        self._policies = {policy.version: policy}
        """By version: those that some node may still have to be told."""
        lead_s = 0.0 if options.elastic else _LEAD_S  # who joins takes part from the first round not granted
        lead_s = _AWAY_S if outbox.keeps_log else lead_s  # no other scheduler comes back as soon
        self._consistency: Final = Consistency(size, policy.version, lead_s=lead_s)
        self.authority: Final = RoundAuthority(self.keys, self._consistency, size)
        self._leases: Final = Leases(() if replayed is None else replayed.granted)
        self._moves: Final[dict[tuple[int, int], list[m.Moved]]] = {}
        """By key and round, of rounds that are not complete everywhere: chunks that moved to a later policy.
        """
        self._calls: Final = CallOrder()
        self._barriers: Final = BarrierCount(size)
        self._replicas: Final = ReplicaCheck(size)
        self._state_server: StateServer | None = None
        """Once a node has reported its local steps."""
        self._remind_at = now + REMIND_EVERY_S
        self._status_at = now + _STATUS_EVERY_S
        self._to_come: Final = set(self.members.present if replayed is not None else ())
        """Members of a job that another process served, which have not come back to this one yet."""
        self._come_by = now + _COME_BACK_S
        for rank in absent:
            self._barriers.exclude(rank)
        if replayed is None:
            outbox.record(self._began(policy, chunks))
        else:
            self._restore(replayed, now)
        for rank in absent:
            self._consistency.without(rank)

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

    def _restore(self, replayed: ReplayedJob, now: float) -> None:
        """Go on where another process stopped.

        Raises:
            UsageError: the log contradicts itself.
        """
        self.finished.update(replayed.finished)
        self._policies = dict(replayed.policies)
        for rank, spec in replayed.keys if not replayed.grants else ():  # numbered in the order of the log
            try:
                self.keys.register(rank, spec)
            except ProtocolViolation as error:
                raise UsageError(
                    f"the job's log contradicts itself ({error}): remove it to begin anew"
                ) from None
        for (rank, spec), grant in zip(replayed.keys, replayed.grants, strict=False):
            self.keys.restore(rank, spec, grant)
        for key, (rows, granted) in enumerate(zip(replayed.rows, replayed.granted, strict=True)):
            self._consistency.restore(key, self.keys.spec(key), rows, granted)
        self.silent = replayed.policies[replayed.version].silent
        if replayed.view_version >= 0:
            self._consistency.begin_view(replayed.view_version, self.silent)
        for rank in self.silent:
            self._consistency.without(rank)
        for rank in (*self.silent, *(replayed.finished if self._options.joins else ())):
            self._barriers.exclude(rank)
        self._barriers.restore(replayed.barriers, now, reached=replayed.reached)

    @property
    def all_finished(self) -> bool:
        """Whether no node will push any more."""
        return all(rank in self.finished for rank in self.members.present)

    # ------------------------------------------------------------------------------------ from first to last

    def welcome(self, rank: int, now: float) -> None:
        """Tell a node that it has joined, and everything that it may need to know."""
        self.members.liveness.heard(rank, now)
        oldest, *newer = self.policies()
        self._send(rank, self._joined(rank, oldest))
        for policy in newer:
            self._send(rank, m.NewPolicy(policy=policy))
        self._send_events(rank)

    def _joined(self, rank: int, policy: Policy) -> m.Joined:
        return m.Joined(
            rank=rank,
            members=self.members.all,
            policy=policy,
            heartbeat_interval_s=self._options.heartbeat_interval_s,
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
            joins=self._options.joins,
            owners=self._owners,
            resume_s=(
                self._options.scheduler_timeout_s if self._outbox.keeps_log or self._options.majority else 0.0
            ),
            elastic=self._options.elastic,
            barriers=self._barriers.oldest,
            majority=self._options.majority,
            proof_key=m.HiddenKey(self._proof_key(rank)),
            reproducible=self.reproducible,
        )

    def _send_events(self, rank: int) -> None:
        """Tell a node which links have failed and which ranks have finished."""
        if self.link_failures.failures:
            self._send(rank, m.FailedLinks(links=self.link_failures.detours()))
        for other, last_rounds in self.finished.items():
            self._send(rank, m.PeerFinished(rank=other, last_rounds=last_rounds))

    def receive(  # noqa: C901 -- a case for each message
        self, rank: int, message: m.Message, now: float
    ) -> m.PeerGone | None:
        """Handle a member's message. Returns why the job cannot go on, if so.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        match message:
            case m.Heartbeat():
                self.members.liveness.waiting_for(rank, message.busy[:_MOST_CHARACTERS])
            case m.TopologyRequest():
                return self._begun(rank, message.begun, now)
            case m.RegisterKeys():
                return self._register(rank, message.keys, now)
            case m.NodeStatus():
                self.announcements.record_status(rank, message, now)
                if self.awareness is not None:
                    self.awareness.adaptation.rounds.record(rank, message.last_round, message.round_s)
            case m.Measured():
                self.announcements.record_links(rank, message, now)
                if self.awareness is not None:
                    self.awareness.collector.record(rank, message, now)
            case m.StepTimes():
                self._local_steps(rank, message, now)
            case m.CallsWaiting():
                return self._compare_calls(rank, message)
            case m.CallTimedOut():
                self.authority.check_timed_out(rank, message)
                self._calls.timed_out(rank, message, now)
            case m.Moved():
                self._moved(rank, message)
            case m.ReplicaDigest():
                return self._compare_replicas(rank, message)
            case m.Barrier():
                return self._arrive(rank, message.number, now)
            case m.Resume():
                return self._resume(rank, message, now)
            case m.Suspect():
                return self._suspect(rank, message, now)
            case m.LinkRestored():
                self._link_restored(rank, message)
            case m.Finished():
                return self._finish(rank, message.last_rounds, now)
            case m.Failed():
                reason = f"{self.members.describe(rank)} failed: {message.reason}"
                return m.PeerGone(rank=rank, kind="failed", reason=reason)
            case m.Leave():
                return self.lost(rank, "it left before all had finished", now)
            case _:
                raise ProtocolViolation(
                    f"rank {rank} sent a {type(message).__name__}, which the scheduler does not take"
                )
        return None

    def _resume(self, rank: int, message: m.Resume, now: float) -> m.PeerGone | None:
        """Answer a node whose session with another scheduler process ended. Asking twice changes nothing."""
        _log.info("%s is back", self.members.describe(rank))
        self._to_come.discard(rank)
        self._send(rank, m.Resumed(proof=proof_for_resume(self._proof_key(rank), message.number)))
        for policy in self.policies():
            self._send(rank, m.NewPolicy(policy=policy))
        self._send_events(rank)
        self._resume_view(rank, message, now)
        for target in message.suspected:
            self._note_suspicion(rank, target, "it could not be reached before", now)
        gone = None
        if message.keys:
            gone = self._register(rank, message.keys, now)
        if gone is None and message.begun:
            gone = self._begun(rank, message.begun, now)
        for move in self._all_moves():
            self._send(rank, move)
        for move in message.moved if gone is None else ():
            self._moved(rank, move)
        for number in message.barriers if gone is None else ():
            gone = gone or self._arrive_again(rank, number, now)
        if gone is None and message.last_rounds is not None and rank not in self.finished:
            gone = self._finish(rank, message.last_rounds, now)
        return gone

    def _resume_view(self, rank: int, message: m.Resume, now: float) -> None:
        """A named point for jobs that nodes may leave: tell a node that is back what it may have missed."""

    def _finish(self, rank: int, last_rounds: dict[int, int], now: float) -> m.PeerGone | None:
        if rank in self.finished:
            raise ProtocolViolation(f"rank {rank} finishes a second time")
        self.finished[rank] = last_rounds
        self._outbox.record(RankFinished(rank=rank, last_rounds=last_rounds))
        self.members.liveness.did(rank, "it finished", now)
        others = [other for other in self.members.present if other != rank]
        self.members.send(others, m.PeerFinished(rank=rank, last_rounds=last_rounds))
        self._regrant_steps()
        if self._options.joins:
            self._send_reached(self._barriers.exclude(rank))
        return self._in_vain()

    def tick(self, now: float) -> m.PeerGone | None:
        """Do what is due. Returns why the job cannot go on, if so."""
        self._watch_busy(now)
        self._ask_for_missing(now)
        gone = self.members.liveness.check(now) or self._check_links(now)
        if gone is None and (timed_out := self._calls.decision(now)) is not None:
            gone = m.PeerGone(rank=-1, kind="timeout", reason=timed_out)
        if gone is None and now >= self._remind_at:
            self._remind_at = now + REMIND_EVERY_S
            gone = self._remind(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_EVERY_S
            _log.info("%s", self.status_text(now))
        return gone

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(
            self._remind_at,
            self._status_at,
            self._come_by if self._to_come else math.inf,
            self.members.liveness.next_check(),
            self._calls.decide_at(),
        )

    def status_text(self, now: float) -> str:
        """Return how the job is doing, in one line."""
        busy = self.members.liveness.busy_texts(now)
        waits = self.members.liveness.waiting_texts()
        view = self.view_waiting_text()
        return (
            f"job {self._options.job!r}: {len(self.members.present)} nodes, {len(self.keys)} keys, "
            f"policy version {self.policy.version}, {len(self.finished)} finished"
            + (f"; {view}" if view else "")
            + (f"; {list_some(busy)}" if busy else "")
            + (f"; waiting: {list_some(waits)}" if waits else "")
        )

    def view_waiting_text(self) -> str:
        """Return for whose reports the present view waits; empty: for none."""
        return ""

    # --------------------------------------------------------------------------------- keys, rounds, policies

    @property
    def policy(self) -> Policy:
        """The policy of all rounds that no node has been granted yet."""
        return self._policies[self._consistency.version]

    def policies(self) -> list[Policy]:
        """Return the policies that a node may need, the oldest first."""
        return [self._policies[version] for version in sorted(self._policies)]

    def install(self, policy: Policy) -> dict[int, int]:
        """Let a new policy apply, in each key, from the first round that no node has been granted. Return
        these rounds.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        check_policy(policy, nodes=len(self.members), after=self._consistency.version)
        policy = self._with_members(policy)
        starts = self._bind(policy)
        self.members.send_all(m.NewPolicy(policy=policy))
        return starts

    def _with_members(self, policy: Policy) -> Policy:
        """A named point for jobs that nodes may leave: their policies name the members."""
        return policy

    def _bind(self, policy: Policy) -> dict[int, int]:
        self._policies[policy.version] = policy
        starts = self._consistency.install(policy.version)
        self._outbox.record(Installed(policy=policy, starts=tuple(starts.items())))
        self._forget_moves()
        moved = {move.version for move in self._all_moves()}
        self._policies = policies_needed(self._policies, self._consistency.versions_in_use() | moved)
        return starts

    def _register(self, rank: int, specs: Iterable[m.KeySpec], now: float) -> m.PeerGone | None:
        """Number a node's keys, and bind their first rounds.

        Raises:
            ProtocolViolation: no correct node registers them.
        """
        grants, bindings = [], []
        for spec in specs:
            self._check_members(rank, spec)
            number_of_next = len(self.keys)
            grant = self.keys.register(rank, spec)
            if isinstance(grant, KeyConflict):
                return m.PeerGone(rank=-1, kind="key", reason=str(grant))
            if grant.key == number_of_next:
                if self.silent:
                    self.members.send(self.silent, m.KeysAnnounced(keys=(spec,), grants=(grant,)))
                self._outbox.record(KeyAdded(rank=rank, spec=spec, version=self._consistency.version))
            self._consistency.add_key(grant.key, spec)
            grants.append(grant)
            bindings += self._consistency.bindings(grant.key, 0)
        self.members.liveness.did(rank, f"it registered {len(grants)} keys", now)
        self._send(rank, m.KeysRegistered(grants=tuple(grants), bindings=tuple(bindings)))
        if self.awareness is not None:
            self.awareness.record_keys(self.keys, now)
        return None

    def _check_members(self, rank: int, spec: m.KeySpec) -> None:
        """Check the members of a key.

        Raises:
            ProtocolViolation: no correct node registers it.
        """
        members, size = spec.members, len(self.members)
        if not members:
            return
        if rank not in members or list(members) != sorted(set(members)):
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} for ranks {list(members)}: expected ascending ranks "
                "with its own among them"
            )
        if members[0] < 0 or members[-1] >= size:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} for ranks {list(members)}: expected ranks below {size}"
            )

    def _begun(self, rank: int, begun: Sequence[m.RoundBegun], now: float) -> m.PeerGone | None:
        """Grant a node that has begun rounds the next ones.

        Raises:
            ProtocolViolation: no correct node can have begun them.
        """
        for event in begun:  # before anything is granted
            if event.key not in self.keys:
                raise ProtocolViolation(
                    f"rank {rank} asks about key {event.key}, which nobody has registered"
                )
            self._consistency.check(rank, event)
        bindings = []
        for event in begun:
            conflict = self._consistency.begun(rank, event, now)
            if conflict is not None:
                where = "" if conflict.collective else f"{self._name(event)}: "
                return m.PeerGone(rank=-1, kind="disagreement", reason=f"{where}{conflict}")
            # Not later: what the next event completes may forget the row that this round runs under.
            bindings += self._consistency.bindings(event.key, event.round)
        for event in begun[-1:]:
            self.members.liveness.did(rank, self._name(event), now)
        if self._outbox.keeps_log:
            granted = ((event.key, self._consistency.granted(event.key)) for event in begun)
            self._outbox.record(self._leases.extend(granted))
        self._send(rank, m.TopologyAnswer(bindings=tuple(bindings)))
        return None

    def _name(self, event: m.RoundBegun) -> str:
        return f"round {event.round} of key {self.keys.name(event.key)!r}"

    def _moved(self, rank: int, message: m.Moved) -> None:
        """Tell all nodes which chunks their root has moved to a later policy.

        Raises:
            ProtocolViolation: the key or the policy is unknown, or the node is not the chunks' root.
        """
        if message.key not in self.keys or not 0 <= message.version <= self._consistency.version:
            raise ProtocolViolation(
                f"rank {rank} moved chunks of key {message.key} to policy {message.version}: expected "
                f"one of {len(self.keys)} keys, and a version up to {self._consistency.version}"
            )
        moves = self._moves.get((message.key, message.round), [])
        if message not in moves:
            self.authority.check_moved(rank, message, moves, self._policies)
            self._moves[message.key, message.round] = [*moves, message]
        self._forget_moves()
        members = self.keys.spec(message.key).members
        if self.silent and not members:  # they begin no round, so nothing else tells them what it is bound to
            bindings = self._consistency.bindings(message.key, message.round)
            self.members.send(self.silent, m.TopologyAnswer(bindings=tuple(bindings)))
        self.members.send(members or range(len(self.members)), message)

    def _all_moves(self) -> list[m.Moved]:
        return [move for moves in self._moves.values() for move in moves]

    def _forget_moves(self) -> None:
        complete = [key_round for key_round in self._moves if self._consistency.is_complete(*key_round)]
        for key_round in complete:
            del self._moves[key_round]

    # ------------------------------------------------------------------------- comparing calls and replicas

    def _compare_calls(self, rank: int, message: m.CallsWaiting) -> m.PeerGone | None:
        """Compare collective calls that wait at a rank with those of the others."""
        for call in message.calls:
            self.authority.check_call(rank, call)
            conflict = self._calls.record(rank, call)
            if conflict is not None:
                return m.PeerGone(rank=-1, kind="disagreement", reason=str(conflict))
        return None

    def _compare_replicas(self, rank: int, message: m.ReplicaDigest) -> m.PeerGone | None:
        self.authority.check_digest(rank, message)
        drift = self._replicas.record(rank, message.key, message.round, message.digest)
        if drift is None:
            return None
        reason = (
            f"after round {drift.round} of key {self.keys.name(drift.key)!r} rank {drift.rank} holds "
            f"other values than rank {drift.first_rank}: the replicas have drifted apart; the update rule "
            "must do the same on all ranks (no randomness of its own, no values that differ between ranks)"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)

    # ---------------------------------------------------------------------------------------- local steps

    def _local_steps(self, rank: int, message: m.StepTimes, now: float) -> None:
        """Handle a node's report of its local steps; see `StateServer`.

        Raises:
            ProtocolViolation: no correct node reports that.
        """
        self.members.liveness.did(rank, f"it took the local steps of round {message.round}", now)
        if self._state_server is None:
            self._state_server = StateServer()
        for grant in self._state_server.report(rank, message, self._stepping(), now):
            self._grant_steps(message.training, grant)

    def _regrant_steps(self) -> None:
        """Wait no more for ranks that have left or finished, and wait for those that have caught up."""
        if self._state_server is not None:
            for grant in self._state_server.members_changed(self._stepping(), self.members.present):
                self._grant_steps(*grant)

    def _stepping(self) -> list[int]:
        left_out = {*self.finished, *self.silent}
        return [rank for rank in self.members.present if rank not in left_out]

    def _grant_steps(self, training: int, grant: Grant) -> None:
        rank, round, steps = grant
        self._send(rank, m.StepsGranted(training=training, round=round, steps=steps))

    # ------------------------------------------------------------------------------------------- barriers

    def _arrive(self, rank: int, number: int, now: float) -> m.PeerGone | None:
        """Handle a node's arrival at a barrier.

        Raises:
            ProtocolViolation: it is not the node's next barrier.
        """
        self.members.liveness.did(rank, f"it came to barrier {number}", now)
        reached = self._barriers.arrive(rank, number, now)
        self._outbox.record(BarrierArrival(rank=rank, number=number))
        self._send_reached(reached)
        if number not in reached and self._barriers.is_reached(number):  # the others were there before it
            self._send(rank, m.BarrierReached(number=number))
        return self._in_vain()

    def _arrive_again(self, rank: int, number: int, now: float) -> m.PeerGone | None:
        """Handle a node that says again that it waits at a barrier: its message or the answer may be lost.

        Raises:
            ProtocolViolation: it has not arrived there before, and it is not its next barrier.
        """
        if self._barriers.is_reached(number):
            self._send(rank, m.BarrierReached(number=number))
        elif not self._barriers.has_arrived(rank, number):
            return self._arrive(rank, number, now)
        return None

    def _send_reached(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            arrived = [rank for rank in self.members.present if self._barriers.has_arrived(rank, number)]
            self.members.send(arrived, m.BarrierReached(number=number))

    def _in_vain(self) -> m.PeerGone | None:
        """Return why nodes wait in vain, if they wait for a rank that has finished."""
        never = self._barriers.never_coming(self.finished)
        if not never:
            return None
        reason = (
            f"{_ranks(self._barriers.waiting())} waits at barrier {self._barriers.oldest}, but "
            f"{_ranks(never)} has finished without coming to it: every rank must come to every barrier"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)

    def _remind(self, now: float) -> m.PeerGone | None:
        """Tell nodes that wait at a barrier for whom they wait."""
        missing = self._barriers.missing()
        waited, limit = now - self._barriers.since, self._options.wait_timeout_s
        if not missing or waited < REMIND_EVERY_S:
            return None
        nodes = len(self.members.present)
        text = f"barrier {self._barriers.oldest}: waiting for {len(missing)} of {nodes} nodes: " + list_some(
            self.members.describe(rank) for rank in missing
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
        self.members.send(self._barriers.waiting(), m.Waiting(text=text))
        return None

    # ------------------------------------------------------------------------------ who is alive, which links

    def lost(self, rank: int, reason: str, now: float) -> m.PeerGone:
        """Return the message that a rank is lost, with the last sign of life from it."""
        text = (
            f"{self.members.describe(rank)} is lost: {reason}; {self.members.liveness.last_heard(rank, now)}"
        )
        return m.PeerGone(rank=rank, kind="lost", reason=text)

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

    def _ask_for_missing(self, now: float) -> None:
        """Ask about members that have not come back to this process. Their connections ended with the one
        before, so one that has died meanwhile leaves no other sign here before its heartbeats are overdue.
        """
        if not self._to_come or now < self._come_by:
            return
        missing = self._to_come.intersection(self.members.present)
        self._to_come.clear()
        for rank in sorted(missing):
            self.members.liveness.ended.disconnected(rank, now)
        self.members.inquire(sorted(missing))

    def _watch_busy(self, now: float) -> None:
        """Ask about ranks whose heartbeats are overdue, and tell all others which of them are busy."""
        liveness = self.members.liveness
        if now >= liveness.next_check():
            overdue = liveness.overdue(now)
            self.members.inquire(overdue)
            self.members.send(liveness.take_unprobed(overdue), m.Probe())
        texts = list(liveness.take_warnings(now))
        for text in texts:
            _log.warning("%s", text)
        if texts:  # in one message: with hundreds of nodes, a message to each about each takes seconds
            self.members.send_all(m.Waiting(text=list_some(texts)))

    def _suspect(self, rank: int, message: m.Suspect, now: float) -> m.PeerGone | None:
        """Handle a rank's report that it cannot reach another one. Returns that it is lost, if it is."""
        if message.busy:
            if message.rank in self.members.present and self.members.liveness.runs(message.rank, now):
                self._send(rank, m.Alive(rank=message.rank))
            return None
        if not message.refused:
            self._note_suspicion(rank, message.rank, message.reason, now)
            return None
        if message.rank not in self.members.present:
            return None
        self._send(message.rank, m.Probe())
        return self.refused(message.rank, f"rank {rank} says: {message.reason}", now)

    def _note_suspicion(self, rank: int, target: int, reason: str, now: float) -> None:
        """Record that a node cannot reach another one, which may be lost.

        Raises:
            ProtocolViolation: there is no such node.
        """
        if target == rank or not 0 <= target < len(self.members):
            raise ProtocolViolation(f"rank {rank} suspects rank {target}")
        is_new = target in self.members.present and self.members.liveness.suspect(rank, target, reason, now)
        if is_new:
            _log.warning("rank %d cannot reach %s: %s", rank, self.members.describe(target), reason)

    def _check_links(self, now: float) -> m.PeerGone | None:
        """Go on without links that have failed while both ends are alive. Returns why that is impossible."""
        gone = None
        for suspicion in self.members.liveness.pop_link_failures():
            gone = gone or self._link_failed(suspicion, now)
        if gone is None and self.link_failures.failures and self.policy.members:
            gone = self._cut_off(now)  # the node on a detour has left
        return gone

    def _link_failed(self, suspicion: Suspicion, now: float) -> m.PeerGone | None:
        policy = self.policy
        failure = FailedLinkRecord(suspicion.by, suspicion.rank, suspicion.reason, now)
        if not self.link_failures.fail(failure, policy):
            lost = suspicion.rank
            if policy.members:
                lost = self.link_failures.cut_off(policy.silent, [(suspicion.by, suspicion.rank)])[0]
            return self.members.liveness.link_lost(suspicion, now, lost=lost)
        _log.warning(
            "the link from %s to %s has failed (%s); the job goes on without it",
            self.members.describe(suspicion.by),
            self.members.describe(suspicion.rank),
            suspicion.reason,
        )
        self._announce_links()
        return None

    def _cut_off(self, now: float) -> m.PeerGone | None:
        for rank in self.link_failures.cut_off(self.policy.silent):
            records = self.link_failures.failures.values()
            own = [record for record in records if rank in (record.source, record.target)]
            record = (own or list(records))[0]
            suspicion = Suspicion(record.source, record.target, record.reason, now)
            return self.members.liveness.link_lost(suspicion, now, lost=rank)
        return None

    def _link_restored(self, rank: int, message: m.LinkRestored) -> None:
        """Handle a node's report that it can reach another one again.

        Raises:
            ProtocolViolation: there is no such node.
        """
        if message.rank == rank or not 0 <= message.rank < len(self.members):
            raise ProtocolViolation(f"rank {rank} reaches rank {message.rank} again")
        self.members.liveness.withdraw(rank, message.rank)
        if self.link_failures.restore(rank, message.rank):
            target = self.members.describe(message.rank)
            _log.warning("the link from %s to %s works again", self.members.describe(rank), target)
            self._announce_links()

    def _announce_links(self) -> None:
        """Tell all nodes which links have failed, and the ways around them."""
        if self.awareness is not None:
            self.awareness.collector.exclude(self.link_failures.avoided)
        self.members.send_all(m.FailedLinks(links=self.link_failures.detours()))

    def _proof_key(self, rank: int) -> bytes:
        return self._options.secret.key_for(self._options.job, self.members.all[rank])

    def _send(self, rank: int, message: m.Message) -> None:
        self.members.send([rank], message)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "each of ranks ") + list_some(map(str, ranks))


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
