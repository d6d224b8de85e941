"""The general node: trains, aggregates and forwards. A pure state machine (design, §3 and §5).

What happens to it are calls of its driver, and of its driver for the user's program; what is to be done are
the instructions that it hands out. `JoinedNode` is what it works with once the scheduler has all nodes.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from netstorm import errors
from netstorm.errors import NetStormError, NodeLost, NoRoom, ProtocolViolation, WaitTimeout
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.forms import Key
from netstorm.kvstore.membership import (
    NodeBarriers,
    NodeLocalSteps,
    NodeStatusTracker,
    RecoveringSchedulers,
    Registration,
    Roster,
    SchedulerSession,
    job_end_error,
)
from netstorm.kvstore.messages import PointToPoint
from netstorm.kvstore.operations import (
    AsyncOperation,
    Done,
    Operation,
    Outbox,
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.options import NodeOptions
from netstorm.kvstore.paths.routes import (
    Detours,
    KnownRoutes,
    check_path,
    delivery_confirmation,
    messages_to_resend,
    parts_to_resend,
    relay_confirmation,
)
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.node_rounds import NodeRounds, ZeroContributions
from netstorm.kvstore.state_transfer import StateSnapshot, StateTransfer
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, check_authority, may_send, not_authorised
from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Buffer, Peer
from netstorm.protocol.messages import JobReport, Member
from netstorm.pslite.link_meter import LinkMeter
from netstorm.pslite.machine import (
    Admission,
    Become,
    Connect,
    Disconnect,
    Instruction,
    Links,
    NotYet,
    Refuse,
    Send,
    WaitingBytes,
)
from netstorm.topology.policy import Policy, receivers

__all__ = ["GeneralNode", "NodeState"]


_log = logging.getLogger(__name__)

_FROM_MEMBERS: Final = may_send(Role.MEMBER, Role.MEMBER)

_CHECK_EVERY_S: Final = 10.0
"""How often a waiting node logs what it waits for, and checks NETSTORM_WAIT_TIMEOUT."""

_DECISION_S: Final = 4.0
"""How much longer than the heartbeat time-out a node waits for the scheduler's decision on a rank that it
cannot reach; and for the link time-out, after which it is known whether the scheduler is busy.
"""

_REPORT_EVERY_S: Final = 0.5
"""Between two reports that no process listens where a node was: the first may have come too early."""


class NodeState(enum.Enum):
    """Where a node is in its life."""

    JOINING = "joining"
    """The scheduler does not have all nodes yet."""
    RUNNING = "running"
    FINISHING = "finishing"
    """The user's program will push no more."""
    OVER = "over"
    """No rank needs it any longer."""


class GeneralNode:
    """One rank. Implements `pslite.machine.Machine`, `Rerouter` and `Dispatcher`.

    A failure, wherever it happened, ends all outstanding operations and every later one with the same error.

    Attributes:
        meter: measures links from the traffic; the owner of the endpoint attaches it. None: nothing is
        measured.
        state: where the node is in its life.
        failure: why nothing works any more; None while it does.
        waiting: what messages that cannot be used yet count. See `Bounded`.
        scheduler: the session with it.
        roster: the members of the job; empty until the scheduler has all nodes.
        joined: what a node that has joined works with; None before.
        live: who is in the job now; may be read in any thread.
        local_steps: reports what local steps take.
        status: how the node is doing, for heartbeats and metrics.
    """

    def __init__(self, options: NodeOptions, *, now: float, counters: Counters | None = None) -> None:
        """Ask the scheduler to join."""
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.meter: Final = None if options.meter is None else LinkMeter(options.meter, now=now)
        self.state = NodeState.JOINING
        self.failure: NetStormError | None = None
        self.waiting: Final = WaitingBytes()
        self._outbox: Final = Outbox(options.most_forwarded)
        self.scheduler: Final = SchedulerSession(options, self._outbox, now)
        self.roster = Roster(-1, ())
        self.joined: JoinedNode | None = None
        self.live: Final = LiveJob(self)
        self.local_steps: Final = NodeLocalSteps(self._outbox)
        self.status: Final = NodeStatusTracker(self.counters)
        self._recovering: Final = RecoveringSchedulers(self.scheduler, self._outbox)
        self._registration: Final = Registration()
        self._barriers: Final = NodeBarriers(self._outbox)
        self._detours: Final = Detours(self.counters, options.link_retry_s)
        self._zeros: Final = ZeroContributions()
        self._elastic: tuple[int, int] | None = None
        """Fewest and most nodes, of a job that nodes may leave and join."""
        self._view = 0
        self._next_check = now + _CHECK_EVERY_S
        self._finish_by = math.inf
        """When the other ranks must have finished."""
        self._waiting_to_join: Final[list[Done]] = []
        self._waiting_to_finish: Final[list[Done]] = []

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
        """The newest policy that this node has received; None before it has joined."""
        return None if self.joined is None else self.joined.bindings.newest

    @property
    def view(self) -> int:
        """The number of the view that this node is in; 0 in a job that nobody leaves."""
        return self._view

    @property
    def has_ended(self) -> bool:
        """Whether this node has failed, or has left the job in good order."""
        return self.failure is not None or self.state is NodeState.OVER

    def require_joined(self) -> JoinedNode:
        """Return what a node that has joined works with.

        Raises:
            ProtocolViolation: it has not joined yet.
        """
        if self.joined is None:
            raise ProtocolViolation("this node has not joined the job yet")
        return self.joined

    # ---------------------------------------------------------------------------------- messages come in

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Admit the members of this job, and no other process."""
        if hello.job != self.options.job:
            return Refuse(f"this is a node of job {self.options.job!r}, not of {hello.job!r}")
        if self.has_ended:
            return Refuse(f"rank {self.rank} has left the job")
        if self._recovering.asks(hello):
            return self._recovering.admit(hello, self.rank)
        if self.state is NodeState.JOINING:
            return NotYet()
        return self.roster.admit(hello, user)

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message of a peer."""
        if self.failure is not None:
            return
        if peer <= UNKNOWN:
            check_authority(message, Role.RECOVERER, Role.MEMBER, "a scheduler that takes over")
            assert isinstance(message, m.Recover)  # the one message of its authority
            self._recovering.receive(peer, message, self.roster, self._elastic, now)
        elif peer != SCHEDULER:
            joined = self.require_joined()
            if type(message) not in _FROM_MEMBERS:
                raise not_authorised(message, f"rank {peer}")
            if self.roster.running:
                self.roster.running.pop(int(peer), None)
            joined.receive(peer, message, payload, payload_crc, now)
        else:
            role = Role.APPLICANT if self.state is NodeState.JOINING else Role.MEMBER
            check_authority(message, Role.SCHEDULER, role, "the scheduler")
            self.scheduler.check_proof(message)
            self._receive_from_scheduler(message, now)
        self._record_completed_rounds(now)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to the loss of a session that a peer opened: the peer opens a new one when it needs it."""
        _log.debug("rank %d: a session that rank %d opened is lost: %s", self.rank, peer, reason)

    def link_lost(self, peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """React to a session that cannot be re-established. See `Rerouter`."""
        if self.has_ended:
            return
        if peer != SCHEDULER:
            self.require_joined().link_lost(int(peer), reason, undelivered, now)
        else:
            error = self.scheduler.connection_lost(reason, undelivered, now)
            if error is not None:
                self._fail(error)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """Tell the scheduler that another node's process has probably ended, or find that the scheduler's
        has. See `ConnectionWatcher`.
        """
        if not refused or self.has_ended or peer <= UNKNOWN:
            return
        if peer == SCHEDULER:
            error = self.scheduler.refused(reason, now)
            if error is not None:
                self._fail(error)
        elif self.joined is not None:
            self.joined.peer_refused(int(peer), reason, now)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`."""
        if self.joined is None or self.has_ended or peer <= UNKNOWN:
            return False
        return peer == SCHEDULER or self.roster.may_be_busy(int(peer), now)

    def peer_busy(self, peer: Peer, seconds: float, now: float, *, late: bool = False) -> None:
        """Learn that a node, or the scheduler, is busy. See `ConnectionWatcher`."""
        if self.joined is None or self.has_ended or peer <= UNKNOWN:
            return
        if peer == SCHEDULER:
            self.scheduler.busy(seconds, late=late)
            self.roster.restart_suspicions(now)  # it decides about them, and cannot
        else:
            self.joined.peer_busy(int(peer), seconds)

    # ------------------------------------------------------------------------------- the scheduler's messages

    def _receive_from_scheduler(self, message: m.Message, now: float) -> None:
        """Handle a message that a scheduler may send. Raises `ProtocolViolation` if none does so now."""
        match message:
            case m.Joined():
                self._start(message, now)
            case m.Waiting():
                self.scheduler.last_report = message.text
                _log.warning("%s", message.text)
            case m.KeysRegistered():
                self.require_joined().keys_registered(message, self._registration)
                self._check_for_uneven_rounds()
            case m.TopologyAnswer():
                self.require_joined().topology_answer(message)
            case m.NewPolicy():
                self.require_joined().new_policy(message.policy)
            case m.Moved():
                self.require_joined().aggregation.chunks_moved(message)
            case m.BarrierReached():
                self._barriers.reached(message.number)
            case m.PeerFinished():
                self.roster.finished[message.rank] = message.last_rounds
                self.require_joined().peer_finished(message.rank)
                self._check_for_uneven_rounds()
            case m.AllFinished():
                self._leave()
            case m.PeerGone():
                if message.rank != self.roster.rank or message.kind != "failed":
                    self._fail(job_end_error(message))
            case m.FailedLinks():
                self.require_joined().failed_links(message)
            case m.Resumed():
                self.scheduler.resumed(now)
                self.roster.restart_suspicions(now)
                self.local_steps.report_again()
            case _:
                self._view_message(message, now)

    def _view_message(self, message: m.Message, now: float) -> None:
        """Handle a message about views, about local steps, or about a node that may be busy."""
        match message:
            case m.StepsGranted():
                self.local_steps.granted(message)
            case m.Probe():
                pass
            case m.Alive():
                self.roster.running[message.rank] = now
            case m.NewView():
                self._begin_view(message)
                self._check_for_uneven_rounds()
            case m.ViewAgreed():
                joined = self.require_joined()
                if joined.aggregation.agree(message):
                    joined.state.view_agreed()
            case m.KeysAnnounced():
                self.require_joined().add_granted_keys(message.keys, message.grants)
            case _:
                raise ProtocolViolation(
                    f"a general node takes no {type(message).__name__} from the scheduler"
                )

    def _start(self, message: m.Joined, now: float) -> None:
        """Begin to work: all nodes have joined.

        Raises:
            ProtocolViolation: the node has joined before.
        """
        if self.state is not NodeState.JOINING:
            raise ProtocolViolation("joined twice")
        self.state, self._elastic = NodeState.RUNNING, message.elastic
        self.roster = Roster(
            message.rank,
            message.members,
            pads_with_zeros=message.joins,
            elastic=message.elastic is not None,
        )
        self._barriers.start(message.barriers)
        self.scheduler.start(message, now)
        self.joined = JoinedNode(
            message,
            self.options,
            roster=self.roster,
            detours=self._detours,
            outbox=self._outbox,
            counters=self.counters,
            waiting=self.waiting,
            end_job=self._end_job,
        )
        for member in message.members:
            if not member.port:
                absent = NodeLost(f"rank {member.rank} is not in the job: no node has come for it yet")
                self.joined.point_to_point.departed(member.rank, absent)
        self._outbox.add(Become(rank=self.roster.rank))
        soon = receivers(message.policy, message.rank) if self.options.connects_at_once else frozenset[int]()
        for member in self.roster.others():
            at_once = member.rank in soon
            self._outbox.add(
                Connect(peer=Peer(member.rank), host=member.host, port=member.port, at_once=at_once)
            )
        self._outbox.complete_all(self._waiting_to_join, None)

    def _begin_view(self, message: m.NewView) -> None:
        """Go over to a new view: stop, and report which results are here.

        Raises:
            ProtocolViolation: the view is not newer than the last one.
        """
        joined, roster = self.require_joined(), self.roster
        message = roster.with_all_arrivals(message)
        if set(message.policy.members) <= set(message.policy.silent):  # the state is with newcomers, or lost
            for (
                rank
            ) in message.policy.silent:  # who begins anew lacks results after what it was offered before
                joined.state.providing.forget(rank)
            if joined.state.fetched:
                self._outbox.send_to_scheduler(m.CaughtUp())  # before the report, which the scheduler awaits
            else:
                joined.aggregation.views.join_again()
        report = joined.aggregation.views.begin(message)
        self._view = message.view
        for departure in message.departures:
            _log.warning("view %d without rank %d: %s", message.view, departure.rank, departure.reason)
        for rank in message.arrivals:
            _log.warning("view %d with rank %d, which has just come", message.view, rank)
        former = {member.rank: member for member in roster.present() if member.rank != roster.rank}
        roster.change(message.members)
        for member in roster.others():
            known = former.pop(member.rank, None)
            if known is not None and known.incarnation != member.incarnation:
                self._leave_behind(member.rank, message)
                known = None
            if known is None:
                self._outbox.add(Connect(peer=Peer(member.rank), host=member.host, port=member.port))
        for rank in former:
            self._leave_behind(rank, message)
        for rank in message.arrivals:
            joined.point_to_point.arrived(rank)
            joined.state.providing.forget(rank)
        joined.new_policy(message.policy, of_view=True)
        self._outbox.send_to_scheduler(report)

    def _leave_behind(self, rank: int, message: m.NewView) -> None:
        joined = self.require_joined()
        reasons = (one.reason for one in message.departures if one.rank == rank)
        reason = next(reasons, f"it is not in view {message.view}")
        self._outbox.add(Disconnect(peer=Peer(rank), at_once=True))
        if rank in self._detours.failed:  # another process may have the rank by now
            self._outbox.send_to_scheduler(m.LinkRestored(rank=rank))
        self._detours.forget(rank)
        joined.departed(rank, NodeLost(f"rank {rank} is not in the job any more: {reason}"))

    def _resume(self) -> m.Resume:
        """Return what a scheduler that has been started again must know of this node."""
        aggregation = self.require_joined().aggregation
        aggregation.calls.report_again()
        return m.Resume(
            keys=self._registration.unanswered(),
            begun=aggregation.topology_requests.recent(),
            barriers=self._barriers.waiting_numbers(),
            last_rounds=self._registration.last_rounds() if self.state is NodeState.FINISHING else None,
            suspected=tuple(self._detours.failed),
            moved=aggregation.takeover.all_announcements(),
            view=self._view,
            job=self._job_report() if self.scheduler.tries_another else None,
            changing=aggregation.views.changing,
        )

    def _job_report(self) -> JobReport:
        """Return what this node knows of its job: all that another scheduler needs to take it over without a
        log.
        """
        joined, roster = self.require_joined(), self.roster
        policy = joined.bindings.newest
        keys = sorted(self._registration.granted_keys(), key=lambda key: key.identity)
        rows = {} if roster.elastic else joined.bindings.rows()
        older = {version for table in rows.values() for _, version in table} - {
            joined.bindings.newest.version
        }
        plans = (joined.bindings.plan(version) for version in sorted(older))
        return JobReport(
            members=roster.members,
            policy=policy,
            specs=tuple(key.spec for key in keys),
            grants=tuple(key.grant for key in keys),
            granted=joined.bindings.granted(),
            finished=dict(roster.finished),
            barriers=self._barriers.entered,
            rows=rows,
            policies=tuple(plan.policy for plan in plans if plan is not None),
            majority=self.scheduler.majority,
            reproducible=joined.reproducible,
        )

    # ----------------------------------------------------------------------------------------- time passes

    def tick(self, now: float) -> None:
        """Send what is due, and check deadlines."""
        if self.state is NodeState.FINISHING:
            self._contribute_zeros(now)
        self._flush()
        if self.has_ended:
            return
        if self.joined is not None:
            self.joined.tick(now)
            self._record_completed_rounds(now)
        error: NetStormError | None = self.scheduler.try_reconnect(self._resume, now)
        if error is not None:
            self._fail(error)
        if self.joined is not None and self._detours.failed:
            self.joined.retry_failed_links(now)
        self._send_heartbeat(now)
        error = self._expired(now)
        if error is not None:
            self._end_job(error)

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.has_ended:
            return math.inf
        if self.state is NodeState.FINISHING and self._zeros_are_due():
            return 0.0
        due = min(self.scheduler.next_deadline(), self._next_check)
        if self._detours.failed:
            due = min(due, self._detours.next_trial())
        if self.joined is not None:
            if self._registration.unsent or self.joined.has_announcements():
                return 0.0
            due = min(due, self.joined.next_tick())
        return due if self.meter is None else min(due, self.meter.due())

    def _send_heartbeat(self, now: float) -> None:
        """Send a heartbeat, the status and measurements, as far as they are due."""
        if self.scheduler.heartbeat_due(now):
            self._outbox.send_to_scheduler(m.Heartbeat(busy=self.waiting_text(now)))
            if self.state is not NodeState.JOINING:
                self._outbox.send_to_scheduler(self.status.report(now))
        if self.meter is not None and now >= self.meter.due():
            measured = self.meter.report(now)
            if measured is not None:
                self._outbox.send_to_scheduler(measured)

    def _expired(self, now: float) -> NetStormError | None:
        """Return the error if something has taken too long; log what this node waits for now and then."""
        late = self.scheduler.join_error(now)
        if late is not None:
            return late
        limit = self.scheduler.heartbeat_timeout_s + self.options.link_timeout_s + _DECISION_S
        lost = self.roster.undecided_error(now, limit)
        # In an elastic job the scheduler decides in the end, if only after restarts of its own. If all gave
        # up at the same moment, the job's state would be lost.
        if lost is not None and not self.scheduler.is_away and not self.roster.elastic:
            return lost
        if now < self._next_check:
            return None
        self._next_check = now + _CHECK_EVERY_S
        return self._wait_error(now)

    def waiting_text(self, now: float) -> str:
        """Return what this node has been waiting for, for a person; empty if for nothing, or not for long."""
        text = self.scheduler.waiting_text(now)
        if text:
            return text
        if self.joined is not None:
            text = self.joined.waiting_text(now - self.scheduler.heartbeat_interval_s)
            if text:
                return text
        for barrier in self._barriers.waiting_numbers():
            return f"barrier {barrier}: {self.scheduler.last_report}"
        if self.state is NodeState.FINISHING:
            return f"finished; ranks {self.roster.unfinished()} have not"
        return ""

    def _wait_error(self, now: float) -> WaitTimeout | None:
        text = self.waiting_text(now)
        if text:
            _log.info("rank %d waits: %s", self.roster.rank, text)
        limit = self.options.wait_timeout_s
        oldest = min(self._barriers.oldest(), math.inf if self.joined is None else self.joined.oldest())
        if now - oldest > limit or now > self._finish_by:
            return WaitTimeout(
                f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT): {text or self.scheduler.last_report}"
            )
        return None

    def _record_completed_rounds(self, now: float) -> None:
        """Count the rounds that have just become complete."""
        joined = self.joined
        if joined is not None and joined.aggregation.completed_rounds:
            aggregation = joined.aggregation
            for round in aggregation.completed_rounds:
                self.status.operation_ended(round, now)
            aggregation.completed_rounds.clear()
            aggregation.topology_requests.round_s = self.status.round_s

    def _check_for_uneven_rounds(self) -> None:
        """End the job if an operation waits for a round that a finished rank never pushed."""
        joined = self.joined
        if joined is not None and self.roster.finished:
            error = self.roster.uneven_error(joined.aggregation.outstanding())
            if error is not None:
                self._end_job(error)

    def _flush(self) -> None:
        """Send registrations and topology requests, one message for all that have gathered."""
        if self.failure is None and self.joined is not None:
            if self._registration.unsent:
                self._outbox.send_to_scheduler(self._registration.take_request())
            for announcement in self.joined.take_announcements():
                self._outbox.send_to_scheduler(announcement)

    def _zeros_are_due(self) -> bool:
        """Return whether `_contribute_zeros` has something to do, on a node that finishes."""
        return bool(self._zeros.pending) and bool(self.roster.unfinished())

    def _contribute_zeros(self, now: float) -> None:
        """Contribute zeros to the other ranks' rounds, if NETSTORM_UNEVEN=join: the program has ended."""
        if self._zeros_are_due():
            self._finish_by = now + self.options.wait_timeout_s  # the other ranks make progress
            for operation in self._zeros.take():
                self.require_joined().aggregation.submit(operation, now)

    # ------------------------------------------------------------------------------------ instructions go out

    def dispatch(self, links: Links, now: float) -> bool:
        """Send the chunks that wait here for the state of links. See `Dispatcher`."""
        joined = self.joined
        if joined is None or not joined.aggregation.dispatch.backlogs:
            return False
        joined.aggregation.run_dispatch(links, now)
        return True

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        if not self._outbox.instructions:
            return []
        taken = self._outbox.take()
        return self._detours.route(self.rank, taken) if self._detours.failed else taken

    # ----------------------------------------------------------------------- what the user's program asks for

    # Nothing here blocks; each `done` is called exactly once.

    @property
    def asynchronous(self) -> Asynchronous:
        """The asynchronous side of a node that has joined: pushes to owners, and what this rank owns."""
        return self.require_joined().asynchronous

    def when_joined(self, done: Done) -> None:
        """Call `done` when all nodes have joined, or with the reason why that will not happen."""
        self._call_or_keep(self._waiting_to_join, done, ready=self.state is not NodeState.JOINING)

    def is_behind(self, key: int, number: int, *, begun: bool) -> bool:
        """Return whether a round that need not wait for all has ended, at least in part, before this rank's
        program has begun it; or whether others have `begun` it, as far as this node sees. May be called in
        any thread: a program asks after each step, and should not have to wait for the I/O thread.
        """
        joined = self.joined
        round = None if joined is None else joined.aggregation.rounds.get((key, number))
        if round is None or round.loss is None or round.operation is not None:
            return False
        return begun or bool(round.loss.early)

    def register(self, key: Key, now: float) -> None:
        """Make a key known to the job. Operations on it may be submitted at once."""
        self._registration.add(key)

    def submit(self, operation: Operation | AsyncOperation | PointToPointOperation, now: float) -> None:
        """Begin an operation as soon as it may begin. Its `done` is called in any case."""
        if self.failure is not None:
            self._outbox.complete(operation.done, self.failure)
            return
        if isinstance(operation, (SendOperation, ReceiveOperation)):
            if self.state is not NodeState.RUNNING:
                self._outbox.complete(operation.done, errors.Closed(f"{operation}: this rank has finished"))
                return
            self.require_joined().point_to_point.submit(operation, now)
            return
        if not isinstance(operation, Operation):
            self.asynchronous.submit(operation, now)
            return
        self.status.operation_begun(operation.round, now)
        if operation.key.identity < 0:
            operation.begun_at = now
            self._registration.enqueue(operation)
        else:
            self.require_joined().aggregation.submit(operation, now)
            self._record_completed_rounds(now)
            self._check_for_uneven_rounds()

    def report_replica(self, key: Key, round: int, digest: int, now: float) -> None:
        """Have this rank's value of a key after a round compared with those of the other ranks."""
        if not self.has_ended and key.identity >= 0:
            replica = m.ReplicaDigest(key=key.identity, round=round, digest=digest)
            self._outbox.send_to_scheduler(replica)

    @property
    def reproducible(self) -> bool:
        """Whether the results of the job are to be the same in each run."""
        joined = self.joined
        return joined is not None and joined.reproducible

    @property
    def needs_state(self) -> bool:
        """Whether this node has joined a job that had begun, and its program does not have the state yet."""
        joined = self.joined
        return joined is not None and joined.state.needed

    def fetch_state(self, take: Callable[[StateSnapshot], None], done: Done, now: float) -> None:
        """Fetch the job's state from the other ranks, before one of their steps.

        Args:
            take: called with the state. Operations of rounds from `Snapshot.rounds` on may be submitted then.
            done: called after that, or with the error that ended the job.
            now: the time.
        """
        if self.failure is not None:
            self._outbox.complete(done, self.failure)
            return
        joined = self.require_joined()

        def begin(snapshot: StateSnapshot) -> None:
            joined.aggregation.begin_at(snapshot.rounds)
            self._barriers.start(snapshot.barriers)
            take(snapshot)

        joined.state.fetch(begin, done, changing=joined.aggregation.views.changing)

    def offer_state(self, snapshot: StateSnapshot, now: float) -> None:
        """Offer this rank's state to the newcomers whose requests it answers; the last one, also to all who
        come later.
        """
        if not self.has_ended:
            self.require_joined().state.providing.offer(snapshot)

    def barrier(self, done: Done, now: float) -> None:
        """Call `done` when every rank has entered as many barriers as this one."""
        if self.failure is not None:
            self._outbox.complete(done, self.failure)
            return
        self._barriers.enter(done, now)

    def finish(self, done: Done, now: float) -> None:
        """Push no more; call `done` when no rank needs this node. What is outstanding completes first."""
        if self.failure is None and self.state is NodeState.RUNNING:
            self.state = NodeState.FINISHING
            self._finish_by = now + self.options.wait_timeout_s
            self.require_joined().aggregation.topology_requests.request_gathered()
            self._flush()
            self._outbox.send_to_scheduler(self.status.report(now))
            self._outbox.send_to_scheduler(m.Finished(last_rounds=self._registration.last_rounds()))
            self.require_joined().peer_finished(self.roster.rank)
            messages = self.require_joined().point_to_point
            self._when_over(lambda error: messages.end() if error is None else None)
            if self.roster.pads_with_zeros:
                self._zeros.begin(self._registration.granted_keys())
        self._when_over(done)

    def fail(self, reason: str, now: float) -> None:
        """Announce that this rank's program has failed, and stop."""
        error = errors.Closed(f"rank {self.roster.rank} has failed: {reason}")
        self._fail(error, announce=reason)

    def retire(self, reason: str, done: Done, now: float) -> None:
        """Take part no more, and call `done` as `finish` does. The job fails if anything is outstanding."""
        if self.outstanding() or self.state is NodeState.JOINING:
            self._fail(errors.Closed(reason), announce=reason)
        self.finish(done, now)

    def waiting_text_of(self, operation: Operation) -> str:
        """Return what an operation waits for, for a person."""
        joined = self.joined
        if joined is None or operation.key.identity < 0:
            return "the scheduler's answer"
        return joined.aggregation.waiting_text_of(operation).removeprefix(f"{operation}: ")

    def awaited(self) -> tuple[set[int], set[int]]:
        """Return the ranks whose contributions are missing here, and the neighbours from whom sums or results
        are to come, of the oldest sum.
        """
        return (set(), set()) if self.joined is None else self.joined.aggregation.awaited()

    def outstanding(self) -> int:
        """Return how many operations are not complete."""
        joined = self.joined
        begun = 0 if joined is None else sum(1 for _ in joined.outstanding())
        return len(self._registration.waiting_operations()) + begun

    def _when_over(self, done: Done) -> None:
        """Call `done` when no rank needs this node any longer, or with the error that ended the job."""
        self._call_or_keep(self._waiting_to_finish, done, ready=self.state is NodeState.OVER)

    def was_known(self, key: Key) -> bool:
        """Return whether the others had a key before this node came. May be called in any thread."""
        joined = self.joined
        return joined is not None and (key.spec.namespace, key.name) in joined.known_keys

    def begin_without_state(self, now: float) -> None:
        """Take part from now on, if this node has joined later. In asynchronous training the values are with
        their owners, so a newcomer's program needs no state.
        """
        joined = self.joined
        if joined is not None and joined.state.needed:
            joined.state.needed = False
            joined.aggregation.views.caught_up = True

    def begin_key(self, key: Key, round: int, now: float) -> None:
        """Sum a key from this round on: the program needs no results of those before."""
        joined = self.require_joined()
        if key.identity < 0:
            joined.first_rounds[key] = round
        else:
            joined.aggregation.begin_at({key.identity: round})

    # ------------------------------------------------------------------------------------------------ the end

    def _leave(self) -> None:
        """Leave the job in good order: all ranks have finished."""
        self.state = NodeState.OVER
        self._outbox.send_to_scheduler(m.Leave())
        for member in self.roster.others():
            failed = member.rank in self._detours.failed
            self._outbox.add(Disconnect(peer=Peer(member.rank), at_once=failed))
        self._outbox.add(Disconnect(peer=SCHEDULER))
        self._outbox.complete_all(self._waiting_to_finish, None)

    def _fail(self, error: NetStormError, *, announce: str | None = None) -> None:
        """Fail all operations, now and later. The first failure is the one that is kept.

        Args:
            error: what operations fail with.
            announce: the reason to tell the other ranks; None: they know it already.
        """
        if self.has_ended:
            return
        self.failure = error
        self._outbox.send_to_scheduler(m.Leave() if announce is None else m.Failed(reason=announce))
        for member in self.roster.others():
            self._outbox.add(Disconnect(peer=Peer(member.rank), at_once=True))
        if self.joined is not None:
            self.joined.fail_all(error)
        for operation in self._registration.waiting_operations():
            self._outbox.complete(operation.done, error)
        self._registration.clear()
        self._barriers.fail_all(error)
        self.local_steps.fail_all(error)
        self._outbox.complete_all(self._waiting_to_join, error)
        self._outbox.complete_all(self._waiting_to_finish, error)
        self._outbox.add(Disconnect(peer=SCHEDULER))

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding; announce nothing."""
        if not isinstance(error, NetStormError):
            error = errors.Closed(f"the I/O thread has died: {error!r}")
        self._fail(error)

    def _end_job(self, error: NetStormError) -> None:
        """Fail for a reason that was found here, and announce it to all ranks."""
        self._fail(error, announce=f"{type(error).__name__}: {error}")

    def _call_or_keep(self, waiting: list[Done], done: Done, *, ready: bool) -> None:
        if ready or self.failure is not None:
            self._outbox.complete(done, self.failure)
        else:
            waiting.append(done)


class JoinedNode:
    """The work of a node that has joined: sums over trees, pushes to owners, messages, paths around links.

    Attributes:
        aggregation: all-reduces.
        bindings: which policy each round runs under.
        asynchronous: pushes and pulls, which owners serve.
        point_to_point: sends and receives.
        routes: the paths that messages of others may come along.
        state: the state that newcomers need.
        first_rounds: of keys that have no number yet, if this rank takes part later.
        reproducible: results are the same in each run.
        known_keys: namespaces and names of the keys that the others had before this node came.
    """

    def __init__(
        self,
        joined: m.Joined,
        options: NodeOptions,
        *,
        roster: Roster,
        detours: Detours,
        outbox: Outbox,
        counters: Counters,
        waiting: WaitingBytes,
        end_job: Callable[[NetStormError], None],
    ) -> None:
        """Begin without operations.

        Args:
            joined: the scheduler's message that all nodes have joined.
            options: of the node.
            roster, detours: the members of the job, and ways around failed links.
            outbox, counters: take instructions, and count.
            waiting: counts the messages that come early.
            end_job: fails the whole job.
        """
        self._counters: Final = counters
        self.bindings: Final = Bindings(roster.rank)
        self.bindings.install(joined.policy)
        self.first_rounds: Final[dict[Key, int]] = {}
        self._waiting, elastic = waiting, roster.elastic
        self.aggregation: Final = NodeRounds(
            roster.rank,
            self.bindings,
            outbox,
            counters,
            options.auxiliary,
            elastic=elastic,
            waiting=waiting,
            reproducible=joined.reproducible,
        )
        self.reproducible: Final = joined.reproducible
        self.asynchronous: Final = Asynchronous(
            roster.rank,
            joined.policy,
            joined.owners or (1,) * len(joined.members),
            outbox=outbox,
            counters=counters,
            end_job=end_job,
            elastic=elastic,
            later=joined.later,
            known_keys=len(joined.keys),
            waiting=waiting,
            wait_timeout_s=options.wait_timeout_s,
        )
        self.point_to_point: Final = PointToPoint(
            roster.rank, joined.policy, outbox=outbox, counters=counters, elastic=elastic
        )
        self.routes: Final = KnownRoutes(roster.rank, joined.policy, counters, waiting, self.bindings.plans)
        self._roster, self._detours, self._outbox = roster, detours, outbox
        self._report_again: Final[dict[int, float]] = {}
        """By rank whose process has probably ended: when to say so again."""
        self.state: Final = StateTransfer(
            roster.rank,
            joined.policy,
            needed=joined.later,
            outbox=outbox,
            counters=counters,
            on_receipt=self.aggregation.views.receipts.record,
        )
        self.aggregation.views.fresh = joined.later
        self.known_keys: Final = frozenset((spec.namespace, spec.name) for spec in joined.keys)
        self.add_granted_keys(joined.keys, joined.grants)

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message of another node.

        Raises:
            ProtocolViolation: no correct node sends it.
            NoRoom: it would have to wait, and too much waits already.
        """
        self._waiting.begin(peer)
        try:
            self._receive(peer, message, payload, payload_crc, now)
        finally:
            self._waiting.end()

    def _receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        match message:
            case m.Part(is_aux=False):
                self.aggregation.receive(peer, message, payload, payload_crc)
            case m.Delivered():
                self._delivered(peer, message, now)
            case m.LinkTrial():
                self._link_trial(peer, message)
            case _ if isinstance(message, (m.Part, m.Routed)):
                if self.routes.admits(peer, message, payload, payload_crc):
                    self._receive_along_path(peer, message, payload, payload_crc, now)
            case _:
                raise ProtocolViolation(f"a general node takes no {type(message).__name__} from peer {peer}")

    def _receive_along_path(
        self,
        peer: Peer,
        message: m.Part | m.Routed,
        payload: Buffer | None,
        payload_crc: int | None,
        now: float,
    ) -> None:
        """Handle a message that carries its path."""
        if isinstance(message, m.Part):
            self._receive_auxiliary(peer, message, payload, payload_crc)
        elif isinstance(message, m.StateMessage):
            self.state.receive(peer, message, payload, payload_crc, now)
        elif isinstance(message, m.PointToPointMessage):
            self.point_to_point.receive(peer, message, payload, payload_crc)
        else:
            self.asynchronous.receive(peer, message, payload, payload_crc)

    def _receive_held(self, now: float) -> None:
        """Handle the messages whose path is known by now."""
        for peer, message, payload, crc, charge in self.routes.release():
            self._waiting.begin(charge.peer, again=True)
            try:
                self._receive(peer, message, payload, crc, now)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a message that rank %d sent early: %s", peer, error)

    # ------------------------------------------------------------------------------- the scheduler's messages

    def keys_registered(self, message: m.KeysRegistered, registration: Registration) -> None:
        """Begin the operations that have waited for the numbers of keys.

        Raises:
            ProtocolViolation: keys that were not requested.
        """
        for binding in message.bindings:
            self.bindings.bind(binding)
        for grant in message.grants:
            key, operations = registration.grant(grant)
            self.aggregation.add_key(key)
            if key in self.first_rounds:
                self.aggregation.begin_at({key.identity: self.first_rounds.pop(key)})
            self.asynchronous.key_granted(key)
            for operation in operations:
                self.aggregation.submit(operation, operation.begun_at)

    def add_granted_keys(self, specs: Iterable[m.KeySpec], grants: Iterable[m.KeyGrant]) -> None:
        """Take part in the sums of keys that others have registered, and this rank's program has not yet."""
        for spec, grant in zip(specs, grants, strict=True):
            self.aggregation.add_key(Key.granted(spec, grant))

    def topology_answer(self, message: m.TopologyAnswer) -> None:
        """Begin the rounds whose policy is known now."""
        for binding in message.bindings:
            self.bindings.bind(binding)
        self.aggregation.advance({binding.key for binding in message.bindings})

    def new_policy(self, policy: Policy, *, of_view: bool = False) -> None:
        """Install a policy that rounds may run under from now on; sums wait until a new view is agreed on."""
        plan = self.bindings.install(policy)
        self.routes.new_policy(policy)
        self.asynchronous.new_policy(policy, of_view=of_view)
        self.point_to_point.new_policy(policy, of_view=of_view)
        if policy.members:
            self.state.new_policy(policy)
        self._counters.add("policies")
        if not of_view:
            self.aggregation.new_policy(plan)

    def departed(self, rank: int, error: NodeLost) -> None:
        """Fail what waits for a rank that is in the job no more."""
        self.point_to_point.departed(rank, error)
        self.asynchronous.departed(rank, error)

    def peer_finished(self, rank: int) -> None:
        """Record that the program of a rank, which may be this one, has ended."""
        self.asynchronous.finished(rank)
        self.point_to_point.finished(rank)

    # --------------------------------------------------------------------------------- for its node

    def outstanding(self) -> Iterator[Operation | AsyncOperation | PointToPointOperation]:
        """Yield the operations that are not complete and that this rank's program waits for."""
        yield from self.aggregation.outstanding()
        yield from self.asynchronous.outstanding()
        yield from self.point_to_point.outstanding()

    def oldest(self) -> float:
        """Return when the oldest of them was submitted (inf: there is none)."""
        return min(self.aggregation.oldest(), self.asynchronous.oldest(), self.point_to_point.oldest())

    def waiting_text(self, since: float) -> str:
        """Return what the program has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.aggregation.outstanding():
            if operation.begun_at <= since:
                return self.aggregation.waiting_text_of(operation)
        return self.asynchronous.waiting_text(since) or self.point_to_point.waiting_text(since)

    def has_announcements(self) -> bool:
        """Return whether there is something to announce to the scheduler."""
        aggregation = self.aggregation
        return (
            bool(aggregation.topology_requests.pending)
            or bool(aggregation.takeover.announcements)
            or aggregation.views.caught_up
            or bool(aggregation.calls.reports)
        )

    def take_announcements(self) -> Iterator[m.Message]:
        """Yield what is to be announced to the scheduler, once."""
        begun = self.aggregation.topology_requests.take()
        if begun:
            yield m.TopologyRequest(begun=begun)
        if self.aggregation.takeover.announcements:
            yield from self.aggregation.takeover.take_announcements()
        if self.aggregation.views.caught_up and self.aggregation.views.take_caught_up():
            yield m.CaughtUp()
        yield from self.aggregation.calls.take_reports()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.routes.has_news:
            self._receive_held(now)
        self.aggregation.tick(now)
        if self._roster.elastic:  # blocks change owners, and newcomers get the state, in no other job
            self.asynchronous.tick(now)
            self.state.tick(now)
            if self.state.report_due(now):
                self.state.report(self.aggregation.views.received(), now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        if self.routes.has_news:
            return -math.inf
        due = self.aggregation.next_tick()
        return (
            min(due, self.asynchronous.next_tick(), self.state.next_tick()) if self._roster.elastic else due
        )

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        self.aggregation.fail_all(error)
        self.asynchronous.fail_all(error)
        self.point_to_point.fail_all(error)
        self.state.fail_all(error)

    # ------------------------------------------------------------------------------------- paths and links

    # A relay forwards parts on auxiliary paths, and around failed links, without looking into them. At the
    # end of the path a part counts as sent by the first node of the path.

    def _receive_auxiliary(
        self, peer: Peer, part: m.Part, payload: Buffer | None, payload_crc: int | None
    ) -> None:
        """Handle a part on an auxiliary path: forward it, or receive it as if its first node had sent it.

        Raises:
            ProtocolViolation: its path does not lead here.
            NoRoom: it would have to wait, and too much waits already.
        """
        check_path(part, peer, self._roster.rank, len(self._roster.members))
        if not self.aggregation.relay(peer, part, payload, payload_crc):
            confirmation = None if part.around else delivery_confirmation(part)
            try:
                self.aggregation.receive(Peer(part.path[0]), part, payload, payload_crc)
            except NoRoom:
                confirmation = None  # it has not arrived, so path[0] is not to send more
                raise
            finally:
                if confirmation is not None:
                    self._outbox.add(confirmation)

    def _delivered(self, peer: Peer, message: m.Delivered, now: float) -> None:
        """Handle the confirmation that a part has arrived at the end of its auxiliary path.

        Raises:
            ProtocolViolation: this node is not on that path.
        """
        check_path(message, peer, self._roster.rank, len(self._roster.members))
        further = relay_confirmation(message)
        if further is not None:
            self._outbox.add(further)
        else:
            part = (message.key, message.round, message.chunk, int(message.phase), message.version)
            self.aggregation.dispatch.record_arrival(message.path, part, now)

    def peer_refused(self, target: int, reason: str, now: float) -> None:
        """Report that no process listens where a node was."""
        member = self._roster.members[target]
        if member.port and now >= self._report_again.get(target, 0.0):
            self._report_again[target] = now + _REPORT_EVERY_S
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason, refused=True))

    def peer_busy(self, target: int, seconds: float) -> None:
        """Report that a node does not answer, but the kernel of its machine acknowledges. The scheduler says
        if it hears of that node: then it is not busy, but the connection with it is broken.
        """
        if self._roster.members[target].port:
            reason = f"it has not answered for {seconds:.1f} s"
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason, busy=True))

    def link_lost(self, target: int, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """Report a failed link to the scheduler. What was to go over it waits for a detour."""
        if not self._roster.members[target].port:
            return  # it is in the job no more
        if self._detours.record_failure(target, now):
            _log.info("%s cannot be reached from here: %s", self._roster.describe(target), reason)
            self._roster.suspect(target, reason, now)
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason))
        parts = parts_to_resend(undelivered, self._roster.rank, self.aggregation.is_obsolete)
        self._outbox.add_all(parts)
        self._outbox.add_all(messages_to_resend(undelivered))

    def failed_links(self, message: m.FailedLinks) -> None:
        """Record which links have failed, and send what waits for them over the scheduler's detours."""
        self.routes.failed_links(message)
        for target, path in self._detours.record_decision(self._roster.rank, message):
            if self._roster.clear_suspicion(target):
                _log.warning(
                    "the link to %s has failed; traffic to it goes over ranks %s",
                    self._roster.describe(target),
                    ", ".join(map(str, path[1:-1])),
                )
            self._outbox.add_all(self._detours.release(target))
        self.aggregation.dispatch.avoid(self._detours.avoided)

    def retry_failed_links(self, now: float) -> None:
        """Try the failed links whose next trial is due."""
        for target in self._detours.due_trials(now):
            member = self._roster.members[target]
            self._outbox.add(
                Connect(peer=Peer(target), host=member.host, port=member.port),
                Send(peer=Peer(target), message=m.LinkTrial()),
            )

    def _link_trial(self, peer: Peer, trial: m.LinkTrial) -> None:
        """Answer a trial of a link; an answer means that the link works again.

        Raises:
            Overloaded: it would soon fail again, for want of room.
        """
        if not trial.answer:
            self._outbox.forwarded.check(peer)
            self._outbox.add(Send(peer=peer, message=m.LinkTrial(answer=True), back=True))
        elif int(peer) in self._detours.failed:
            _log.warning("the link to %s works again", self._roster.describe(int(peer)))
            self._outbox.add_all(self._detours.restored(int(peer)))
            self._roster.clear_suspicion(int(peer))
            self._outbox.send_to_scheduler(m.LinkRestored(rank=int(peer)))


# Who is in a job now, if nodes may leave and join it, and which scheduler it follows.
#
# A program reads this between two steps, in its own thread. Each property reads one attribute that the I/O
# thread replaces as a whole, so it needs no lock.


class LiveJob:
    """The present members of one node's job, as this node has last heard."""

    def __init__(self, node: GeneralNode) -> None:
        self._node: Final = node

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave the job and join it."""
        return self._node.roster.elastic

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job, with those that do not have its state yet."""
        joined = self._node.joined
        members = () if joined is None else joined.state.policy.members
        return members or tuple(member.rank for member in self._node.roster.present())

    @property
    def first_members(self) -> tuple[Member, ...]:
        """The nodes that were in the job when this one joined; the same at all that have begun it."""
        return self._node.roster.first_members

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose values are in the sums of rounds that begin now."""
        joined = self._node.joined
        silent = () if joined is None else joined.state.policy.silent
        return tuple(rank for rank in self.ranks if rank not in silent)

    @property
    def contributes(self) -> bool:
        """Whether this node's values are. A newcomer's are not, until it has caught up."""
        return self._node.rank in self.contributors

    @property
    def training(self) -> tuple[int, ...]:
        """Those of them whose programs have not ended."""
        finished = self._node.roster.finished
        return tuple(rank for rank in self.contributors if rank not in finished)

    @property
    def scheduler(self) -> tuple[str, int] | None:
        """Host and port of the scheduler that this node follows; None: it has not joined yet."""
        return self._node.scheduler.followed

    @property
    def has_newcomers(self) -> bool:
        """Whether a rank waits for an offer of this rank's state."""
        return bool(self.state_requests)

    @property
    def state_requests(self) -> frozenset[int]:
        """Numbers of the requests for this rank's state that were not answered yet. A state that is made now
        answers them, and none that come later (`Snapshot.requests`).
        """
        joined = self._node.joined
        return frozenset() if joined is None else joined.state.providing.requests

    def waiting_text(self) -> str:
        """Return what a fetch of the state waits for, for a person; on the I/O thread."""
        joined = self._node.joined
        return "" if joined is None else joined.state.waiting_text()
