"""The general node: trains, aggregates and forwards. A pure state machine (design, §3 and §5).

Its life: `joining` until the scheduler has all nodes, `running`, `finishing` once the user's program will
push no more, and `over`. A failure, whoever's it is, ends everything that is outstanding and every later call
with the same error.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from netstorm import errors
from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.membership.barriers import Barriers
from netstorm.kvstore.membership.node_status import NodeStatusTracker
from netstorm.kvstore.membership.registration import Registration
from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.membership.scheduler_session import SchedulerSession, error_of
from netstorm.kvstore.node.joined_node import JoinedNode
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.kvstore.paths.failed_links import Detours
from netstorm.kvstore.rounds.part_checks import ROUNDS_AHEAD
from netstorm.kvstore.rounds.zero_contributions import Zeros
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.machine import (
    Admission,
    Become,
    Connect,
    Disconnect,
    Instruction,
    NotYet,
    Refuse,
    Send,
)
from netstorm.pslite.measurement.link_meter import LinkMeter
from netstorm.pslite.session.link_state import Links
from netstorm.topology.policy import Policy

__all__ = ["GeneralNode", "State"]

_log = logging.getLogger(__name__)

_SAY_EVERY_S: Final = 10.0
"""How often a node that waits says for what."""

_DECISION_S: Final = 2.0
"""How much longer than the heartbeat time-out a node waits for the scheduler's word on a rank it cannot
reach.
"""


class State(enum.Enum):
    """Where a node is in its life."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


class GeneralNode:
    """One rank. Implements `pslite.machine.Machine`; the methods under "what the user wants" are for the
    runtime.
    """

    def __init__(self, options: NodeOptions, *, now: float, counters: Counters | None = None) -> None:
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.standing: Final = NodeStatusTracker(self.counters)
        self.state = State.JOINING
        self.roster = Roster(-1, ())
        """Empty until the scheduler has all nodes."""
        self.meter: Final = None if options.meter is None else LinkMeter(options.meter, now=now)
        """Observes the traffic; whoever owns the endpoint gives it to it. None: nothing is measured."""
        self.failure: NetStormError | None = None
        self._work: JoinedNode | None = None
        """None until it has joined."""
        self._registration: Final = Registration()
        self._detours: Final = Detours(self.counters, options.link_retry_s)
        self._outbox: Final = Outbox()
        self._scheduler: Final = SchedulerSession(options, self._outbox, now)
        self._on_joined: list[Done] = []
        self._barriers: Final = Barriers(self._outbox)
        self._on_finished: list[Done] = []
        self._finish_deadline = math.inf
        self._zeros: Final = Zeros()
        self._next_look = now + _SAY_EVERY_S
        self._handlers: Final[dict[type[m.Message], Callable[[Any, float], None]]] = {
            m.Joined: self._joined,
            m.Waiting: self._waiting,
            m.KeysRegistered: self._keys_registered,
            m.TopologyAnswer: lambda message, _: self._at_work().topology_answer(message),
            m.NewPolicy: lambda message, _: self._at_work().new_policy(message.policy),
            m.Moved: lambda message, _: self._at_work().aggregation.moved(message),
            m.BarrierReached: lambda message, _: self._barriers.reached(message.number),
            m.PeerFinished: self._peer_finished,
            m.AllFinished: self._all_finished,
            m.PeerGone: self._peer_gone,
            m.FailedLinks: lambda message, _: self._at_work().neighbours.told(message),
            m.Resumed: self._resumed,
        }
        """What the scheduler may say."""

    @property
    def rank(self) -> int:
        """This node's rank; -1 until it has joined."""
        return self.roster.rank

    @property
    def members(self) -> tuple[m.Member, ...]:
        """All nodes of the job, by rank; empty until this one has joined."""
        return self.roster.members

    @property
    def policy(self) -> Policy | None:
        """The newest policy that this node has heard of; None before it has joined."""
        return None if self._work is None else self._work.policy

    # ------------------------------------------------------------------------------------ what the user wants

    def on_joined(self, done: Done) -> None:
        """Call `done` when all nodes are here, or why that will not happen."""
        self._call_or_keep(self._on_joined, done, ready=self.state is not State.JOINING)

    def register(self, key: Key, now: float) -> None:
        """Make a key known to the job. Operations on it may be submitted at once."""
        self._registration.add(key)

    def submit(self, operation: Operation | AsyncOperation, now: float) -> None:
        """Begin an operation as soon as it may begin; its `done` is called in any case."""
        if self.failure is not None:
            self._outbox.call(operation.done, self.failure)
            return
        if not isinstance(operation, Operation):
            self.owners().submit(operation, now)
            return
        self.standing.begun(operation.round, now)
        if operation.key.identity < 0:
            operation.begun_at = now
            self._registration.hold(operation)
        else:
            self._at_work().aggregation.submit(operation, now)
            self._note_ends(now)
            self._check_for_finished_peers()

    def owners(self) -> Asynchronous:
        """Return the asynchronous side of this node, which has joined: pushes to owners, and what it owns."""
        return self._at_work().owners

    def report_replica(self, key: Key, round: int, digest: int, now: float) -> None:
        """Have what this rank holds of a key after a round compared with what the others hold."""
        if self.failure is None and self.state is not State.OVER and key.identity >= 0:
            self._outbox.tell(m.ReplicaDigest(key=key.identity, round=round, digest=digest))

    def barrier(self, done: Done, now: float) -> None:
        """Call `done` when every rank has come to as many barriers as this one."""
        if self.failure is not None:
            self._outbox.call(done, self.failure)
            return
        self._barriers.come(done, now)

    def finish(self, done: Done, now: float) -> None:
        """Push no more; call `done` when nobody needs this node any longer. What is outstanding is finished
        first.
        """
        if self.failure is None and self.state is State.RUNNING:
            self.state = State.FINISHING
            self._finish_deadline = now + self.options.wait_timeout_s
            self._flush()
            self._outbox.tell(self.standing.report(now))
            self._outbox.tell(m.Finished(last_rounds=self._registration.last_rounds()))
            self.owners().finished(self.rank)
            if self.roster.joins:
                self._zeros.begin(self._registration.granted_keys(), ahead=ROUNDS_AHEAD)
        self._call_or_keep(self._on_finished, done, ready=self.state is State.OVER)

    def fail(self, reason: str, now: float) -> None:
        """Tell everybody that this rank's program has failed, and stop."""
        self._stop(errors.Closed(f"rank {self.rank} has failed: {reason}"), say=reason)

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding; say nothing to anybody."""
        wrapped = (
            error
            if isinstance(error, NetStormError)
            else errors.Closed(f"the I/O thread has died: {error!r}")
        )
        self._stop(wrapped)

    def outstanding(self) -> int:
        """Return how many operations are not complete."""
        begun = 0 if self._work is None else sum(1 for _ in self._work.outstanding())
        return len(self._registration.waiting()) + begun

    # -------------------------------------------------------------------------------------- what others want

    def admit(self, hello: m.Hello) -> Admission:
        """Let in the members of this job, and nobody else."""
        if hello.job != self.options.job:
            return Refuse(f"this is a node of job {self.options.job!r}, not of {hello.job!r}")
        if self.failure is not None or self.state is State.OVER:
            return Refuse(f"rank {self.rank} has left the job")
        if self.state is State.JOINING:
            return NotYet()
        return self.roster.admit(hello)

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        """Take a message from a peer."""
        if self.failure is not None:
            return
        if peer != SCHEDULER:
            self._at_work().receive(peer, message, payload, payload_crc, now)
        else:
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ProtocolViolation(
                    f"a general node takes no {type(message).__name__} from the scheduler"
                )
            handler(message, now)
        self._note_ends(now)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that others opened: if they want to say something, they will be back."""
        _log.debug("rank %d: a session that rank %d opened is lost: %s", self.rank, peer, reason)

    def link_lost(self, peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """React to a session that cannot be re-established. See `Rerouter`."""
        if self.failure is not None or self.state is State.OVER:
            return
        if peer != SCHEDULER:
            self._at_work().neighbours.lost(int(peer), reason, undelivered, now)
        else:
            gone = self._scheduler.lost(reason, undelivered, now)
            if gone is not None:
                self._stop(gone)

    def tick(self, now: float) -> None:
        """Send what is due, and look at deadlines."""
        self._contribute_zeros(now)
        self._flush()
        if self.failure is not None or self.state is State.OVER:
            return
        if self._work is not None:
            self._work.aggregation.tick(now)
        gone = self._scheduler.look_for_it(self._resume, now)
        if gone is not None:
            self._stop(gone)
        if self._work is not None:
            self._work.neighbours.try_again(now)
        if self._scheduler.beats(now):
            self._outbox.tell(m.Heartbeat(busy=self._waiting_text(now)))
            if self.state is not State.JOINING:
                self._outbox.tell(self.standing.report(now))
        if self.meter is not None and now >= self.meter.due():
            measured = self.meter.report(now)
            if measured is not None:
                self._outbox.tell(measured)
        late = self._scheduler.too_late(now)
        if late is not None:
            self._blame(late)
            return
        lost = self.roster.undecided(now, self._scheduler.silence_s + _DECISION_S)
        if lost is not None and not self._scheduler.is_away:
            self._blame(lost)
            return
        if now >= self._next_look:
            self._next_look = now + _SAY_EVERY_S
            self._look_at_deadlines(now)

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.failure is not None or self.state is State.OVER:
            return math.inf
        if self._work is not None and (self._registration.has_request() or self._work.has_news()):
            return 0.0
        if self.state is State.FINISHING and self._zeros.due() and self.roster.unfinished():
            return 0.0
        due = min(self._scheduler.due(), self._next_look, self._detours.due())
        if self._work is not None:
            due = min(due, self._work.aggregation.next_tick())
        if self.meter is not None:
            due = min(due, self.meter.due())
        return due

    def dispatch(self, links: Links, now: float) -> bool:
        """Let chunks that wait for what links are like go where they should. See `Dispatcher`."""
        return self._work is not None and self._work.aggregation.run_dispatch(links, now)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken = self._outbox.take()
        if not taken or not self._detours:
            return taken
        return self._detours.route(self.rank, taken)

    # ------------------------------------------------------------------------------------ the scheduler says

    def _joined(self, message: m.Joined, now: float) -> None:
        if self.state is not State.JOINING:
            raise ProtocolViolation("joined twice")
        self.state = State.RUNNING
        self.roster = Roster(message.rank, message.members, joins=message.joins)
        self._scheduler.joined(message, now)
        self._work = JoinedNode(
            message,
            roster=self.roster,
            detours=self._detours,
            outbox=self._outbox,
            counters=self.counters,
            auxiliary=self.options.auxiliary,
            blame=self._blame,
        )
        self._outbox.add(Become(rank=self.rank))
        for member in self.roster.others():
            self._outbox.add(Connect(peer=Peer(member.rank), host=member.host, port=member.port))
        self._outbox.call_all(self._on_joined, None)

    def _waiting(self, message: m.Waiting, now: float) -> None:
        self._scheduler.said = message.text
        _log.warning("%s", message.text)

    def _keys_registered(self, message: m.KeysRegistered, now: float) -> None:
        self._at_work().keys_registered(message, self._registration)
        self._check_for_finished_peers()

    def _resume(self) -> m.Resume:
        """Return what a scheduler that is back must know of this node."""
        work = self._at_work()
        return m.Resume(
            keys=self._registration.ask_again(),
            begun=work.aggregation.asking.again(),
            barriers=self._barriers.numbers(),
            last_rounds=self._registration.last_rounds() if self.state is State.FINISHING else None,
            suspected=self._detours.targets(),
            moved=work.aggregation.takeover.say_again(),
        )

    def _resumed(self, message: m.Resumed, now: float) -> None:
        self._scheduler.resumed(now)
        self.roster.ask_again(now)

    def _peer_finished(self, message: m.PeerFinished, now: float) -> None:
        self.roster.finished(message.rank, message.last_rounds)
        self.owners().finished(message.rank)
        self._check_for_finished_peers()

    def _all_finished(self, message: m.AllFinished, now: float) -> None:
        self.state = State.OVER
        self._outbox.tell(m.Leave())
        for member in self.roster.others():
            down = member.rank in self._detours
            self._outbox.add(Disconnect(peer=Peer(member.rank), at_once=down))
        self._outbox.add(Disconnect(peer=SCHEDULER))
        self._outbox.call_all(self._on_finished, None)

    def _peer_gone(self, message: m.PeerGone, now: float) -> None:
        if message.rank == self.rank and message.kind == "failed":
            return
        self._stop(error_of(message))

    # ----------------------------------------------------------------------------------------------- inside

    def _note_ends(self, now: float) -> None:
        """Take note of the rounds that have just become complete."""
        if self._work is not None and self._work.aggregation.closed:
            aggregation = self._work.aggregation
            for round in aggregation.closed:
                self.standing.ended(round, now)
            aggregation.closed.clear()
            aggregation.asking.round_s = self.standing.round_s

    def _check_for_finished_peers(self) -> None:
        """A round that a finished rank never pushed will not complete: say so now."""
        if self._work is not None:
            uneven = self.roster.uneven(self._work.aggregation.outstanding())
            if uneven is not None:
                self._blame(uneven)

    def _contribute_zeros(self, now: float) -> None:
        """Let the others go on without this rank's program, which has ended."""
        if self._zeros.due() and self.state is State.FINISHING and self.roster.unfinished():
            self._finish_deadline = now + self.options.wait_timeout_s  # the others have got on
            for operation in self._zeros.take():
                self._at_work().aggregation.submit(operation, now)

    def _look_at_deadlines(self, now: float) -> None:
        text = self._waiting_text(now)
        if text:
            _log.info("rank %d waits: %s", self.rank, text)
        limit = self.options.wait_timeout_s
        oldest = min(self._barriers.oldest(), math.inf if self._work is None else self._work.oldest())
        if now - oldest > limit or now > self._finish_deadline:
            self._blame(
                errors.WaitTimeout(
                    f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT): {text or self._scheduler.said}"
                )
            )

    def _waiting_text(self, now: float) -> str:
        """Say what this node has been waiting for for a while; empty if for nothing."""
        text = self._scheduler.waits(now)
        if text:
            return text
        text = "" if self._work is None else self._work.waits(now - self._scheduler.beat_every_s)
        if text:
            return text
        for barrier in self._barriers.numbers():
            return f"barrier {barrier}: {self._scheduler.said}"
        if self.state is State.FINISHING:
            return f"finished; ranks {self.roster.unfinished()} have not"
        return ""

    def _flush(self) -> None:
        """Send registrations and topology requests, one message for all that have gathered."""
        if self.failure is None and self._work is not None:
            if self._registration.has_request():
                self._outbox.tell(self._registration.take_request())
            for news in self._work.news():
                self._outbox.tell(news)

    def _stop(self, error: NetStormError, *, say: str | None = None) -> None:
        """Fail everything, now and later; the first reason stays. `say`: what to tell the others, if they
        don't know.
        """
        if self.failure is not None or self.state is State.OVER:
            return
        self.failure = error
        self._outbox.tell(m.Leave() if say is None else m.Failed(reason=say))
        for member in self.roster.others():
            self._outbox.add(Disconnect(peer=Peer(member.rank), at_once=True))
        if self._work is not None:
            self._work.fail_all(error)
        for operation in self._registration.waiting():
            self._outbox.call(operation.done, error)
        self._registration.clear()
        self._barriers.fail(error)
        self._outbox.call_all(self._on_joined, error)
        self._outbox.call_all(self._on_finished, error)
        self._outbox.add(Disconnect(peer=SCHEDULER))

    def _blame(self, error: NetStormError) -> None:
        """Stop for a reason found here, and tell the others."""
        self._stop(error, say=f"{type(error).__name__}: {error}")

    def _at_work(self) -> JoinedNode:
        if self._work is None:
            raise ProtocolViolation("this node has not joined the job yet")
        return self._work

    def _call_or_keep(self, waiting: list[Done], done: Done, *, ready: bool) -> None:
        if ready or self.failure is not None:
            self._outbox.call(done, self.failure)
        else:
            waiting.append(done)
