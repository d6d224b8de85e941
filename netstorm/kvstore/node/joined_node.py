"""The work of a node that has joined: sums over trees, pushes to owners, messages, its neighbours. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from netstorm.errors import NetStormError, NodeLost, ProtocolViolation
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.membership.registration import Registration
from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.node.neighbours import Neighbours
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.operations.point_to_point import PointToPointOperation
from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.kvstore.paths.failed_links import Detours
from netstorm.kvstore.paths.known_routes import KnownRoutes
from netstorm.kvstore.point_to_point.point_to_point import PointToPoint
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.state_transfer.state_transfer import StateTransfer
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.pslite.waiting_bytes import WaitingBytes
from netstorm.topology.policy import Policy

__all__ = ["JoinedNode", "add_granted_keys"]

_log = logging.getLogger(__name__)


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
    ) -> Aggregation:
        return Aggregation(
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
            aggregation.topology_requests.has_pending()
            or bool(aggregation.takeover.announcements)
            or aggregation.views.caught_up
        )

    def take_announcements(self) -> Iterator[m.Message]:
        """Yield what is to be announced to the scheduler, once."""
        begun = self.aggregation.topology_requests.take()
        if begun:
            yield m.TopologyRequest(begun=begun)
        yield from self.aggregation.takeover.take_announcements()
        if self.aggregation.views.take_caught_up():
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
    aggregation: Aggregation, specs: Iterable[m.KeySpec], grants: Iterable[m.KeyGrant]
) -> None:
    """Take part in the sums of keys that others have registered, and this rank's program has not yet."""
    for spec, grant in zip(specs, grants, strict=True):
        aggregation.add_key(Key.granted(spec, grant))
