"""The general node: trains, aggregates and forwards. A pure state machine (design, §3 and §5).

Here is what its driver calls: messages and the time come in, instructions go out. What the user's program
asks for is in `requests`, the scheduler's messages are in `scheduler_messages`, and the node's states and its
end are in `lifecycle`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from netstorm import errors
from netstorm.errors import NetStormError
from netstorm.kvstore.membership.node_status import NodeStatusTracker
from netstorm.kvstore.membership.recovering_schedulers import RecoveringSchedulers
from netstorm.kvstore.node.deadlines import Deadlines
from netstorm.kvstore.node.lifecycle import Lifecycle, State
from netstorm.kvstore.node.progress import Progress
from netstorm.kvstore.node.requests import NodeRequests
from netstorm.kvstore.node.scheduler_messages import SchedulerMessages
from netstorm.kvstore.options import NodeOptions
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, check_authority, may_send, not_authorised
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import SCHEDULER, UNKNOWN, Peer
from netstorm.pslite.machine import Admission, Instruction, NotYet, Refuse, Send
from netstorm.pslite.measurement.link_meter import LinkMeter
from netstorm.pslite.session.link_state import Links
from netstorm.pslite.waiting_bytes import WaitingBytes
from netstorm.topology.policy import Policy

__all__ = ["GeneralNode", "State"]

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
        self._progress: Final = Progress(self._life, self._deadlines)
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
    def state(self) -> State:
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
        if self._life.state is State.JOINING:
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
            role = Role.APPLICANT if life.state is State.JOINING else Role.MEMBER
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
        if life.joined is not None:
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
        due = min(life.scheduler.next_deadline(), self._deadlines.next_deadline(), life.detours.next_trial())
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
        return joined is not None and joined.aggregation.run_dispatch(links, now)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken = self._life.outbox.take()
        if not taken or not self._life.detours:
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
            if self._life.state is not State.JOINING:
                outbox.send_to_scheduler(self.status.report(now))
        if self.meter is not None and now >= self.meter.due():
            measured = self.meter.report(now)
            if measured is not None:
                outbox.send_to_scheduler(measured)
