"""The work of a node that has joined: sums over trees, pushes to owners, and its neighbours. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.membership.registration import Registration
from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.node.neighbours import Neighbours
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.kvstore.paths.failed_links import Detours
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.topology.policy import Policy

__all__ = ["JoinedNode"]


class JoinedNode:
    """The work of one node.

    Attributes:
        aggregation: all-reduces.
        asynchronous: pushes and pulls, which owners serve.
        neighbours: auxiliary paths, and links that fail.
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
        end_job: Callable[[NetStormError], None],
    ) -> None:
        """Begin without operations.

        Args:
            joined: the scheduler's message that all nodes have joined.
            roster: the members of the job.
            detours: around failed links.
            outbox: takes instructions.
            counters: of the process.
            auxiliary: rules for auxiliary paths.
            end_job: fails the whole job.
        """
        self._bindings: Final = Bindings(roster.rank)
        self._bindings.install(joined.policy)
        self._counters: Final = counters
        self.aggregation: Final = Aggregation(roster.rank, self._bindings, outbox, counters, auxiliary)
        self.asynchronous: Final = Asynchronous(
            roster.rank,
            joined.policy,
            joined.owners or (1,) * len(joined.members),
            outbox=outbox,
            counters=counters,
            end_job=end_job,
        )
        self.neighbours: Final = Neighbours(roster, self.aggregation, detours, outbox)

    @property
    def policy(self) -> Policy:
        """The newest policy that this node has received."""
        return self._bindings.newest

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        """Handle a message of another node.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        match message:
            case m.Part(is_aux=True):
                self.neighbours.receive_auxiliary(peer, message, payload, payload_crc)
            case m.Part():
                self.aggregation.receive(peer, message, payload, payload_crc)
            case m.Delivered():
                self.neighbours.delivered(peer, message, now)
            case m.LinkTrial():
                self.neighbours.link_trial(peer, message)
            case _ if isinstance(message, m.Routed):
                self.asynchronous.receive(peer, message, payload, payload_crc)
            case _:
                raise ProtocolViolation(f"a general node takes no {type(message).__name__} from peer {peer}")

    # ----------------------------------------------------------------------------- the scheduler's messages

    def keys_registered(self, message: m.KeysRegistered, registration: Registration) -> None:
        """Begin the operations that have waited for the numbers of keys.

        Raises:
            ProtocolViolation: keys that were not requested.
        """
        for binding in message.bindings:
            self._bindings.bind(binding)
        for grant in message.grants:
            key, operations = registration.grant(grant)
            self.aggregation.add_key(key)
            self.asynchronous.key_granted(key)
            for operation in operations:
                self.aggregation.submit(operation, operation.begun_at)

    def topology_answer(self, message: m.TopologyAnswer) -> None:
        """Begin the rounds whose policy is known now."""
        for binding in message.bindings:
            self._bindings.bind(binding)
        self.aggregation.advance({binding.key for binding in message.bindings})

    def new_policy(self, policy: Policy) -> None:
        """Install a policy that rounds may run under from now on."""
        plan = self._bindings.install(policy)
        self.asynchronous.new_policy(policy)
        self._counters.add("policies")
        self.aggregation.new_policy(plan)

    # --------------------------------------------------------------------------------- for its node

    def outstanding(self) -> Iterator[Operation | AsyncOperation]:
        """Yield the operations that are not complete and that this rank's program waits for."""
        yield from self.aggregation.outstanding()
        yield from self.asynchronous.outstanding()

    def oldest(self) -> float:
        """Return when the oldest of them was submitted (inf: there is none)."""
        return min(self.aggregation.oldest(), self.asynchronous.oldest())

    def waiting_text(self, since: float) -> str:
        """Return what the program has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.aggregation.outstanding():
            if operation.begun_at <= since:
                return self.aggregation.waiting_text_of(operation)
        return self.asynchronous.waiting_text(since)

    def has_announcements(self) -> bool:
        """Return whether there is something to announce to the scheduler."""
        return self.aggregation.topology_requests.has_pending() or bool(
            self.aggregation.takeover.announcements
        )

    def take_announcements(self) -> Iterator[m.Message]:
        """Yield what is to be announced to the scheduler, once."""
        begun = self.aggregation.topology_requests.take()
        if begun:
            yield m.TopologyRequest(begun=begun)
        yield from self.aggregation.takeover.take_announcements()

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        self.aggregation.fail_all(error)
        self.asynchronous.fail_all(error)
