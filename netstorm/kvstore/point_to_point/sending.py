"""The sending side: small messages at once, large ones as the receiver accepts them. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.point_to_point import SendOperation
from netstorm.kvstore.point_to_point.failures import Described, mismatch_error, never_received_error
from netstorm.kvstore.point_to_point.limits import (
    MOST_WAITING,
    PIECE_BYTES,
    WAITING_BYTES,
    charge,
    piece_extent,
    pieces_in,
)
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import (
    Accept,
    Offer,
    Piece,
    PointToPointMessage,
    Rejected,
    SmallMessage,
    Taken,
)

__all__ = ["SendMessage", "Sending"]

SendMessage: TypeAlias = Callable[[int, PointToPointMessage, "Buffer | None"], None]
"""Sends a message (with an empty path) and a payload to a rank, which may be this one."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Open:
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
    open: dict[int, _Open] = field(default_factory=dict)
    """By number."""


class Sending:
    """The sends of one rank."""

    def __init__(
        self,
        rank: int,
        counters: Counters,
        *,
        send: SendMessage,
        complete: Callable[[Done, Exception | None], None],
        sends_again: bool = False,
    ) -> None:
        """Begin without sends.

        Args:
            rank: of this node.
            counters: of the process.
            send: see `SendMessage`.
            complete: calls an operation's `done`, soon.
            sends_again: what is open may be sent again: a rank that forwarded it may have left the job.
        """
        self._rank: Final = rank
        self._sends_again: Final = sends_again
        self._counters: Final = counters
        self._send: Final = send
        self._complete: Final = complete
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
            self._complete(operation.done, error)
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
            receiver.open[number] = _Open(
                described=described,
                refused=operation.refused,
                announcement=small,
                payload=payload if self._sends_again else None,
            )
            self._send(operation.peer, small, payload)
            self._complete(operation.done, None)
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
            receiver.open[number] = _Open(described=described, offered=operation, announcement=offer)
            self._send(operation.peer, offer, None)

    def send_again(self, rank: int | None = None) -> None:
        """Announce all that is open for a rank again, or for every rank (None). What has come was not for
        nothing: the receiver says what it has.
        """
        for peer, receiver in self._receivers.items():
            if rank is None or peer == rank:
                for one in list(receiver.open.values()):
                    self._send(peer, one.announcement, one.payload)

    def outstanding(self) -> Iterator[SendOperation]:
        """Yield the sends that are not complete."""
        for receiver in self._receivers.values():
            for one in receiver.open.values():
                if one.offered is not None:
                    yield one.offered

    def count(self, rank: int) -> int:
        """Return how many messages were sent to a rank."""
        receiver = self._receivers.get(rank)
        return 0 if receiver is None else receiver.count

    def take_sent(self) -> list[SendOperation]:
        """Remove the sends of which every piece has been sent, and return them."""
        found = []
        for receiver in self._receivers.values():
            for number, one in list(receiver.open.items()):
                if one.offered is not None and 0 < one.sent == pieces_in(one.described.nbytes):
                    del receiver.open[number]
                    found.append(one.offered)
        return found

    def clear(self) -> None:
        """Drop all sends."""
        for receiver in self._receivers.values():
            receiver.open.clear()

    # ------------------------------------------------------------------------------------ receivers' messages

    def forget(self, rank: int) -> list[SendOperation]:
        """Begin anew with a rank, whose process is gone; return the sends to it that are not complete."""
        receiver = self._receivers.pop(rank, None)
        open_ones = () if receiver is None else receiver.open.values()
        return [found.offered for found in open_ones if found.offered is not None]

    def accept(self, rank: int, message: Accept) -> None:
        """Send the pieces that a receiver accepts.

        Raises:
            ProtocolViolation: of a message that was not offered, or that has fewer pieces.
        """
        found = self._find(rank, message)
        if found is None:
            return
        operation = found.offered
        pieces = 0 if operation is None else pieces_in(operation.source.nbytes)
        if operation is None or not (0 < message.pieces <= pieces and message.missing < message.pieces):
            raise ProtocolViolation(
                f"rank {rank} accepts {message.pieces} pieces of message {message.number}, which rank "
                f"{self._rank} has not offered, or which has fewer"
            )
        if message.missing >= 0:
            found.sent = min(found.sent, message.missing)
        for piece in range(found.sent, message.pieces):
            start, end = piece_extent(piece, operation.source.nbytes)
            data = Piece(path=(), hop=0, number=message.number, piece=piece)
            self._send(rank, data, operation.source[start:end])
        found.sent = max(found.sent, message.pieces)

    def taken(self, rank: int, message: Taken) -> None:
        """Complete a message that the receiver's program has.

        Raises:
            ProtocolViolation: of a message that was not sent.
        """
        found = self._find(rank, message)
        if found is None:
            return
        operation = found.offered
        if operation is not None and found.sent < pieces_in(operation.source.nbytes):
            raise ProtocolViolation(
                f"rank {rank} has taken message {message.number}, of which rank {self._rank} has sent only "
                f"{found.sent} pieces"
            )
        self._close(rank, message.number, found)
        if operation is not None:
            self._complete(operation.done, None)

    def rejected(self, rank: int, message: Rejected) -> None:
        """Fail a message that the receiver's program will not have.

        Raises:
            ProtocolViolation: of a message that was not sent.
        """
        found = self._find(rank, message)
        if found is None:
            return
        self._close(rank, message.number, found)
        self._counters.add("sends_rejected")
        error = (
            mismatch_error(found.described, message.what, message.nbytes)
            if message.what
            else never_received_error(found.described)
        )
        if found.offered is not None:
            self._complete(found.offered.done, error)
        elif found.refused is not None:
            self._complete(found.refused, error)
        else:
            _log.error("%s", error)

    def _find(self, rank: int, message: Accept | Taken | Rejected) -> _Open | None:
        """Return the open message of an answer; None if it is complete, since answers may come twice, around
        failed links.
        """
        receiver = self._receivers.get(rank)
        if receiver is None or not 0 <= message.number < receiver.count:
            raise ProtocolViolation(
                f"{type(message).__name__} of message {message.number} from rank {rank}, to which rank "
                f"{self._rank} has sent {self.count(rank)} messages"
            )
        found = receiver.open.get(message.number)
        if found is None:
            self._counters.add("messages_known_before")
        return found

    def _close(self, rank: int, number: int, found: _Open) -> None:
        receiver = self._receivers[rank]
        del receiver.open[number]
        if found.offered is None:
            receiver.waiting_bytes -= charge(found.described.nbytes)
