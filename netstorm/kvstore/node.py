"""The general node: trains, aggregates and forwards. A pure state machine (design, §3 and §5).

Here is what its driver calls: messages and the time come in, instructions go out. What the user's program
asks for is in `requests`, the scheduler's messages are in `scheduler_messages`, and the node's states and its
end are in `lifecycle`.
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
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions
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
from netstorm.topology.policy import Policy

__all__ = ["GeneralNode", "NodeState"]


_log = logging.getLogger(__name__)

_FROM_MEMBERS: Final = may_send(Role.MEMBER, Role.MEMBER)


class GeneralNode:
    """One rank. Implements `pslite.machine.Machine`, `Rerouter` and `Dispatcher`.

    Attributes:
        requests: what the user's program asks for.
        status: how the node is doing, for heartbeats and metrics.
        meter: measures links from the traffic; the owner of the endpoint attaches it. None: nothing is
        measured.
    """

    def __init__(self, options: NodeOptions, *, now: float, counters: Counters | None = None) -> None:
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.meter: Final = None if options.meter is None else LinkMeter(options.meter, now=now)
        self._life: Final = Lifecycle(options, self.counters, now)
        self._deadlines: Final = Deadlines(self._life, now)
        self._progress: Final = RoundProgress(self._life, self._deadlines)
        self._scheduler_messages: Final = SchedulerMessages(self._life, self._progress)
        self._recovering: Final = RecoveringSchedulers(self._life.scheduler, self._life.outbox)
        self.requests: Final = NodeRequests(self._life, self._progress, self._deadlines)
        self.status: Final[NodeStatusTracker] = self._progress.status

    @property
    def rank(self) -> int:
        """This node's rank; -1 until it has joined."""
        return self._life.roster.rank

    @property
    def members(self) -> tuple[m.Member, ...]:
        """All nodes of the job, by rank; empty until this one has joined."""
        return self._life.roster.members

    @property
    def policy(self) -> Policy | None:
        """The newest policy that this node has received; None before it has joined."""
        return None if self._life.joined is None else self._life.joined.policy

    @property
    def state(self) -> NodeState:
        """Where the node is in its life."""
        return self._life.state

    @property
    def waiting(self) -> WaitingBytes:
        """What messages that cannot be used yet count. See `Bounded`."""
        return self._life.waiting

    @property
    def failure(self) -> NetStormError | None:
        """Why nothing works any more; None while it does."""
        return self._life.failure

    # ---------------------------------------------------------------------------------- messages come in

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Admit the members of this job, and no other process."""
        if hello.job != self.options.job:
            return Refuse(f"this is a node of job {self.options.job!r}, not of {hello.job!r}")
        if self._life.has_ended:
            return Refuse(f"rank {self.rank} has left the job")
        if self._recovering.asks(hello):
            return self._recovering.admit(hello, self.rank)
        if self._life.state is NodeState.JOINING:
            return NotYet()
        return self._life.roster.admit(hello, user)

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message of a peer."""
        life = self._life
        if life.failure is not None:
            return
        if peer <= UNKNOWN:
            self._receive_from_recovering(peer, message, now)
        elif peer != SCHEDULER:
            joined = life.require_joined()
            if type(message) not in _FROM_MEMBERS:
                raise not_authorised(message, f"rank {peer}")
            if life.roster.running:
                life.roster.running.pop(int(peer), None)
            joined.receive(peer, message, payload, payload_crc, now)
        else:
            role = Role.APPLICANT if life.state is NodeState.JOINING else Role.MEMBER
            check_authority(message, Role.SCHEDULER, role, "the scheduler")
            life.scheduler.check_proof(message)
            self._scheduler_messages.receive(message, now)
        self._progress.record_completed_rounds(now)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to the loss of a session that a peer opened: the peer opens a new one when it needs it."""
        _log.debug("rank %d: a session that rank %d opened is lost: %s", self.rank, peer, reason)

    def link_lost(self, peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """React to a session that cannot be re-established. See `Rerouter`."""
        if self._life.has_ended:
            return
        if peer != SCHEDULER:
            self._life.require_joined().neighbours.link_lost(int(peer), reason, undelivered, now)
        else:
            error = self._life.scheduler.connection_lost(reason, undelivered, now)
            if error is not None:
                self._life.fail(error)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """Tell the scheduler that another node's process has probably ended, or find that the scheduler's
        has. See `ConnectionWatcher`.
        """
        life = self._life
        if not refused or life.has_ended or peer <= UNKNOWN:
            return
        if peer == SCHEDULER:
            error = life.scheduler.refused(reason, now)
            if error is not None:
                life.fail(error)
        elif life.joined is not None:
            life.joined.neighbours.refused(int(peer), reason, now)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`."""
        life = self._life
        if life.joined is None or life.has_ended or peer <= UNKNOWN:
            return False
        return peer == SCHEDULER or life.roster.may_be_busy(int(peer), now)

    def peer_busy(self, peer: Peer, seconds: float, now: float) -> None:
        """Learn that a node, or the scheduler, is busy. See `ConnectionWatcher`."""
        life = self._life
        if life.joined is None or life.has_ended or peer <= UNKNOWN:
            return
        if peer == SCHEDULER:
            life.scheduler.busy(seconds)
            life.roster.restart_suspicions(now)  # it decides about them, and cannot
        else:
            life.joined.neighbours.busy(int(peer), seconds)

    # ----------------------------------------------------------------------------------------- time passes

    def tick(self, now: float) -> None:
        """Send what is due, and check deadlines."""
        life = self._life
        self._progress.contribute_zeros(now)
        self._progress.flush()
        if life.has_ended:
            return
        if life.joined is not None:
            life.joined.tick(now)
            self._progress.record_completed_rounds(now)
        error: NetStormError | None = life.scheduler.try_reconnect(self._scheduler_messages.resume, now)
        if error is not None:
            life.fail(error)
        if life.joined is not None and life.detours.failed:
            life.joined.neighbours.retry_failed_links(now)
        self._send_heartbeat(now)
        error = self._deadlines.expired(now)
        if error is not None:
            life.end_job(error)

    def next_tick(self) -> float:
        """Return when something is due."""
        life = self._life
        if life.has_ended:
            return math.inf
        if self._progress.has_announcements() or self._progress.zeros_are_due():
            return 0.0
        due = min(life.scheduler.next_deadline(), self._deadlines.next_deadline())
        if life.detours.failed:
            due = min(due, life.detours.next_trial())
        if life.joined is not None:
            due = min(due, life.joined.next_tick())
        if self.meter is not None:
            due = min(due, self.meter.due())
        return due

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding; announce nothing."""
        if not isinstance(error, NetStormError):
            error = errors.Closed(f"the I/O thread has died: {error!r}")
        self._life.fail(error)

    # ------------------------------------------------------------------------------------ instructions go out

    def dispatch(self, links: Links, now: float) -> bool:
        """Send the chunks that wait here for the state of links. See `Dispatcher`."""
        joined = self._life.joined
        if joined is None or not joined.aggregation.dispatch.backlogs:
            return False
        joined.aggregation.run_dispatch(links, now)
        return True

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken = self._life.outbox.take()
        if not taken or not self._life.detours.failed:
            return taken
        return self._life.detours.route(self.rank, taken)

    def _receive_from_recovering(self, peer: Peer, message: m.Message, now: float) -> None:
        """Handle a message of a scheduler that would take the job over."""
        check_authority(message, Role.RECOVERER, Role.MEMBER, "a scheduler that takes over")
        assert isinstance(message, m.Recover)  # the one message of its authority
        roster = self._life.roster
        self._recovering.receive(peer, message, roster, self._life.elastic, now)

    def _send_heartbeat(self, now: float) -> None:
        """Send a heartbeat, the status and measurements, as far as they are due."""
        outbox = self._life.outbox
        if self._life.scheduler.heartbeat_due(now):
            outbox.send_to_scheduler(m.Heartbeat(busy=self._deadlines.waiting_text(now)))
            if self._life.state is not NodeState.JOINING:
                outbox.send_to_scheduler(self.status.report(now))
        if self.meter is not None and now >= self.meter.due():
            measured = self.meter.report(now)
            if measured is not None:
                outbox.send_to_scheduler(measured)


# The work of a node that has joined: sums over trees, pushes to owners, messages, its neighbours. Pure.


class JoinedNode:
    """The work of one node.

    Attributes:
        aggregation: all-reduces.
        bindings: which policy each round runs under.
        asynchronous: pushes and pulls, which owners serve.
        point_to_point: sends and receives.
        neighbours: auxiliary paths, and links that fail.
        routes: the paths that messages of others may come along.
        state: the state that newcomers need.
        first_rounds: of keys that have no number yet, if this rank takes part later.
        reproducible: results are the same in each run.
        known_keys: namespaces and names of the keys that the others had before this node came.
    """

    def __init__(
        self,
        joined: m.Joined,
        *,
        roster: Roster,
        detours: Detours,
        outbox: Outbox,
        counters: Counters,
        auxiliary: AuxiliaryOptions,
        waiting: WaitingBytes,
        wait_timeout_s: float,
        end_job: Callable[[NetStormError], None],
    ) -> None:
        """Begin without operations.

        Args:
            joined: the scheduler's message that all nodes have joined.
            roster, detours: the members of the job, and ways around failed links.
            outbox, counters: take instructions, and count.
            auxiliary: rules for auxiliary paths.
            waiting: counts the messages that come early.
            wait_timeout_s: NETSTORM_WAIT_TIMEOUT.
            end_job: fails the whole job.
        """
        self._counters: Final = counters
        self.bindings: Final = Bindings(roster.rank)
        self.bindings.install(joined.policy)
        self.first_rounds: Final[dict[Key, int]] = {}
        self._waiting, elastic = waiting, roster.elastic
        self.aggregation: Final = self._aggregation(joined, roster, outbox, auxiliary)
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
            waiting=waiting,
            wait_timeout_s=wait_timeout_s,
        )
        self.point_to_point: Final = PointToPoint(
            roster.rank, joined.policy, outbox=outbox, counters=counters, elastic=elastic
        )
        self.routes: Final = KnownRoutes(roster.rank, joined.policy, counters, waiting)
        self.neighbours: Final = Neighbours(roster, self.aggregation, detours, outbox)
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
        add_granted_keys(self.aggregation, joined.keys, joined.grants)

    def _aggregation(
        self, joined: m.Joined, roster: Roster, outbox: Outbox, auxiliary: AuxiliaryOptions
    ) -> NodeRounds:
        return NodeRounds(
            roster.rank,
            self.bindings,
            outbox,
            self._counters,
            auxiliary,
            elastic=roster.elastic,
            waiting=self._waiting,
            reproducible=joined.reproducible,
        )

    @property
    def policy(self) -> Policy:
        """The newest policy that this node has received."""
        return self.bindings.newest

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
                self.neighbours.delivered(peer, message, now)
            case m.LinkTrial():
                self.neighbours.link_trial(peer, message)
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
            self.neighbours.receive_auxiliary(peer, message, payload, payload_crc)
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

    # ----------------------------------------------------------------------------- the scheduler's messages

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

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.routes.has_news:
            self._receive_held(now)
        self.aggregation.tick(now)
        self.asynchronous.tick(now)
        self.state.tick(now)
        if self.state.report_due(now):
            self.state.report(self.aggregation.views.received(), now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        if self.routes.has_news:
            return -math.inf
        state, asynchronous = self.state, self.asynchronous
        due = min(state.next_report(), state.next_tick(), asynchronous.next_tick())
        return min(self.aggregation.next_tick(), due)

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        self.aggregation.fail_all(error)
        self.asynchronous.fail_all(error)
        self.point_to_point.fail_all(error)
        self.state.fail_all(error)


def add_granted_keys(
    aggregation: NodeRounds, specs: Iterable[m.KeySpec], grants: Iterable[m.KeyGrant]
) -> None:
    """Take part in the sums of keys that others have registered, and this rank's program has not yet."""
    for spec, grant in zip(specs, grants, strict=True):
        aggregation.add_key(Key.granted(spec, grant))


# The life of a general node: joining, running, finishing, over; and how a failure ends it. Pure.
#
# A node is `joining` until the scheduler has all nodes, `running`, `finishing` once the user's program will
# push no more, and `over` when no rank needs it any longer. A failure, wherever it happened, ends all
# outstanding operations and every later one with the same error.


class NodeState(enum.Enum):
    """Where a node is in its life."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


class Lifecycle:
    """The state of one node, and the parts that begin and end with it.

    Attributes:
        state: where the node is in its life.
        failure: why nothing works any more; None while it does.
        roster: the members of the job; empty until the scheduler has all nodes.
        joined: what a node that has joined works with; None before.
        waiting: counts the messages of others that cannot be used yet.
        elastic: fewest and most nodes, of a job that nodes may leave and join.
        registration, barriers, local_steps, detours, scheduler: what this node has asked for, and its peers.
        outbox: what its driver is to do.
    """

    def __init__(self, options: NodeOptions, counters: Counters, now: float) -> None:
        """Ask the scheduler to join."""
        self.options: Final = options
        self.counters: Final = counters
        self.state = NodeState.JOINING
        self.failure: NetStormError | None = None
        self.roster = Roster(-1, ())
        self.joined: JoinedNode | None = None
        self.elastic: tuple[int, int] | None = None
        self.waiting: Final = WaitingBytes()
        self.outbox: Final = Outbox()
        self.registration: Final = Registration()
        self.barriers: Final = NodeBarriers(self.outbox)
        self.local_steps: Final = NodeLocalSteps(self.outbox)
        self.detours: Final = Detours(counters, options.link_retry_s)
        self.scheduler: Final = SchedulerSession(options, self.outbox, now)
        self._waiting_to_join: Final[list[Done]] = []
        self._waiting_to_finish: Final[list[Done]] = []

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

    def when_joined(self, done: Done) -> None:
        """Call `done` when all nodes have joined, or with the reason why that will not happen."""
        self._call_or_keep(self._waiting_to_join, done, ready=self.state is not NodeState.JOINING)

    def when_over(self, done: Done) -> None:
        """Call `done` when no rank needs this node any longer, or with the error that ended the job."""
        self._call_or_keep(self._waiting_to_finish, done, ready=self.state is NodeState.OVER)

    def start(self, message: m.Joined, now: float) -> None:
        """Begin to work: all nodes have joined.

        Raises:
            ProtocolViolation: the node has joined before.
        """
        if self.state is not NodeState.JOINING:
            raise ProtocolViolation("joined twice")
        self.state, self.elastic = NodeState.RUNNING, message.elastic
        self.roster = Roster(
            message.rank,
            message.members,
            pads_with_zeros=message.joins,
            elastic=message.elastic is not None,
        )
        self.barriers.start(message.barriers)
        self.scheduler.start(message, now)
        self.joined = JoinedNode(
            message,
            roster=self.roster,
            detours=self.detours,
            outbox=self.outbox,
            counters=self.counters,
            auxiliary=self.options.auxiliary,
            waiting=self.waiting,
            wait_timeout_s=self.options.wait_timeout_s,
            end_job=self.end_job,
        )
        for member in message.members:
            if not member.port:
                absent = NodeLost(f"rank {member.rank} is not in the job: no node has come for it yet")
                self.joined.point_to_point.departed(member.rank, absent)
        self.outbox.add(Become(rank=self.roster.rank))
        for member in self.roster.others():
            self.outbox.add(Connect(peer=Peer(member.rank), host=member.host, port=member.port))
        self.outbox.complete_all(self._waiting_to_join, None)

    def leave(self) -> None:
        """Leave the job in good order: all ranks have finished."""
        self.state = NodeState.OVER
        self.outbox.send_to_scheduler(m.Leave())
        for member in self.roster.others():
            failed = member.rank in self.detours.failed
            self.outbox.add(Disconnect(peer=Peer(member.rank), at_once=failed))
        self.outbox.add(Disconnect(peer=SCHEDULER))
        self.outbox.complete_all(self._waiting_to_finish, None)

    def fail(self, error: NetStormError, *, announce: str | None = None) -> None:
        """Fail all operations, now and later. The first failure is the one that is kept.

        Args:
            error: what operations fail with.
            announce: the reason to tell the other ranks; None: they know it already.
        """
        if self.has_ended:
            return
        self.failure = error
        self.outbox.send_to_scheduler(m.Leave() if announce is None else m.Failed(reason=announce))
        for member in self.roster.others():
            self.outbox.add(Disconnect(peer=Peer(member.rank), at_once=True))
        if self.joined is not None:
            self.joined.fail_all(error)
        for operation in self.registration.waiting_operations():
            self.outbox.complete(operation.done, error)
        self.registration.clear()
        self.barriers.fail_all(error)
        self.local_steps.fail_all(error)
        self.outbox.complete_all(self._waiting_to_join, error)
        self.outbox.complete_all(self._waiting_to_finish, error)
        self.outbox.add(Disconnect(peer=SCHEDULER))

    def end_job(self, error: NetStormError) -> None:
        """Fail for a reason that was found here, and announce it to all ranks."""
        self.fail(error, announce=f"{type(error).__name__}: {error}")

    def _call_or_keep(self, waiting: list[Done], done: Done, *, ready: bool) -> None:
        if ready or self.failure is not None:
            self.outbox.complete(done, self.failure)
        else:
            waiting.append(done)


# Who is in a job now, if nodes may leave and join it, and which scheduler it follows. Pure.
#
# A program reads this between two steps, in its own thread. Each property reads one attribute that the I/O
# thread replaces as a whole, so it needs no lock.


class LiveJob:
    """The present members of one node's job, as this node has last heard."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._life: Final = lifecycle

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave the job and join it."""
        return self._life.roster.elastic

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job, with those that do not have its state yet."""
        joined = self._life.joined
        members = () if joined is None else joined.state.policy.members
        return members or tuple(member.rank for member in self._life.roster.present())

    @property
    def first_members(self) -> tuple[Member, ...]:
        """The nodes that were in the job when this one joined; the same at all that have begun it."""
        return self._life.roster.first_members

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose values are in the sums of rounds that begin now."""
        joined = self._life.joined
        silent = () if joined is None else joined.state.policy.silent
        return tuple(rank for rank in self.ranks if rank not in silent)

    @property
    def training(self) -> tuple[int, ...]:
        """Those of them whose programs have not ended."""
        finished = self._life.roster.finished()
        return tuple(rank for rank in self.contributors if rank not in finished)

    @property
    def scheduler(self) -> tuple[str, int] | None:
        """Host and port of the scheduler that this node follows; None: it has not joined yet."""
        return self._life.scheduler.followed

    @property
    def has_newcomers(self) -> bool:
        """Whether a rank waits for an offer of this rank's state."""
        return bool(self.state_requests)

    @property
    def state_requests(self) -> frozenset[int]:
        """Numbers of the requests for this rank's state that were not answered yet. A state that is made now
        answers them, and none that come later (`Snapshot.requests`).
        """
        joined = self._life.joined
        return frozenset() if joined is None else joined.state.providing.requests

    def waiting_text(self) -> str:
        """Return what a fetch of the state waits for, for a person; on the I/O thread."""
        joined = self._life.joined
        return "" if joined is None else joined.state.waiting_text()


# What nodes exchange besides parts of trees: parts on auxiliary paths, and links that fail and recover.
# Pure.
#
# A relay forwards parts on auxiliary paths, and around failed links, without looking into them. At the end of
# the path a part counts as sent by the first node of the path.

_REPORT_EVERY_S: Final = 0.5
"""Between two reports that no process listens where a node was: the first may have come too early."""


class Neighbours:
    """The traffic of one node with its neighbours, beside that of the trees."""

    def __init__(self, roster: Roster, aggregation: NodeRounds, detours: Detours, outbox: Outbox) -> None:
        self._roster: Final = roster
        self._aggregation: Final = aggregation
        self._detours: Final = detours
        self._outbox: Final = outbox
        self._report_again: Final[dict[int, float]] = {}
        """By rank whose process has probably ended: when to say so again."""

    def receive_auxiliary(
        self, peer: Peer, part: m.Part, payload: Buffer | None, payload_crc: int | None
    ) -> None:
        """Handle a part on an auxiliary path: forward it, or receive it as if its first node had sent it.

        Raises:
            ProtocolViolation: its path does not lead here.
            NoRoom: it would have to wait, and too much waits already.
        """
        check_path(part, peer, self._roster.rank, len(self._roster.members))
        if not self._aggregation.relay(part, payload, payload_crc):
            confirmation = None if part.around else delivery_confirmation(part)
            try:
                self._aggregation.receive(Peer(part.path[0]), part, payload, payload_crc)
            except NoRoom:
                confirmation = None  # it has not arrived, so path[0] is not to send more
                raise
            finally:
                if confirmation is not None:
                    self._outbox.add(confirmation)

    def delivered(self, peer: Peer, message: m.Delivered, now: float) -> None:
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
            self._aggregation.dispatch.record_arrival(message.path, part, now)

    def refused(self, target: int, reason: str, now: float) -> None:
        """Report that no process listens where a node was."""
        member = self._roster.members[target]
        if member.port and now >= self._report_again.get(target, 0.0):
            self._report_again[target] = now + _REPORT_EVERY_S
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason, refused=True))

    def busy(self, target: int, seconds: float) -> None:
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
        parts = parts_to_resend(undelivered, self._roster.rank, self._aggregation.is_obsolete)
        self._outbox.add_all(parts)
        self._outbox.add_all(messages_to_resend(undelivered))

    def failed_links(self, message: m.FailedLinks) -> None:
        """Record which links have failed, and send what waits for them over the scheduler's detours."""
        for target, path in self._detours.record_decision(self._roster.rank, message):
            if self._roster.clear_suspicion(target):
                _log.warning(
                    "the link to %s has failed; traffic to it goes over ranks %s",
                    self._roster.describe(target),
                    ", ".join(map(str, path[1:-1])),
                )
            self._outbox.add_all(self._detours.release(target))
        self._aggregation.dispatch.avoid(self._detours.avoided)

    def retry_failed_links(self, now: float) -> None:
        """Try the failed links whose next trial is due."""
        for target in self._detours.due_trials(now):
            member = self._roster.members[target]
            self._outbox.add(
                Connect(peer=Peer(target), host=member.host, port=member.port),
                Send(peer=Peer(target), message=m.LinkTrial()),
            )

    def link_trial(self, peer: Peer, trial: m.LinkTrial) -> None:
        """Answer a trial of a link; an answer means that the link works again."""
        if not trial.answer:
            self._outbox.add(Send(peer=peer, message=m.LinkTrial(answer=True), back=True))
        elif int(peer) in self._detours.failed:
            _log.warning("the link to %s works again", self._roster.describe(int(peer)))
            self._outbox.add_all(self._detours.restored(int(peer)))
            self._roster.clear_suspicion(int(peer))
            self._outbox.send_to_scheduler(m.LinkRestored(rank=int(peer)))


# What a node does when the members of its job change: sessions, sums, messages, barriers. Pure.


class NodeViews:
    """The views of one node's job.

    Attributes:
        number: of the present view.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.number = 0
        self._life: Final = lifecycle

    def begin(self, message: m.NewView) -> None:
        """Go over to a new view: stop, and report which results are here.

        Raises:
            ProtocolViolation: the view is not newer than the last one.
        """
        life = self._life
        joined, roster = life.require_joined(), life.roster
        report = joined.aggregation.views.begin(message)
        self.number = message.view
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
                life.outbox.add(Connect(peer=Peer(member.rank), host=member.host, port=member.port))
        for rank in former:
            self._leave_behind(rank, message)
        for rank in message.arrivals:
            joined.point_to_point.arrived(rank)
            joined.state.providing.forget(rank)
        joined.new_policy(message.policy, of_view=True)
        life.outbox.send_to_scheduler(report)

    def agree(self, message: m.ViewAgreed) -> None:
        """Go on in the new view."""
        joined = self._life.require_joined()
        if joined.aggregation.agree(message):
            joined.state.view_agreed()

    def _leave_behind(self, rank: int, message: m.NewView) -> None:
        life = self._life
        joined = life.require_joined()
        reasons = (one.reason for one in message.departures if one.rank == rank)
        reason = next(reasons, f"it is not in view {message.view}")
        life.outbox.add(Disconnect(peer=Peer(rank), at_once=True))
        life.detours.forget(rank)
        joined.departed(rank, NodeLost(f"rank {rank} is not in the job any more: {reason}"))


# What follows when rounds begin and complete on a node: status, announcements, zeros, uneven ends. Pure.


class RoundProgress:
    """The progress of one node's rounds.

    Attributes:
        status: counts operations and their time.
    """

    def __init__(self, lifecycle: Lifecycle, deadlines: Deadlines) -> None:
        self.status: Final = NodeStatusTracker(lifecycle.counters)
        self._life: Final = lifecycle
        self._deadlines: Final = deadlines
        self._zeros: Final = ZeroContributions()

    def record_completed_rounds(self, now: float) -> None:
        """Count the rounds that have just become complete."""
        joined = self._life.joined
        if joined is not None and joined.aggregation.completed_rounds:
            aggregation = joined.aggregation
            for round in aggregation.completed_rounds:
                self.status.operation_ended(round, now)
            aggregation.completed_rounds.clear()
            aggregation.topology_requests.round_s = self.status.round_s

    def check_for_uneven_rounds(self) -> None:
        """End the job if an operation waits for a round that a finished rank never pushed."""
        joined = self._life.joined
        if joined is not None:
            error = self._life.roster.uneven_error(joined.aggregation.outstanding())
            if error is not None:
                self._life.end_job(error)

    def flush(self) -> None:
        """Send registrations and topology requests, one message for all that have gathered."""
        life = self._life
        if life.failure is None and life.joined is not None:
            if life.registration.has_request():
                life.outbox.send_to_scheduler(life.registration.take_request())
            for announcement in life.joined.take_announcements():
                life.outbox.send_to_scheduler(announcement)
            for report in life.joined.aggregation.calls.take_reports():
                life.outbox.send_to_scheduler(report)

    def has_announcements(self) -> bool:
        """Return whether `flush` has something to send."""
        joined = self._life.joined
        return joined is not None and (
            self._life.registration.has_request()
            or joined.has_announcements()
            or bool(joined.aggregation.calls.reports)
        )

    def begin_zero_contributions(self) -> None:
        """Contribute zeros from now on, if NETSTORM_UNEVEN=join: this rank's program has ended."""
        if self._life.roster.pads_with_zeros:
            self._zeros.begin(self._life.registration.granted_keys())

    def zeros_are_due(self) -> bool:
        """Return whether `contribute_zeros` has something to do."""
        return (
            bool(self._zeros.pending)
            and self._life.state is NodeState.FINISHING
            and bool(self._life.roster.unfinished())
        )

    def contribute_zeros(self, now: float) -> None:
        """Contribute zeros to the other ranks' rounds."""
        if self.zeros_are_due():
            self._deadlines.extend_finish(now)  # the other ranks make progress
            for operation in self._zeros.take():
                self._life.require_joined().aggregation.submit(operation, now)


# What the user's program asks of a node: keys, operations, barriers, and the end. Pure.


class NodeRequests:
    """The requests of one node's program. Nothing here blocks; each `done` is called exactly once.

    Attributes:
        live: who is in the job now; may be read in any thread.
        late_start: how a program begins that needs no state of the others.
        local_steps: reports what local steps take.
    """

    def __init__(self, lifecycle: Lifecycle, progress: RoundProgress, deadlines: Deadlines) -> None:
        self._life: Final = lifecycle
        self._progress: Final = progress
        self._deadlines: Final = deadlines
        self.live: Final = LiveJob(lifecycle)
        self.late_start: Final = ProgramStart(lifecycle)
        self.local_steps: Final = lifecycle.local_steps

    @property
    def asynchronous(self) -> Asynchronous:
        """The asynchronous side of a node that has joined: pushes to owners, and what this rank owns."""
        return self._life.require_joined().asynchronous

    @property
    def point_to_point(self) -> PointToPoint:
        """The sends and receives of a node that has joined."""
        return self._life.require_joined().point_to_point

    def when_joined(self, done: Done) -> None:
        """Call `done` when all nodes have joined, or with the reason why that will not happen."""
        self._life.when_joined(done)

    def register(self, key: Key, now: float) -> None:
        """Make a key known to the job. Operations on it may be submitted at once."""
        self._life.registration.add(key)

    def submit(self, operation: Operation | AsyncOperation | PointToPointOperation, now: float) -> None:
        """Begin an operation as soon as it may begin. Its `done` is called in any case."""
        life = self._life
        if life.failure is not None:
            life.outbox.complete(operation.done, life.failure)
            return
        if isinstance(operation, (SendOperation, ReceiveOperation)):
            if life.state is not NodeState.RUNNING:
                life.outbox.complete(operation.done, errors.Closed(f"{operation}: this rank has finished"))
                return
            self.point_to_point.submit(operation, now)
            return
        if not isinstance(operation, Operation):
            self.asynchronous.submit(operation, now)
            return
        self._progress.status.operation_begun(operation.round, now)
        if operation.key.identity < 0:
            operation.begun_at = now
            life.registration.enqueue(operation)
        else:
            life.require_joined().aggregation.submit(operation, now)
            self._progress.record_completed_rounds(now)
            self._progress.check_for_uneven_rounds()

    def report_replica(self, key: Key, round: int, digest: int, now: float) -> None:
        """Have this rank's value of a key after a round compared with those of the other ranks."""
        if not self._life.has_ended and key.identity >= 0:
            replica = m.ReplicaDigest(key=key.identity, round=round, digest=digest)
            self._life.outbox.send_to_scheduler(replica)

    @property
    def reproducible(self) -> bool:
        """Whether the results of the job are to be the same in each run."""
        joined = self._life.joined
        return joined is not None and joined.reproducible

    @property
    def needs_state(self) -> bool:
        """Whether this node has joined a job that had begun, and its program does not have the state yet."""
        joined = self._life.joined
        return joined is not None and joined.state.needed

    def fetch_state(self, take: Callable[[StateSnapshot], None], done: Done, now: float) -> None:
        """Fetch the job's state from the other ranks, before one of their steps.

        Args:
            take: called with the state. Operations of rounds from `Snapshot.rounds` on may be submitted then.
            done: called after that, or with the error that ended the job.
            now: the time.
        """
        life = self._life
        if life.failure is not None:
            life.outbox.complete(done, life.failure)
            return
        joined = life.require_joined()

        def begin(snapshot: StateSnapshot) -> None:
            joined.aggregation.begin_at(snapshot.rounds)
            life.barriers.start(snapshot.barriers)
            take(snapshot)

        joined.state.fetch(begin, done, changing=joined.aggregation.views.changing)

    def offer_state(self, snapshot: StateSnapshot, now: float) -> None:
        """Offer this rank's state to the newcomers whose requests it answers; the last one, also to all who
        come later.
        """
        if not self._life.has_ended:
            self._life.require_joined().state.providing.offer(snapshot)

    def barrier(self, done: Done, now: float) -> None:
        """Call `done` when every rank has entered as many barriers as this one."""
        if self._life.failure is not None:
            self._life.outbox.complete(done, self._life.failure)
            return
        self._life.barriers.enter(done, now)

    def finish(self, done: Done, now: float) -> None:
        """Push no more; call `done` when no rank needs this node. What is outstanding completes first."""
        life = self._life
        if life.failure is None and life.state is NodeState.RUNNING:
            life.state = NodeState.FINISHING
            self._deadlines.extend_finish(now)
            self._progress.flush()
            life.outbox.send_to_scheduler(self._progress.status.report(now))
            life.outbox.send_to_scheduler(m.Finished(last_rounds=life.registration.last_rounds()))
            life.require_joined().peer_finished(life.roster.rank)
            life.when_over(lambda error: self.point_to_point.end() if error is None else None)
            self._progress.begin_zero_contributions()
        life.when_over(done)

    def fail(self, reason: str, now: float) -> None:
        """Announce that this rank's program has failed, and stop."""
        error = errors.Closed(f"rank {self._life.roster.rank} has failed: {reason}")
        self._life.fail(error, announce=reason)

    def waiting_text(self, operation: Operation) -> str:
        """Return what an operation waits for, for a person."""
        joined = self._life.joined
        if joined is None or operation.key.identity < 0:
            return "the scheduler's answer"
        return joined.aggregation.waiting_text_of(operation).removeprefix(f"{operation}: ")

    def outstanding(self) -> int:
        """Return how many operations are not complete."""
        joined = self._life.joined
        begun = 0 if joined is None else sum(1 for _ in joined.outstanding())
        return len(self._life.registration.waiting_operations()) + begun


# What a node does with each message of the scheduler. Pure.


class SchedulerMessages:
    """Handles the scheduler's messages for one node."""

    def __init__(self, lifecycle: Lifecycle, progress: RoundProgress) -> None:
        self._life: Final = lifecycle
        self._progress: Final = progress
        self._views: Final = NodeViews(lifecycle)

    def receive(self, message: m.Message, now: float) -> None:
        """Handle a message.

        Raises:
            ProtocolViolation: no correct scheduler sends it, or not now.
        """
        life = self._life
        match message:
            case m.Joined():
                life.start(message, now)
            case m.Waiting():
                life.scheduler.last_report = message.text
                _log.warning("%s", message.text)
            case m.KeysRegistered():
                life.require_joined().keys_registered(message, life.registration)
                self._progress.check_for_uneven_rounds()
            case m.TopologyAnswer():
                life.require_joined().topology_answer(message)
            case m.NewPolicy():
                life.require_joined().new_policy(message.policy)
            case m.Moved():
                life.require_joined().aggregation.chunks_moved(message)
            case m.BarrierReached():
                life.barriers.reached(message.number)
            case m.PeerFinished():
                self._peer_finished(message)
            case m.AllFinished():
                life.leave()
            case m.PeerGone():
                if message.rank != life.roster.rank or message.kind != "failed":
                    life.fail(job_end_error(message))
            case m.FailedLinks():
                life.require_joined().routes.failed_links(message)
                life.require_joined().neighbours.failed_links(message)
            case m.Resumed():
                life.scheduler.resumed(now)
                life.roster.restart_suspicions(now)
                life.local_steps.report_again()
            case _:
                self._view_message(message, now)

    def _view_message(self, message: m.Message, now: float) -> None:
        """Handle a message about views, about local steps, or about a node that may be busy."""
        match message:
            case m.StepsGranted():
                self._life.local_steps.granted(message)
            case m.Probe():
                pass
            case m.Alive():
                self._life.roster.running[message.rank] = now
            case m.NewView():
                self._views.begin(message)
                self._progress.check_for_uneven_rounds()
            case m.ViewAgreed():
                self._views.agree(message)
            case m.KeysAnnounced():
                add_granted_keys(self._life.require_joined().aggregation, message.keys, message.grants)
            case _:
                raise ProtocolViolation(
                    f"a general node takes no {type(message).__name__} from the scheduler"
                )

    def resume(self) -> m.Resume:
        """Return what a scheduler that has been started again must know of this node."""
        life = self._life
        aggregation = life.require_joined().aggregation
        aggregation.calls.report_again()
        return m.Resume(
            keys=life.registration.unanswered(),
            begun=aggregation.topology_requests.recent(),
            barriers=life.barriers.waiting_numbers(),
            last_rounds=life.registration.last_rounds() if life.state is NodeState.FINISHING else None,
            suspected=tuple(life.detours.failed),
            moved=aggregation.takeover.all_announcements(),
            view=self._views.number,
            job=job_report(life) if life.scheduler.tries_another else None,
            changing=aggregation.views.changing,
        )

    def _peer_finished(self, message: m.PeerFinished) -> None:
        self._life.roster.record_finished(message.rank, message.last_rounds)
        self._life.require_joined().peer_finished(message.rank)
        self._progress.check_for_uneven_rounds()


# How long a node waits, and the text of what it waits for. Pure.

_CHECK_EVERY_S: Final = 10.0
"""How often a waiting node logs what it waits for, and checks NETSTORM_WAIT_TIMEOUT."""

_DECISION_S: Final = 4.0
"""How much longer than the heartbeat time-out a node waits for the scheduler's decision on a rank that it
cannot reach; and for the link time-out, after which it is known whether the scheduler is busy.
"""


class Deadlines:
    """The deadlines of one node."""

    def __init__(self, lifecycle: Lifecycle, now: float) -> None:
        self._life: Final = lifecycle
        self._next_check = now + _CHECK_EVERY_S
        self._finish_by = math.inf

    def extend_finish(self, now: float) -> None:
        """Give the other ranks NETSTORM_WAIT_TIMEOUT from now until they have finished."""
        self._finish_by = now + self._life.options.wait_timeout_s

    def expired(self, now: float) -> NetStormError | None:
        """Return the error if something has taken too long; log what this node waits for now and then."""
        life = self._life
        late = life.scheduler.join_error(now)
        if late is not None:
            return late
        limit = life.scheduler.heartbeat_timeout_s + life.options.link_timeout_s + _DECISION_S
        lost = life.roster.undecided_error(now, limit)
        # In an elastic job the scheduler decides in the end, if only after restarts of its own. If all gave
        # up at the same moment, the job's state would be lost.
        if lost is not None and not life.scheduler.is_away and not life.roster.elastic:
            return lost
        if now < self._next_check:
            return None
        self._next_check = now + _CHECK_EVERY_S
        return self._wait_error(now)

    def next_deadline(self) -> float:
        """Return when `expired` has something to check, apart from the session with the scheduler."""
        return self._next_check

    def waiting_text(self, now: float) -> str:
        """Return what this node has been waiting for, for a person; empty if for nothing, or not for long."""
        life = self._life
        text = life.scheduler.waiting_text(now)
        if text:
            return text
        if life.joined is not None:
            text = life.joined.waiting_text(now - life.scheduler.heartbeat_interval_s)
            if text:
                return text
        for barrier in life.barriers.waiting_numbers():
            return f"barrier {barrier}: {life.scheduler.last_report}"
        if life.state is NodeState.FINISHING:
            return f"finished; ranks {life.roster.unfinished()} have not"
        return ""

    def _wait_error(self, now: float) -> WaitTimeout | None:
        life = self._life
        text = self.waiting_text(now)
        if text:
            _log.info("rank %d waits: %s", life.roster.rank, text)
        limit = life.options.wait_timeout_s
        oldest = min(life.barriers.oldest(), math.inf if life.joined is None else life.joined.oldest())
        if now - oldest > limit or now > self._finish_by:
            return WaitTimeout(
                f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT): {text or life.scheduler.last_report}"
            )
        return None


# What a node knows of its job: all that another scheduler needs to take it over without a log. Pure.


def job_report(lifecycle: Lifecycle) -> JobReport:
    """Return the report of a node that has joined."""
    joined, roster = lifecycle.require_joined(), lifecycle.roster
    keys = sorted(lifecycle.registration.granted_keys(), key=lambda key: key.identity)
    rows = {} if roster.elastic else joined.bindings.rows()
    older = {version for table in rows.values() for _, version in table} - {joined.policy.version}
    plans = (joined.bindings.plan(version) for version in sorted(older))
    return JobReport(
        members=roster.members,
        policy=joined.policy,
        specs=tuple(key.spec for key in keys),
        grants=tuple(key.grant for key in keys),
        granted=joined.bindings.granted(),
        finished=roster.finished(),
        barriers=lifecycle.barriers.entered,
        rows=rows,
        policies=tuple(plan.policy for plan in plans if plan is not None),
        majority=lifecycle.scheduler.majority,
        reproducible=joined.reproducible,
    )


# How a program begins that joins a running job, and needs no state of the others. Pure.
#
# In asynchronous training the values are with their owners. So a newcomer takes part at once.


class ProgramStart:
    """The begin of one node's program."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._life: Final = lifecycle

    def knows(self, key: Key) -> bool:
        """Return whether the others had a key before this node came. May be called in any thread."""
        joined = self._life.joined
        return joined is not None and (key.spec.namespace, key.name) in joined.known_keys

    def without_state(self, now: float) -> None:
        """Take part from now on, if this node has joined later."""
        joined = self._life.joined
        if joined is not None and joined.state.needed:
            joined.state.needed = False
            joined.aggregation.views.caught_up = True

    def key(self, key: Key, round: int, now: float) -> None:
        """Sum a key from this round on: the program needs no results of those before."""
        joined = self._life.require_joined()
        if key.identity < 0:
            joined.first_rounds[key] = round
        else:
            joined.aggregation.begin_at({key.identity: round})
