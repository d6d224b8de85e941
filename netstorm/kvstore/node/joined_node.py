"""What a node that has joined works with: sums over trees, pushes to owners, and its neighbours. Pure."""

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
    """Of one node.

    Attributes:
        aggregation: sums, which all ranks get.
        owners: pushes and pulls, which owners serve.
        neighbours: the other nodes.
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
        blame: Callable[[NetStormError], None],
    ) -> None:
        """Begin with nothing to do.

        Args:
            joined: the scheduler's word that all nodes are here.
            roster: who they are.
            detours: around links that have failed.
            outbox: what is to be done.
            counters: of the process.
            auxiliary: rules for auxiliary paths.
            blame: ends the job.
        """
        self._bindings: Final = Bindings(roster.rank)
        self._bindings.install(joined.policy)
        self._counters: Final = counters
        self.aggregation: Final = Aggregation(roster.rank, self._bindings, outbox, counters, auxiliary)
        self.owners: Final = Asynchronous(
            roster.rank,
            joined.policy,
            joined.owners or (1,) * len(joined.members),
            outbox=outbox,
            counters=counters,
            blame=blame,
        )
        self.neighbours: Final = Neighbours(roster, self.aggregation, detours, outbox)

    @property
    def policy(self) -> Policy:
        """The newest policy that this node has heard of."""
        return self._bindings.newest

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        """Take a message of another node.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        match message:
            case m.Part(is_aux=True):
                self.neighbours.auxiliary_part(peer, message, payload, payload_crc)
            case m.Part():
                self.aggregation.receive(peer, message, payload, payload_crc)
            case m.Delivered():
                self.neighbours.delivered(peer, message, now)
            case m.LinkTrial():
                self.neighbours.trial(peer, message)
            case _ if isinstance(message, m.Routed):
                self.owners.receive(peer, message, payload, payload_crc)
            case _:
                raise ProtocolViolation(f"a general node takes no {type(message).__name__} from peer {peer}")

    # ------------------------------------------------------------------------------------ the scheduler says

    def keys_registered(self, message: m.KeysRegistered, registration: Registration) -> None:
        """Begin with what has waited for keys to be numbered.

        Raises:
            ProtocolViolation: keys that nobody here has asked for.
        """
        for binding in message.bindings:
            self._bindings.bind(binding)
        for grant in message.grants:
            key, operations = registration.granted(grant)
            self.aggregation.add_key(key)
            self.owners.granted(key)
            for operation in operations:
                self.aggregation.submit(operation, operation.begun_at)

    def topology_answer(self, message: m.TopologyAnswer) -> None:
        """Begin with rounds whose policy is known now."""
        for binding in message.bindings:
            self._bindings.bind(binding)
        self.aggregation.advance({binding.key for binding in message.bindings})

    def new_policy(self, policy: Policy) -> None:
        """Take a policy that rounds may run under from now on."""
        plan = self._bindings.install(policy)
        self.owners.new_policy(policy)
        self._counters.add("policies")
        self.aggregation.new_policy(plan)

    # ---------------------------------------------------------------------------------------- its node wants

    def outstanding(self) -> Iterator[Operation | AsyncOperation]:
        """Yield the operations that are not complete and that somebody here waits for."""
        yield from self.aggregation.outstanding()
        yield from self.owners.outstanding()

    def oldest(self) -> float:
        """Return when the oldest of them was submitted (inf: there is none)."""
        return min(self.aggregation.oldest(), self.owners.oldest())

    def waits(self, since: float) -> str:
        """Say what the program has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.aggregation.outstanding():
            if operation.begun_at <= since:
                return self.aggregation.missing_in(operation)
        return self.owners.waits(since)

    def has_news(self) -> bool:
        """Return whether the scheduler is to be told something."""
        return self.aggregation.asking.due() or bool(self.aggregation.takeover.news)

    def news(self) -> Iterator[m.Message]:
        """Yield what the scheduler is to be told, once."""
        begun = self.aggregation.asking.take()
        if begun:
            yield m.TopologyRequest(begun=begun)
        yield from self.aggregation.takeover.take_news()

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        self.aggregation.fail_all(error)
        self.owners.fail_all(error)
