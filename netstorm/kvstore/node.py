"""The general node: trains, aggregates and forwards. A pure state machine (design, §3 and §5).

Its life: `joining` until the scheduler has all nodes, `running`, `finishing` once the user's program will push no more,
and `over`. A failure, whoever's it is, ends everything that is outstanding and every later call with the same error.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from netstorm import errors
from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.kvstore.aggregation import Aggregation
from netstorm.kvstore.bindings import Bindings
from netstorm.kvstore.keys import Key
from netstorm.kvstore.operation import Done, Operation
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.machine import Admission, Admit, Become, Call, Connect, Disconnect, Instruction, NotYet, Refuse, Send

__all__ = ["GeneralNode", "NodeOptions", "State"]

_log = logging.getLogger(__name__)

_KINDS: Final[dict[str, type[NetStormError]]] = {
    "lost": errors.NodeLost,
    "failed": errors.NodeFailed,
    "disagreement": errors.Disagreement,
    "key": errors.KeyMismatch,
    "refused": errors.JoinRefused,
    "timeout": errors.WaitTimeout,
    "stopped": errors.SchedulerLost,
}
"""What `PeerGone.kind` is called here."""

_SAY_EVERY_S: Final = 10.0
"""How often a node that waits says for what."""


class State(enum.Enum):
    """Where a node is in its life."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a general node must know before it joins."""

    scheduler_host: str
    scheduler_port: int
    host: str
    """Address that others can reach this node at."""
    port: int
    job: str = "default"
    site: str = ""
    asked_rank: int = -1
    num_workers: int = 1
    release: str = ""
    pid: int = 0
    must_agree: tuple[tuple[str, str], ...] = ()
    """Job-wide settings given explicitly: (variable, value)."""
    join_timeout_s: float = 300.0
    wait_timeout_s: float = 3600.0


class GeneralNode:
    """One rank. Implements `pslite.machine.Machine`; the methods under "what the user wants" are for the runtime."""

    def __init__(self, options: NodeOptions, *, now: float, counters: Counters | None = None) -> None:
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.state = State.JOINING
        self.rank = -1
        self.members: tuple[m.Member, ...] = ()
        self.chunk_size = 0
        self.failure: NetStormError | None = None
        self._aggregation: Aggregation | None = None
        self._bindings: Bindings | None = None
        self._instructions: list[Instruction] = []
        self._join_deadline = now + options.join_timeout_s
        self._on_joined: list[Done] = []
        self._last_waiting = ""
        self._keys: dict[tuple[int, str], Key] = {}
        self._to_register: list[Key] = []
        self._unregistered: dict[tuple[int, str], list[Operation]] = {}
        self._barrier_number = 0
        self._barriers: dict[int, tuple[float, Done]] = {}
        self._finished_peers: dict[int, dict[int, int]] = {}
        self._on_finished: list[Done] = []
        self._finish_deadline = math.inf
        self._suspected: dict[int, tuple[float, str]] = {}
        self._heartbeat_interval_s = 1.0
        self._heartbeat_timeout_s = 10.0
        self._next_heartbeat = math.inf
        self._next_look = now + _SAY_EVERY_S
        self._ask_to_join()

    def _ask_to_join(self) -> None:
        options = self.options
        self._instructions += [
            Connect(peer=SCHEDULER, host=options.scheduler_host, port=options.scheduler_port),
            Send(
                peer=SCHEDULER,
                message=m.Join(
                    asked_rank=options.asked_rank,
                    num_workers=options.num_workers,
                    host=options.host,
                    port=options.port,
                    site=options.site,
                    release=options.release,
                    pid=options.pid,
                    must_agree=dict(options.must_agree),
                ),
            ),
        ]

    # --------------------------------------------------------------------------------------- what the user wants

    def on_joined(self, done: Done) -> None:
        """Call `done` when all nodes are here, or why that will not happen."""
        self._call_or_keep(self._on_joined, done, ready=self.state is not State.JOINING)

    def register(self, key: Key, now: float) -> None:
        """Make a key known to the job. Operations on it may be submitted at once."""
        self._keys[key.spec.namespace, key.name] = key
        self._to_register.append(key)

    def submit(self, operation: Operation, now: float) -> None:
        """Begin an all-reduce as soon as it may begin; its `done` is called in any case."""
        if self.failure is not None:
            self._complete(operation.done, self.failure)
        elif operation.key.identity < 0:
            operation.begun_at = now
            identity = (operation.key.spec.namespace, operation.key.name)
            self._unregistered.setdefault(identity, []).append(operation)
        else:
            self._running().submit(operation, now)
            self._check_for_finished_peers()

    def barrier(self, done: Done, now: float) -> None:
        """Call `done` when every rank has come to as many barriers as this one."""
        if self.failure is not None:
            self._complete(done, self.failure)
            return
        self._barriers[self._barrier_number] = (now, done)
        self._send(m.Barrier(number=self._barrier_number))
        self._barrier_number += 1

    def finish(self, done: Done, now: float) -> None:
        """Push no more; call `done` when nobody needs this node any longer. What is outstanding is finished first."""
        if self.failure is None and self.state is State.RUNNING:
            self.state = State.FINISHING
            self._finish_deadline = now + self.options.wait_timeout_s
            self._flush()
            used = {key.identity: key.last_taken for key in self._keys.values() if key.identity >= 0}
            self._send(m.Finished(last_rounds=used))
        self._call_or_keep(self._on_finished, done, ready=self.state is State.OVER)

    def fail(self, reason: str, now: float) -> None:
        """Tell everybody that this rank's program has failed, and stop."""
        self._stop(errors.Closed(f"rank {self.rank} has failed: {reason}"), say=reason)

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding; say nothing to anybody."""
        wrapped = error if isinstance(error, NetStormError) else errors.Closed(f"the I/O thread has died: {error!r}")
        self._stop(wrapped)

    def outstanding(self) -> int:
        """Return how many operations are not complete."""
        queued = sum(len(operations) for operations in self._unregistered.values())
        return queued + (0 if self._aggregation is None else sum(1 for _ in self._aggregation.outstanding()))

    # -------------------------------------------------------------------------------------- what others want

    def admit(self, hello: m.Hello) -> Admission:
        """Let in the members of this job, and nobody else."""
        if hello.job != self.options.job:
            return Refuse(f"this is a node of job {self.options.job!r}, not of {hello.job!r}")
        if self.failure is not None or self.state is State.OVER:
            return Refuse(f"rank {self.rank} has left the job")
        if self.state is State.JOINING:
            return NotYet()
        if hello.receiver != self.rank:
            return Refuse(f"this is rank {self.rank}, not rank {hello.receiver}")
        if not 0 <= hello.sender < len(self.members):
            return Refuse(f"no rank {hello.sender} in a job of {len(self.members)} nodes")
        if self.members[hello.sender].incarnation != hello.incarnation:
            return Refuse(f"another process is rank {hello.sender} of this job")
        return Admit(Peer(hello.sender))

    def receive(self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float) -> None:
        """Take a message from a peer."""
        if self.failure is not None:
            return
        if isinstance(message, m.Part):
            if peer == SCHEDULER:
                raise ProtocolViolation("the scheduler sends no parts")
            self._running().receive(peer, message, payload, payload_crc)
            return
        handler = _FROM_SCHEDULER.get(type(message))
        if peer != SCHEDULER or handler is None:
            raise ProtocolViolation(f"a general node takes no {type(message).__name__} from peer {peer}")
        handler(self, message, now)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        if self.failure is not None or self.state is State.OVER:
            return
        if peer != SCHEDULER:
            self._suspected[int(peer)] = (now, reason)
            self._send(m.Suspect(rank=int(peer), reason=reason))
        elif self.state is State.JOINING and now < self._join_deadline:
            _log.warning("no scheduler yet: %s; set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT if that is wrong", reason)
            self._instructions.append(Disconnect(peer=SCHEDULER, at_once=True))
            self._ask_to_join()
        else:
            self._stop(errors.SchedulerLost(f"rank {self.rank} cannot reach the scheduler any more: {reason}"))

    def tick(self, now: float) -> None:
        """Send what is due, and look at deadlines."""
        self._flush()
        if self.failure is not None or self.state is State.OVER:
            return
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_interval_s
            self._send(m.Heartbeat(busy=self._waiting_text(now)))
        if self.state is State.JOINING and now >= self._join_deadline:
            missing = self._last_waiting or f"no answer from {self._scheduler_name()}"
            limit = self.options.join_timeout_s
            self._blame(errors.WaitTimeout(f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {missing}"))
            return
        for rank, (since, reason) in self._suspected.items():
            if now - since > self._heartbeat_timeout_s + _DECISION_S:
                self._blame(errors.NodeLost(f"{self._describe(rank)} cannot be reached from rank {self.rank}: {reason}"))
                return
        if now >= self._next_look:
            self._next_look = now + _SAY_EVERY_S
            self._look_at_deadlines(now)

    def next_tick(self) -> float:
        """Return when something is due."""
        if self._to_register or (self._aggregation is not None and self._aggregation.begun):
            return 0.0
        if self.failure is not None or self.state is State.OVER:
            return math.inf
        due = min(self._next_heartbeat, self._next_look)
        return min(due, self._join_deadline) if self.state is State.JOINING else due

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken = self._instructions
        if self._aggregation is not None and self._aggregation.instructions:
            taken += self._aggregation.instructions
            self._aggregation.instructions = []
        self._instructions = []
        return taken

    # ------------------------------------------------------------------------------------------ the scheduler says

    def _joined(self, message: m.Joined, now: float) -> None:
        if self.state is not State.JOINING:
            raise ProtocolViolation("joined twice")
        self.state = State.RUNNING
        self.rank, self.members, self.chunk_size = message.rank, message.members, message.chunk_size
        self._heartbeat_interval_s = message.heartbeat_interval_s
        self._heartbeat_timeout_s = message.heartbeat_timeout_s
        self._next_heartbeat = now
        self._bindings = Bindings(self.rank)
        self._bindings.install(message.policy)
        self._aggregation = Aggregation(self.rank, self._bindings, self.counters)
        self._instructions.append(Become(rank=self.rank))
        for member in self.members:
            if member.rank != self.rank:
                self._instructions.append(Connect(peer=Peer(member.rank), host=member.host, port=member.port))
        self._complete_all(self._on_joined, None)

    def _waiting(self, message: m.Waiting, now: float) -> None:
        self._last_waiting = message.text
        _log.warning("%s", message.text)

    def _keys_registered(self, message: m.KeysRegistered, now: float) -> None:
        aggregation, bindings = self._running(), self._bindings
        assert bindings is not None
        for binding in message.bindings:
            bindings.bind(binding)
        for grant in message.grants:
            key = self._keys.get((grant.namespace, grant.name))
            if key is None or key.identity >= 0:
                raise ProtocolViolation(f"the scheduler grants key {grant.name!r}, which was not asked for")
            key.granted(grant, self.chunk_size)
            aggregation.add_key(key)
            for operation in self._unregistered.pop((grant.namespace, grant.name), ()):
                aggregation.submit(operation, operation.begun_at)
        self._check_for_finished_peers()

    def _topology_answer(self, message: m.TopologyAnswer, now: float) -> None:
        assert self._bindings is not None
        for binding in message.bindings:
            self._bindings.bind(binding)
        self._running().advance({binding.key for binding in message.bindings})

    def _new_policy(self, message: m.NewPolicy, now: float) -> None:
        assert self._bindings is not None
        self._bindings.install(message.policy)
        self.counters.add("policies")
        self._running().advance()

    def _barrier_reached(self, message: m.BarrierReached, now: float) -> None:
        waiting = self._barriers.pop(message.number, None)
        if waiting is None:
            raise ProtocolViolation(f"barrier {message.number} was not waited for")
        self._complete(waiting[1], None)

    def _peer_finished(self, message: m.PeerFinished, now: float) -> None:
        self._finished_peers[message.rank] = message.last_rounds
        self._check_for_finished_peers()

    def _all_finished(self, message: m.AllFinished, now: float) -> None:
        self.state = State.OVER
        self._send(m.Leave())
        for member in self.members:
            if member.rank != self.rank:
                self._instructions.append(Disconnect(peer=Peer(member.rank)))
        self._instructions.append(Disconnect(peer=SCHEDULER))
        self._complete_all(self._on_finished, None)

    def _peer_gone(self, message: m.PeerGone, now: float) -> None:
        if message.rank == self.rank and message.kind == "failed":
            return
        self._stop(_KINDS.get(message.kind, errors.Unavailable)(message.reason))

    # --------------------------------------------------------------------------------------------------- helpers

    def _check_for_finished_peers(self) -> None:
        """A round that a finished rank never pushed will not complete: say so now."""
        if not self._finished_peers or self._aggregation is None:
            return
        for operation in self._aggregation.outstanding():
            for rank, last_rounds in self._finished_peers.items():
                last = last_rounds.get(operation.key.identity, -1)
                if operation.round > last:
                    self._uneven(operation, rank, last)
                    return

    def _uneven(self, operation: Operation, rank: int, last: int) -> None:
        self._blame(
            errors.UnevenRounds(
                f"rank {self.rank} waits for {operation}, but {self._describe(rank)} has finished "
                + (f"after round {last}" if last >= 0 else "without ever using that key")
                + ": every rank must push every key equally often (the same number of batches)"
            )
        )

    def _look_at_deadlines(self, now: float) -> None:
        text = self._waiting_text(now)
        if text:
            _log.info("rank %d waits: %s", self.rank, text)
        limit = self.options.wait_timeout_s
        oldest = math.inf if self._aggregation is None else self._aggregation.oldest()
        oldest = min([oldest, *(since for since, _ in self._barriers.values())])
        if now - oldest > limit or now > self._finish_deadline:
            self._blame(errors.WaitTimeout(f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT): {text or self._last_waiting}"))

    def _waiting_text(self, now: float) -> str:
        """Say what this node has been waiting for for a while; empty if for nothing."""
        if self.state is State.JOINING:
            return self._last_waiting or f"waiting for {self._scheduler_name()}"
        if self._aggregation is not None:
            for operation in self._aggregation.outstanding():
                if now - operation.begun_at >= self._heartbeat_interval_s:
                    return self._aggregation.missing_in(operation)
        if self._barriers:
            return f"barrier {min(self._barriers)}: {self._last_waiting}"
        if self.state is State.FINISHING:
            there = sorted(set(range(len(self.members))) - set(self._finished_peers) - {self.rank})
            return f"finished; ranks {there} have not"
        return ""

    def _flush(self) -> None:
        """Send registrations and topology requests, one message for all that have gathered."""
        if self.failure is not None:
            self._to_register.clear()
            return
        if self._aggregation is not None:
            if self._to_register:
                self._send(m.RegisterKeys(keys=tuple(key.spec for key in self._to_register)))
                self._to_register = []
            if self._aggregation.begun:
                self._send(m.TopologyRequest(begun=tuple(self._aggregation.begun)))
                self._aggregation.begun = []

    def _stop(self, error: NetStormError, *, say: str | None = None) -> None:
        """Fail everything, now and later; the first reason stays. `say`: what to tell the others, if they don't know."""
        if self.failure is not None or self.state is State.OVER:
            return
        self.failure = error
        self._send(m.Leave() if say is None else m.Failed(reason=say))
        for member in self.members:
            if member.rank != self.rank:
                self._instructions.append(Disconnect(peer=Peer(member.rank), at_once=True))
        if self._aggregation is not None:
            self._aggregation.fail_all(error)
        for operations in self._unregistered.values():
            for operation in operations:
                self._complete(operation.done, error)
        self._unregistered.clear()
        for _, done in self._barriers.values():
            self._complete(done, error)
        self._barriers.clear()
        self._complete_all(self._on_joined, error)
        self._complete_all(self._on_finished, error)
        self._instructions.append(Disconnect(peer=SCHEDULER))

    def _blame(self, error: NetStormError) -> None:
        """Stop for a reason found here, and tell the others."""
        self._stop(error, say=f"{type(error).__name__}: {error}")

    def _running(self) -> Aggregation:
        if self._aggregation is None:
            raise ProtocolViolation("this node has not joined the job yet")
        return self._aggregation

    def _send(self, message: m.Message) -> None:
        self._instructions.append(Send(peer=SCHEDULER, message=message))

    def _complete(self, done: Done, error: Exception | None) -> None:
        self._instructions.append(Call(function=lambda: done(error)))

    def _complete_all(self, waiting: list[Done], error: Exception | None) -> None:
        for done in waiting:
            self._complete(done, error)
        waiting.clear()

    def _call_or_keep(self, waiting: list[Done], done: Done, *, ready: bool) -> None:
        if ready or self.failure is not None:
            self._complete(done, self.failure)
        else:
            waiting.append(done)

    def _describe(self, rank: int) -> str:
        member = self.members[rank]
        site = f", {member.site}" if member.site else ""
        return f"rank {rank} ({member.host}:{member.port}{site})"

    def _scheduler_name(self) -> str:
        return f"the scheduler at {self.options.scheduler_host}:{self.options.scheduler_port}"


_DECISION_S: Final = 2.0
"""How much longer than the heartbeat time-out a node waits for the scheduler's word on a rank it cannot reach."""

_FROM_SCHEDULER: Final[dict[type[m.Message], Callable[..., None]]] = {
    m.Joined: GeneralNode._joined,
    m.Waiting: GeneralNode._waiting,
    m.KeysRegistered: GeneralNode._keys_registered,
    m.TopologyAnswer: GeneralNode._topology_answer,
    m.NewPolicy: GeneralNode._new_policy,
    m.BarrierReached: GeneralNode._barrier_reached,
    m.PeerFinished: GeneralNode._peer_finished,
    m.AllFinished: GeneralNode._all_finished,
    m.PeerGone: GeneralNode._peer_gone,
}
