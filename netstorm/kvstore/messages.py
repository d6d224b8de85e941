"""Sends and receives on one node: its program's, and what it forwards for others. Pure.

A small message goes to the receiver's node at once, and waits there for its program; how much may wait is
bounded. A large one, and what is beyond the bound, is offered; its data goes, in pieces, once a receive has
taken it. So nothing is stored without a bound, and pieces are written where the program wants them.

Messages follow the fewest hops over the trees' links. The two sides count the messages between them. So it
does no harm that some come twice, or out of order, around failed links. In an elastic job a rank on the way
may leave with what it had to forward. So with each view senders announce again what is open, and receivers
say again what they have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from netstorm.errors import Closed, NetStormError, UsageError
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.operations.point_to_point import ANY_PEER, PointToPointOperation, SendOperation
from netstorm.kvstore.paths.relay import forwarded_send
from netstorm.kvstore.paths.source_routes import check_route
from netstorm.kvstore.point_to_point.limits import MOST_TEXT
from netstorm.kvstore.point_to_point.receiving import Receiving
from netstorm.kvstore.point_to_point.sending import Sending
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import (
    Accept,
    CountRequest,
    MessageCount,
    Offer,
    Piece,
    PointToPointMessage,
    Rejected,
    SendAgain,
    SmallMessage,
    Taken,
)
from netstorm.pslite.machine import URGENT, Order, Send
from netstorm.topology.owners import paths_from
from netstorm.topology.policy import Policy

__all__ = ["PointToPoint"]

_TAGS: Final = range(-(2**63), 2**63)


class PointToPoint:
    """The sends and receives of one node."""

    def __init__(
        self, rank: int, policy: Policy, *, outbox: Outbox, counters: Counters, elastic: bool = False
    ) -> None:
        """Begin without operations.

        Args:
            rank: of this node.
            policy: its links lead to the other ranks.
            outbox: takes instructions.
            counters: of the process.
            elastic: ranks may leave the job and join it.
        """
        self._rank: Final = rank
        self._size: Final = policy.size
        self._outbox: Final = outbox
        self._policy = policy
        self._paths: tuple[tuple[int, ...], ...] | None = None
        """By target; None: not computed yet."""
        self._failure: NetStormError | None = None
        self._departed: Final[dict[int, NetStormError]] = {}
        """By rank that is in the job no more: what operations with it fail with."""
        self._local: list[tuple[PointToPointMessage, Buffer | None]] = []
        """Messages from this rank to itself."""
        self._sending: Final = Sending(
            rank, counters, send=self._send, complete=outbox.complete, sends_again=elastic
        )
        self._receiving: Final = Receiving(
            rank,
            policy.size,
            counters,
            send=self._send,
            complete=outbox.complete,
            answers_again=elastic,
        )

    # ------------------------------------------------------------------------------------ the user's requests

    def submit(self, operation: PointToPointOperation, now: float) -> None:
        """Begin a send or a receive; its `done` is called in any case."""
        error = self._failure or self._problem(operation)
        if error is not None:
            self._outbox.complete(operation.done, error)
            return
        operation.begun_at = now
        operation.what = operation.what[:MOST_TEXT] or "values"
        if isinstance(operation, SendOperation):
            self._sending.submit(operation)
        else:
            self._receiving.submit(operation)
        self._deliver_local()

    def outstanding(self) -> Iterator[PointToPointOperation]:
        """Yield the operations that are not complete."""
        yield from self._receiving.outstanding()
        yield from self._sending.outstanding()

    def stored_bytes(self, sender: int) -> int:
        """Return how many bytes of a rank's small messages wait here for the program."""
        return self._receiving.stored_bytes(sender)

    # ---------------------------------------------------------------------------- events and messages come in

    def new_policy(self, policy: Policy, *, of_view: bool = False) -> None:
        """Send over the links of a newer policy from now on: some links of the old one may have failed. With
        another view, what is open is sent again.
        """
        if policy.version <= self._policy.version:
            return
        self._policy, self._paths = policy, None
        if of_view and self._failure is None:
            self._sending.send_again()
            self._receiving.ask_again()
            self._deliver_local()

    def departed(self, rank: int, error: NetStormError) -> None:
        """Fail the operations with a rank that is in the job no more, now and until it is back."""
        self._departed[rank] = error
        operations: list[PointToPointOperation] = [*self._sending.forget(rank), *self._receiving.forget(rank)]
        for operation in operations:
            self._outbox.complete(operation.done, error)

    def arrived(self, rank: int) -> None:
        """Record that a rank is in the job again."""
        self._departed.pop(rank, None)

    def finished(self, rank: int) -> None:
        """Record that a rank, which may be this one, submits nothing more."""
        self._receiving.finished(rank)
        self._deliver_local()

    def receive(
        self, peer: Peer, message: PointToPointMessage, payload: Buffer | None, payload_crc: int | None
    ) -> None:
        """Handle a message: forward it, or receive it at its end.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        check_route(message, peer, self._rank, self._size)
        further = forwarded_send(message, payload, payload_crc, _order(message))
        if further is not None:
            self._outbox.add(further)
            return
        self._handle(message.path[0], message, payload)
        self._deliver_local()

    def end(self) -> None:
        """End the operations that are still open now that all ranks have finished. The confirmation of what a
        receiver has accepted may have been lost with its process.
        """
        for send in self._sending.take_sent():
            self._outbox.complete(send.done, None)
        waits = self.waiting_text(math.inf)
        if waits:
            self.fail_all(Closed(f"the job is over, and rank {self._rank} still waited for {waits}"))

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        operations = list(self.outstanding())
        self._failure = error
        self._sending.clear()
        self._receiving.clear()
        self._local.clear()
        for operation in operations:
            self._outbox.complete(operation.done, error)

    # ------------------------------------------------------------------------------------------------ helpers

    def _problem(self, operation: PointToPointOperation) -> NetStormError | None:
        """Return why an operation cannot be begun; None if it can."""
        peers = [operation.peer]
        if not isinstance(operation, SendOperation) and operation.peer == ANY_PEER:
            peers = list(operation.peers)
        for peer in peers:
            if not 0 <= peer < self._size:
                return UsageError(
                    f"rank {peer} as the other end of a message: expected one of 0 to {self._size - 1}"
                )
        if len(peers) == 1 and peers[0] in self._departed:
            return self._departed[peers[0]]
        if operation.tag not in _TAGS:
            return UsageError(f"tag {operation.tag} of a message: expected a number of 64 bits")
        if len(operation.channel) > MOST_TEXT:
            return UsageError(
                f"process group {operation.channel[:32]!r}... has a name of {len(operation.channel)} "
                f"characters: expected {MOST_TEXT} at most"
            )
        return None

    def _handle(self, origin: int, message: PointToPointMessage, payload: Buffer | None) -> None:
        if self._failure is not None:
            return
        match message:
            case SmallMessage():
                self._receiving.small(origin, message, payload)
            case Offer():
                self._receiving.offer(origin, message)
            case Piece():
                self._receiving.piece(origin, message, payload)
            case MessageCount():
                self._receiving.counted(origin, message)
            case Accept():
                self._sending.accept(origin, message)
            case Taken():
                self._sending.taken(origin, message)
            case Rejected():
                self._sending.rejected(origin, message)
            case SendAgain():
                self._sending.send_again(origin)
            case CountRequest():
                count = MessageCount(path=(), hop=0, count=self._sending.count(origin))
                self._send(origin, count, None)

    def _send(self, target: int, message: PointToPointMessage, payload: Buffer | None) -> None:
        if target == self._rank:
            self._local.append((message, payload))
            return
        if self._paths is None:
            self._paths = paths_from(self._policy, self._rank)
        path = self._paths[target]
        if len(path) < 2:
            return  # it is in the job no more
        self._outbox.add(
            Send(
                peer=Peer(path[1]),
                message=msgspec.structs.replace(message, path=path, hop=1),
                payload=payload,
                order=_order(message),
            )
        )

    def _deliver_local(self) -> None:
        """Handle what this rank has sent to itself, until nothing is left."""
        while self._local:
            messages, self._local = self._local, []
            for message, payload in messages:
                self._handle(self._rank, message, payload)

    # --------------------------------------------------------------------------------------------- for people

    def waiting_text(self, since: float) -> str:
        """Return what this rank has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.outstanding():
            if operation.begun_at <= since:
                return str(operation)
        return ""

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)


def _order(message: PointToPointMessage) -> Order:
    """Return a message's place in links' queues: only pieces wait for what has a higher priority."""
    return (0, message.number, message.piece) if isinstance(message, Piece) else URGENT
