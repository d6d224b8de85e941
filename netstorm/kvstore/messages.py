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

import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import numpy as np

from netstorm.errors import Closed, NetStormError, ProtocolViolation, UnevenRounds, UsageError
from netstorm.kvstore.operations import (
    ANY_PEER,
    Done,
    Outbox,
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.paths.routes import RoutedOutbox
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, Peer
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
from netstorm.pslite.machine import URGENT, Order
from netstorm.topology.policy import Policy

__all__ = [
    "LARGE_BYTES",
    "MOST_WAITING",
    "PIECE_BYTES",
    "WAITING_BYTES",
    "WINDOW_BYTES",
    "Arrivals",
    "Arrived",
    "Matching",
    "PointToPoint",
    "piece_extent",
    "pieces_in",
    "window_pieces",
]


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
        self._version = policy.version
        self._routed: Final = _MessageOutbox(rank, policy, outbox)
        self._failure: NetStormError | None = None
        self._departed: Final[dict[int, NetStormError]] = {}
        """By rank that is in the job no more: what operations with it fail with."""
        self._sending: Final = Sending(rank, counters, self._routed, sends_again=elastic)
        self._receiving: Final = Receiving(rank, policy.size, counters, self._routed, answers_again=elastic)

    # ------------------------------------------------------------------------------------ the user's requests

    def submit(self, operation: PointToPointOperation, now: float) -> None:
        """Begin a send or a receive; its `done` is called in any case."""
        error = self._failure or self._problem(operation)
        if error is not None:
            self._routed.complete(operation.done, error)
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
        if policy.version <= self._version:
            return
        self._version = policy.version
        self._routed.new_policy(policy)
        if of_view and self._failure is None:
            self._sending.send_again()
            self._receiving.ask_again()
            self._deliver_local()

    def departed(self, rank: int, error: NetStormError) -> None:
        """Fail the operations with a rank that is in the job no more, now and until it is back."""
        self._departed[rank] = error
        operations: list[PointToPointOperation] = [*self._sending.forget(rank), *self._receiving.forget(rank)]
        for operation in operations:
            self._routed.complete(operation.done, error)

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
        if self._routed.has_arrived(peer, message, payload, payload_crc):
            self._handle(message.path[0], message, payload)
            self._deliver_local()

    def end(self) -> None:
        """End the operations that are still open now that all ranks have finished. The confirmation of what a
        receiver has accepted may have been lost with its process.
        """
        for send in self._sending.take_sent():
            self._routed.complete(send.done)
        waits = self.waiting_text(math.inf)
        if waits:
            self.fail_all(Closed(f"the job is over, and rank {self._rank} still waited for {waits}"))

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        operations = list(self.outstanding())
        self._failure = error
        self._sending.clear()
        self._receiving.clear()
        self._routed.local.clear()
        for operation in operations:
            self._routed.complete(operation.done, error)

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
                self._routed.send(origin, count)

    def _deliver_local(self) -> None:
        """Handle what this rank has sent to itself, until nothing is left."""
        routed = self._routed
        while routed.local:
            messages, routed.local = routed.local, []
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


class _MessageOutbox(RoutedOutbox[PointToPointMessage]):
    """Takes messages of both sides."""

    def order(self, message: PointToPointMessage) -> Order:
        """See the base class: only pieces wait for what has a higher priority."""
        return (0, message.number, message.piece) if isinstance(message, Piece) else URGENT


# The sending side: small messages at once, large ones as the receiver accepts them.

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _OpenMessage:
    """A message that its receiver's program does not have yet."""

    described: Described
    offered: SendOperation | None = None
    """None: it went at once."""
    refused: Done | None = None
    """See `SendOperation`."""
    announcement: SmallMessage | Offer
    payload: bytes | None = None
    """Of a small message, if it may be sent again."""
    sent: int = 0
    """Number of pieces sent."""


@dataclass(slots=True)
class _Receiver:
    """What this rank has sent to one rank."""

    count: int = 0
    waiting_bytes: int = 0
    """Charge of the small messages that may be waiting there."""
    open: dict[int, _OpenMessage] = field(default_factory=dict)
    """By number."""


class Sending:
    """The sends of one rank."""

    def __init__(
        self,
        rank: int,
        counters: Counters,
        routed: _MessageOutbox,
        *,
        sends_again: bool = False,
    ) -> None:
        """Begin without sends.

        Args:
            rank: of this node.
            counters: of the process.
            routed: takes messages and completions.
            sends_again: what is open may be sent again: a rank that forwarded it may have left the job.
        """
        self._rank: Final = rank
        self._sends_again: Final = sends_again
        self._counters: Final = counters
        self._routed: Final = routed
        self._receivers: Final[dict[int, _Receiver]] = {}

    def submit(self, operation: SendOperation) -> None:
        """Send a small message, or offer a large one."""
        receiver = self._receivers.setdefault(operation.peer, _Receiver())
        nbytes = operation.source.nbytes
        described = Described(
            sender=self._rank,
            receiver=operation.peer,
            tag=operation.tag,
            what=operation.what,
            nbytes=nbytes,
        )
        if len(receiver.open) >= MOST_WAITING:
            error = UsageError(
                f"{described}, which has not received {MOST_WAITING} earlier ones: wait for some of them "
                "before you send more"
            )
            self._routed.complete(operation.done, error)
            return
        number, receiver.count = receiver.count, receiver.count + 1
        self._counters.add("sends")
        if nbytes <= PIECE_BYTES and receiver.waiting_bytes + charge(nbytes) <= WAITING_BYTES:
            receiver.waiting_bytes += charge(nbytes)
            small = SmallMessage(
                path=(),
                hop=0,
                number=number,
                channel=operation.channel,
                tag=operation.tag,
                what=operation.what,
            )
            payload = operation.source.tobytes() if nbytes else None
            receiver.open[number] = _OpenMessage(
                described=described,
                refused=operation.refused,
                announcement=small,
                payload=payload if self._sends_again else None,
            )
            self._routed.send(operation.peer, small, payload)
            self._routed.complete(operation.done)
        else:
            offer = Offer(
                path=(),
                hop=0,
                number=number,
                channel=operation.channel,
                tag=operation.tag,
                what=operation.what,
                nbytes=nbytes,
            )
            receiver.open[number] = _OpenMessage(described=described, offered=operation, announcement=offer)
            self._routed.send(operation.peer, offer)

    def send_again(self, rank: int | None = None) -> None:
        """Announce all that is open for a rank again, or for every rank (None). What has come was not for
        nothing: the receiver says what it has.
        """
        for peer, receiver in self._receivers.items():
            if rank is None or peer == rank:
                for opened in list(receiver.open.values()):
                    self._routed.send(peer, opened.announcement, opened.payload)

    def outstanding(self) -> Iterator[SendOperation]:
        """Yield the sends that are not complete."""
        for receiver in self._receivers.values():
            for opened in receiver.open.values():
                if opened.offered is not None:
                    yield opened.offered

    def count(self, rank: int) -> int:
        """Return how many messages were sent to a rank."""
        receiver = self._receivers.get(rank)
        return 0 if receiver is None else receiver.count

    def take_sent(self) -> list[SendOperation]:
        """Remove the sends of which every piece has been sent, and return them."""
        sent = []
        for receiver in self._receivers.values():
            for number, opened in list(receiver.open.items()):
                if opened.offered is not None and 0 < opened.sent == pieces_in(opened.described.nbytes):
                    del receiver.open[number]
                    sent.append(opened.offered)
        return sent

    def clear(self) -> None:
        """Drop all sends."""
        for receiver in self._receivers.values():
            receiver.open.clear()

    # ------------------------------------------------------------------------------------ receivers' messages

    def forget(self, rank: int) -> list[SendOperation]:
        """Begin anew with a rank, whose process is gone; return the sends to it that are not complete."""
        receiver = self._receivers.pop(rank, None)
        messages = () if receiver is None else receiver.open.values()
        return [message.offered for message in messages if message.offered is not None]

    def accept(self, rank: int, message: Accept) -> None:
        """Send the pieces that a receiver accepts.

        Raises:
            ProtocolViolation: of a message that was not offered, or that has fewer pieces.
        """
        opened = self._find(rank, message)
        if opened is None:
            return
        operation = opened.offered
        pieces = 0 if operation is None else pieces_in(operation.source.nbytes)
        if operation is None or not (0 < message.pieces <= pieces and message.missing < message.pieces):
            raise ProtocolViolation(
                f"rank {rank} accepts {message.pieces} pieces of message {message.number}, which rank "
                f"{self._rank} has not offered, or which has fewer"
            )
        if message.missing >= 0:
            opened.sent = min(opened.sent, message.missing)
        for piece in range(opened.sent, message.pieces):
            start, end = piece_extent(piece, operation.source.nbytes)
            data = Piece(path=(), hop=0, number=message.number, piece=piece)
            self._routed.send(rank, data, operation.source[start:end])
        opened.sent = max(opened.sent, message.pieces)

    def taken(self, rank: int, message: Taken) -> None:
        """Complete a message that the receiver's program has.

        Raises:
            ProtocolViolation: of a message that was not sent.
        """
        opened = self._find(rank, message)
        if opened is None:
            return
        operation = opened.offered
        if operation is not None and opened.sent < pieces_in(operation.source.nbytes):
            raise ProtocolViolation(
                f"rank {rank} has taken message {message.number}, of which rank {self._rank} has sent only "
                f"{opened.sent} pieces"
            )
        self._close(rank, message.number, opened)
        if operation is not None:
            self._routed.complete(operation.done)

    def rejected(self, rank: int, message: Rejected) -> None:
        """Fail a message that the receiver's program will not have.

        Raises:
            ProtocolViolation: of a message that was not sent.
        """
        opened = self._find(rank, message)
        if opened is None:
            return
        self._close(rank, message.number, opened)
        self._counters.add("sends_rejected")
        error = (
            mismatch_error(opened.described, message.what, message.nbytes)
            if message.what
            else never_received_error(opened.described)
        )
        if opened.offered is not None:
            self._routed.complete(opened.offered.done, error)
        elif opened.refused is not None:
            self._routed.complete(opened.refused, error)
        else:
            _log.error("%s", error)

    def _find(self, rank: int, message: Accept | Taken | Rejected) -> _OpenMessage | None:
        """Return the open message of an answer; None if it is complete, since answers may come twice, around
        failed links.
        """
        receiver = self._receivers.get(rank)
        if receiver is None or not 0 <= message.number < receiver.count:
            raise ProtocolViolation(
                f"{type(message).__name__} of message {message.number} from rank {rank}, to which rank "
                f"{self._rank} has sent {self.count(rank)} messages"
            )
        opened = receiver.open.get(message.number)
        if opened is None:
            self._counters.add("messages_known_before")
        return opened

    def _close(self, rank: int, number: int, opened: _OpenMessage) -> None:
        receiver = self._receivers[rank]
        del receiver.open[number]
        if opened.offered is None:
            receiver.waiting_bytes -= charge(opened.described.nbytes)


# The receiving side: messages are matched with receives, and written where the receives say.

_MOST_REJECTED: Final = 1024
"""Answers that are kept in case they are lost."""


@dataclass(slots=True)
class _Transfer:
    """An accepted message whose pieces are under way."""

    receive: ReceiveOperation
    accepted: int
    """Number of pieces that the sender may send."""
    arrived: set[int] = field(default_factory=set)


class Receiving:
    """The receives of one rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        counters: Counters,
        routed: _MessageOutbox,
        *,
        answers_again: bool = False,
    ) -> None:
        """Begin without receives.

        Args:
            rank: of this node, of `size`.
            size: number of ranks.
            counters: of the process.
            routed: takes messages and completions.
            answers_again: answers may be lost: a rank that forwarded them may have left the job.
        """
        self._rank: Final = rank
        self._answers_again: Final = answers_again
        self._size: Final = size
        self._counters: Final = counters
        self._routed: Final = routed
        self._matching: Final = Matching()
        self._arrivals: Final = [Arrivals(sender) for sender in range(size)]
        self._transfers: Final[dict[tuple[int, int], _Transfer]] = {}
        """By sender and number."""
        self._finished: Final[set[int]] = set()
        self._asked: Final[set[int]] = set()
        """Finished ranks that were asked how much they have sent."""
        self._rejected: Final[dict[tuple[int, int], Rejected]] = {}
        """By sender and number: the newest."""

    # -------------------------------------------------------------------------------------------- the program

    def submit(self, receive: ReceiveOperation) -> None:
        """Begin a receive: of what has arrived, or of what will."""
        arrived = self._matching.post(receive)
        if arrived is not None:
            self._match(receive, arrived)
        else:
            self._look_for_ends()

    def outstanding(self) -> Iterator[ReceiveOperation]:
        """Yield the receives that are not complete."""
        yield from self._matching.posted()
        for transfer in self._transfers.values():
            yield transfer.receive

    def stored_bytes(self, sender: int) -> int:
        """Return how many bytes of a sender's small messages are stored here."""
        return self._arrivals[sender].waiting_bytes

    def clear(self) -> None:
        """Drop all receives, and what waits for others."""
        self._matching.clear()
        self._transfers.clear()

    def forget(self, rank: int) -> list[ReceiveOperation]:
        """Begin anew with a rank whose process is gone; return the receives from it that were open."""
        failed = self._matching.take_posted(lambda receive: receive.peer == rank)
        for sender, number in [key for key in self._transfers if key[0] == rank]:
            failed.append(self._transfers.pop((sender, number)).receive)
        self._matching.drop(rank)
        self._arrivals[rank] = Arrivals(rank)
        self._finished.discard(rank)
        self._asked.discard(rank)
        for key in [key for key in self._rejected if key[0] == rank]:
            del self._rejected[key]
        return failed

    def ask_again(self) -> None:
        """Ask for what may be lost: a rank that forwarded messages may have left the job."""
        for sender, arrivals in enumerate(self._arrivals):
            if arrivals.has_begun:
                self._routed.send(sender, SendAgain(path=(), hop=0))
        for rank in self._asked:
            if not self._arrivals[rank].has_count:
                self._routed.send(rank, CountRequest(path=(), hop=0))

    def finished(self, rank: int) -> None:
        """Record that a rank sends nothing more. If it is this one, nothing more is received either."""
        self._finished.add(rank)
        if rank == self._rank:
            for arrived in self._matching.take_waiting():
                self._reject(arrived, "", 0)
        self._look_for_ends()

    # -------------------------------------------------------------------------------------- senders' messages

    def small(self, sender: int, message: SmallMessage, payload: Buffer | None) -> None:
        """Take in a whole message.

        Raises:
            ProtocolViolation: it is too large, or the sender has too much waiting here.
        """
        nbytes = 0 if payload is None else memoryview(payload).nbytes
        self._announced(sender, message, nbytes, payload)

    def offer(self, sender: int, message: Offer) -> None:
        """Accept an offered message, if a receive takes it.

        Raises:
            ProtocolViolation: the sender has too much waiting here.
        """
        self._announced(sender, message, message.nbytes, None)

    def piece(self, sender: int, message: Piece, payload: Buffer | None) -> None:
        """Write a piece where it belongs.

        Raises:
            ProtocolViolation: it was not accepted, or has the wrong size.
        """
        number, piece = message.number, message.piece
        transfer = self._transfers.get((sender, number))
        if transfer is None:
            if not self._arrivals[sender].was_delivered(number) or self._is_waiting(sender, number):
                raise ProtocolViolation(f"a piece of message {number} from rank {sender}, not accepted here")
            self._counters.add("messages_known_before")
            return
        destination = transfer.receive.destination
        start, end = piece_extent(piece, destination.nbytes)
        nbytes = 0 if payload is None else memoryview(payload).nbytes
        if not 0 <= piece < transfer.accepted or nbytes != end - start:
            raise ProtocolViolation(
                f"piece {piece} of message {number} from rank {sender} with {nbytes} bytes: expected one of "
                f"the first {transfer.accepted}, of a message of {destination.nbytes} bytes"
            )
        if piece in transfer.arrived:
            self._counters.add("messages_known_before")
            return
        transfer.arrived.add(piece)
        destination[start:end] = np.frombuffer(payload, np.uint8) if payload is not None else 0
        self._advance(sender, number, transfer)

    def counted(self, sender: int, message: MessageCount) -> None:
        """Learn how many messages a rank that has finished has sent.

        Raises:
            ProtocolViolation: nobody asked, or more have arrived.
        """
        if sender not in self._asked:
            raise ProtocolViolation(f"rank {sender} counts its messages, and was not asked")
        self._arrivals[sender].end_after(message.count)
        self._look_for_ends()

    # ----------------------------------------------------------------------------------------------- matching

    def _announced(
        self, sender: int, message: SmallMessage | Offer, nbytes: int, payload: Buffer | None
    ) -> None:
        arrived = Arrived(
            sender=sender,
            number=message.number,
            channel=message.channel,
            tag=message.tag,
            what=message.what,
            nbytes=nbytes,
            payload=payload,
            is_offer=isinstance(message, Offer),
        )
        if not self._arrivals[sender].add(arrived):
            self._counters.add("messages_known_before")
            if self._answers_again:
                self._answer_again(sender, arrived)
            return
        for ready in self._arrivals[sender].take_ready():
            receive = self._matching.arrive(ready, keep=self._rank not in self._finished)
            if receive is not None:
                self._match(receive, ready)
            elif self._rank in self._finished:
                self._reject(ready, "", 0)
        self._look_for_ends()

    def _answer_again(self, sender: int, arrived: Arrived) -> None:
        """Say once more what has become of a message: the first answer may be lost."""
        number = arrived.number
        transfer, rejected = self._transfers.get((sender, number)), self._rejected.get((sender, number))
        if transfer is not None:
            missing = next((one for one in range(transfer.accepted) if one not in transfer.arrived), -1)
            accept = Accept(path=(), hop=0, number=number, pieces=transfer.accepted, missing=missing)
            self._routed.send(sender, accept)
        elif rejected is not None:
            self._routed.send(sender, rejected)
        elif self._arrivals[sender].was_delivered(number) and not self._is_waiting(sender, number):
            self._routed.send(sender, Taken(path=(), hop=0, number=number))

    def _match(self, receive: ReceiveOperation, arrived: Arrived) -> None:
        if arrived.nbytes != receive.destination.nbytes:
            sent = Described(
                sender=arrived.sender,
                receiver=self._rank,
                tag=arrived.tag,
                what=arrived.what,
                nbytes=arrived.nbytes,
            )
            self._reject(arrived, receive.what, receive.destination.nbytes)
            self._routed.complete(
                receive.done, mismatch_error(sent, receive.what, receive.destination.nbytes)
            )
            return
        receive.source = arrived.sender
        self._arrivals[arrived.sender].matched(arrived)
        transfer = _Transfer(receive, 0)
        if arrived.is_offer and arrived.nbytes:
            self._transfers[arrived.sender, arrived.number] = transfer
            self._advance(arrived.sender, arrived.number, transfer)
            return
        if arrived.payload is not None and arrived.nbytes:
            receive.destination[:] = np.frombuffer(arrived.payload, np.uint8)
        self._end(arrived.sender, arrived.number, receive)

    def _advance(self, sender: int, number: int, transfer: _Transfer) -> None:
        """Complete a transfer, or accept more pieces of it once half of what was accepted has come."""
        nbytes, arrived = transfer.receive.destination.nbytes, len(transfer.arrived)
        pieces, window = pieces_in(nbytes), window_pieces(nbytes)
        if arrived == pieces:
            del self._transfers[sender, number]
            self._end(sender, number, transfer.receive)
        elif transfer.accepted < pieces and transfer.accepted - arrived <= window // 2:
            transfer.accepted = min(pieces, arrived + window)
            self._routed.send(sender, Accept(path=(), hop=0, number=number, pieces=transfer.accepted))

    def _end(self, sender: int, number: int, receive: ReceiveOperation) -> None:
        self._counters.add("receives")
        self._routed.send(sender, Taken(path=(), hop=0, number=number))
        self._routed.complete(receive.done)

    def _reject(self, arrived: Arrived, expected: str, nbytes: int) -> None:
        self._arrivals[arrived.sender].matched(arrived)
        rejected = Rejected(path=(), hop=0, number=arrived.number, what=expected, nbytes=nbytes)
        self._rejected[arrived.sender, arrived.number] = rejected
        if len(self._rejected) > _MOST_REJECTED:
            del self._rejected[next(iter(self._rejected))]
        self._routed.send(arrived.sender, rejected)

    def _is_waiting(self, sender: int, number: int) -> bool:
        return any(one.sender == sender and one.number == number for one in self._matching.waiting())

    # ------------------------------------------------------------------------------- ranks that have finished

    def _look_for_ends(self) -> None:
        """Ask finished ranks that receives wait for how much they have sent, and fail the receives for which
        nothing can come any more.
        """
        if not self._finished:
            return
        for rank in self._finished - self._asked:
            if any(receive.takes(rank) for receive in self._matching.posted()):
                self._asked.add(rank)
                self._routed.send(rank, CountRequest(path=(), hop=0))
        for receive in self._matching.take_posted(lambda one: self._has_ended(self._origins(one))):
            self._routed.complete(receive.done, never_sent_error(self._rank, receive))

    def _has_ended(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._asked and self._arrivals[rank].has_ended for rank in ranks)

    def _origins(self, receive: ReceiveOperation) -> Iterable[int]:
        """Return the ranks from which a message may come. A program that waits sends nothing to itself."""
        if receive.peer != ANY_PEER:
            return (receive.peer,)
        others = [rank for rank in receive.peers or range(self._size) if rank != self._rank]
        return others or [self._rank]


# Which receive takes which message.
#
# As in MPI: of the receives that take a message, the one that was submitted first; of the messages that a
# receive takes, the one that arrived first. Messages of one sender arrive here in the order in which it sent
# them.

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True, eq=False)
class Arrived:
    """A message of a program that has arrived, or has been offered."""

    sender: int
    number: int
    channel: str
    tag: int
    what: str
    nbytes: int
    payload: Buffer | None = None
    """Of a small message; None if it has no bytes."""
    is_offer: bool = False


class Matching:
    """Receives that wait for messages, and messages that wait for receives."""

    def __init__(self) -> None:
        self._posted: Final[dict[tuple[str, int], list[ReceiveOperation]]] = {}
        self._waiting: Final[dict[tuple[str, int], list[Arrived]]] = {}

    def post(self, receive: ReceiveOperation) -> Arrived | None:
        """Return the message that a new receive takes; if there is none, keep the receive."""
        key = receive.channel, receive.tag
        found = _take(self._waiting, key, lambda arrived: receive.takes(arrived.sender))
        if found is None:
            self._posted.setdefault(key, []).append(receive)
        return found

    def arrive(self, arrived: Arrived, *, keep: bool = True) -> ReceiveOperation | None:
        """Return the receive that takes a new message; if there is none, keep the message if `keep`."""
        key = arrived.channel, arrived.tag
        found = _take(self._posted, key, lambda receive: receive.takes(arrived.sender))
        if found is None and keep:
            self._waiting.setdefault(key, []).append(arrived)
        return found

    def posted(self) -> Iterator[ReceiveOperation]:
        """Yield the receives that wait."""
        for queue in self._posted.values():
            yield from queue

    def waiting(self) -> Iterator[Arrived]:
        """Yield the messages that wait."""
        for queue in self._waiting.values():
            yield from queue

    def take_posted(self, wanted: Callable[[ReceiveOperation], bool]) -> list[ReceiveOperation]:
        """Remove the receives that are `wanted`, and return them."""
        found = [receive for receive in self.posted() if wanted(receive)]
        for receive in found:
            _take(self._posted, (receive.channel, receive.tag), partial(operator.is_, receive))
        return found

    def take_waiting(self) -> list[Arrived]:
        """Remove all messages that wait, and return them."""
        found = list(self.waiting())
        self._waiting.clear()
        return found

    def drop(self, sender: int) -> None:
        """Drop the messages of a rank that wait."""
        for waiting in self._waiting.values():
            waiting[:] = [arrived for arrived in waiting if arrived.sender != sender]

    def clear(self) -> None:
        """Drop everything."""
        self._posted.clear()
        self._waiting.clear()


def _take(
    queues: dict[tuple[str, int], list[_T]], key: tuple[str, int], wanted: Callable[[_T], bool]
) -> _T | None:
    """Remove the first element of a queue that is wanted, and return it; None: there is none."""
    queue = queues.get(key, [])
    for index, element in enumerate(queue):
        if wanted(element):
            del queue[index]
            if not queue:
                del queues[key]
            return element
    return None


# The messages of one sender, as they arrive: each once, in order, and not more than was agreed.


class Arrivals:
    """Small messages and offers of one sender. Around failed links they may come twice, or out of order."""

    __slots__ = ("_delivered", "_early", "_end", "_sender", "_waiting", "waiting_bytes")

    def __init__(self, sender: int) -> None:
        self._sender: Final = sender
        self._delivered = 0
        """All messages with smaller numbers have been delivered."""
        self._early: Final[dict[int, Arrived]] = {}
        self._end: int | None = None
        """How many messages there are in all; None: that is not known."""
        self._waiting = 0
        """Number of messages that no receive has taken."""
        self.waiting_bytes = 0
        """Charge of the small ones among them: what is stored here."""

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return self._delivered > 0 or bool(self._early)

    @property
    def has_count(self) -> bool:
        """Whether it is known how many messages there are in all."""
        return self._end is not None

    @property
    def has_ended(self) -> bool:
        """Whether the sender has finished, and all that it sent has been delivered."""
        return self._delivered == self._end

    def was_delivered(self, number: int) -> bool:
        """Return whether a message has come, and all before it."""
        return 0 <= number < self._delivered

    def add(self, arrived: Arrived) -> bool:
        """Add a message; return False if it had come before.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        if self.was_delivered(arrived.number) or arrived.number in self._early:
            return False
        self._check(arrived)
        self._early[arrived.number] = arrived
        self._waiting += 1
        self.waiting_bytes += _charge(arrived)
        return True

    def take_ready(self) -> Iterator[Arrived]:
        """Yield the messages that are next in order; they count as delivered."""
        while self._delivered in self._early:
            self._delivered += 1
            yield self._early.pop(self._delivered - 1)

    def matched(self, arrived: Arrived) -> None:
        """Record that a delivered message waits no more."""
        self._waiting -= 1
        self.waiting_bytes -= _charge(arrived)

    def end_after(self, count: int) -> None:
        """Record that the sender has finished, after so many messages.

        Raises:
            ProtocolViolation: more have come.
        """
        if count < max([self._delivered, *(number + 1 for number in self._early)]):
            raise ProtocolViolation(f"rank {self._sender} has sent more than the {count} messages it counts")
        self._end = count

    def _check(self, arrived: Arrived) -> None:
        problem = ""
        if arrived.number < 0 or (self._end is not None and arrived.number >= self._end):
            problem = "has no legal number"
        elif len(arrived.channel) > MOST_TEXT or not 0 < len(arrived.what) <= MOST_TEXT:
            problem = f"has texts of other than 1 to {MOST_TEXT} characters"
        elif arrived.nbytes < 0 or (not arrived.is_offer and arrived.nbytes > PIECE_BYTES):
            problem = f"has {arrived.nbytes} bytes"
        elif self._waiting >= MOST_WAITING or self.waiting_bytes + _charge(arrived) > WAITING_BYTES:
            problem = f"comes while {self._waiting} with {self.waiting_bytes} bytes wait here"
        if problem:
            raise ProtocolViolation(f"message {arrived.number} from rank {self._sender} {problem}")


def _charge(arrived: Arrived) -> int:
    return 0 if arrived.is_offer else charge(arrived.nbytes)


# Bounds on what sends and receives keep in memory.

PIECE_BYTES: Final = 256 * 1024
"""Size of a piece, and of the largest message that goes without an offer: about a chunk of a gradient."""

LARGE_BYTES: Final = 32 * 2**20
"""Messages of this size or more go in larger pieces: on a fast link each costs 60 us, however small it is."""

_LARGE_PIECE_BYTES: Final = 4 * PIECE_BYTES

WAITING_BYTES: Final = 1024 * 1024
"""Most bytes of one sender that wait at a receiver for its program. Messages beyond it are offered."""

WINDOW_BYTES: Final = 8 * 2**20
"""Most bytes of a message that are under way: what nodes between may have to store. It fills a link of 1
Gbit/s with a round trip of 60 ms.
"""

MOST_WAITING: Final = 65_536
"""Most messages of one sender that a receiver keeps for its program, offers included."""

MOST_TEXT: Final = 256
"""Most characters of a channel's name and of a description."""

_LEAST_CHARGE: Final = 1024
"""What a waiting message counts at least: an empty one takes memory, too."""


def charge(nbytes: int) -> int:
    """Return what a small message counts towards `WAITING_BYTES`."""
    return max(nbytes, _LEAST_CHARGE)


def piece_bytes(nbytes: int) -> int:
    """Return the size of a message's pieces, all but the last. Both sides must agree on it."""
    return PIECE_BYTES if nbytes < LARGE_BYTES else _LARGE_PIECE_BYTES


def pieces_in(nbytes: int) -> int:
    """Return the number of pieces of a message."""
    return -(-nbytes // piece_bytes(nbytes))


def piece_extent(piece: int, nbytes: int) -> tuple[int, int]:
    """Return where a piece begins and ends in its message."""
    size = piece_bytes(nbytes)
    return piece * size, min(nbytes, (piece + 1) * size)


def window_pieces(nbytes: int) -> int:
    """Return how many pieces of a message may be under way."""
    return WINDOW_BYTES // piece_bytes(nbytes)


# Why a send or a receive fails: errors that name both ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A message, as errors name it."""

    sender: int
    receiver: int
    tag: int
    what: str
    nbytes: int

    def __str__(self) -> str:
        """Return the sender's side."""
        return (
            f"rank {self.sender} sends {self.what}, {self.nbytes} bytes, to rank {self.receiver} with tag "
            f"{self.tag}"
        )


def mismatch_error(sent: Described, expected: str, nbytes: int) -> UsageError:
    """Return the error of both sides if they name different sizes."""
    return UsageError(
        f"{sent}; rank {sent.receiver} expects {expected}, {nbytes} bytes: the two sizes must be equal"
    )


def never_received_error(sent: Described) -> UnevenRounds:
    """Return the error of a send to a rank that has finished."""
    return UnevenRounds(
        f"{sent}, but rank {sent.receiver} has finished without receiving it: every send needs a receive "
        "with the same tag in the same process group"
    )


def never_sent_error(rank: int, receive: ReceiveOperation) -> UnevenRounds:
    """Return the error of a receive on `rank` of what ranks that have finished never sent."""
    subject = "that rank has" if receive.peer >= 0 else "these ranks have"
    return UnevenRounds(
        f"rank {rank} waits for {receive}, but {subject} finished without sending it: every receive needs a "
        "send with the same tag in the same process group"
    )
