"""The life of a general node: joining, running, finishing, over; and how a failure ends it. Pure.

A node is `joining` until the scheduler has all nodes, `running`, `finishing` once the user's program will
push no more, and `over` when no rank needs it any longer. A failure, wherever it happened, ends all
outstanding operations and every later one with the same error.
"""

from __future__ import annotations

import enum
from typing import Final

from netstorm.errors import NetStormError, NodeLost, ProtocolViolation
from netstorm.kvstore.membership.barriers import Barriers
from netstorm.kvstore.membership.local_steps import LocalSteps
from netstorm.kvstore.membership.registration import Registration
from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.membership.scheduler_session import SchedulerSession
from netstorm.kvstore.node.joined_node import JoinedNode
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.kvstore.paths.failed_links import Detours
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.machine import Become, Connect, Disconnect
from netstorm.pslite.waiting_bytes import WaitingBytes

__all__ = ["Lifecycle", "State"]


class State(enum.Enum):
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
        self.state = State.JOINING
        self.failure: NetStormError | None = None
        self.roster = Roster(-1, ())
        self.joined: JoinedNode | None = None
        self.elastic: tuple[int, int] | None = None
        self.waiting: Final = WaitingBytes()
        self.outbox: Final = Outbox()
        self.registration: Final = Registration()
        self.barriers: Final = Barriers(self.outbox)
        self.local_steps: Final = LocalSteps(self.outbox)
        self.detours: Final = Detours(counters, options.link_retry_s)
        self.scheduler: Final = SchedulerSession(options, self.outbox, now)
        self._waiting_to_join: Final[list[Done]] = []
        self._waiting_to_finish: Final[list[Done]] = []

    @property
    def has_ended(self) -> bool:
        """Whether this node has failed, or has left the job in good order."""
        return self.failure is not None or self.state is State.OVER

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
        self._call_or_keep(self._waiting_to_join, done, ready=self.state is not State.JOINING)

    def when_over(self, done: Done) -> None:
        """Call `done` when no rank needs this node any longer, or with the error that ended the job."""
        self._call_or_keep(self._waiting_to_finish, done, ready=self.state is State.OVER)

    def start(self, message: m.Joined, now: float) -> None:
        """Begin to work: all nodes have joined.

        Raises:
            ProtocolViolation: the node has joined before.
        """
        if self.state is not State.JOINING:
            raise ProtocolViolation("joined twice")
        self.state, self.elastic = State.RUNNING, message.elastic
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
        self.state = State.OVER
        self.outbox.send_to_scheduler(m.Leave())
        for member in self.roster.others():
            failed = member.rank in self.detours
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
