"""The receiving side: messages are matched with receives, and written where the receives say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.point_to_point import ANY_PEER, ReceiveOperation
from netstorm.kvstore.point_to_point.arrivals import Arrivals
from netstorm.kvstore.point_to_point.failures import Described, mismatch_error, never_sent_error
from netstorm.kvstore.point_to_point.limits import WINDOW_PIECES, piece_extent, pieces_in
from netstorm.kvstore.point_to_point.matching import Arrived, Matching
from netstorm.kvstore.point_to_point.sending import SendMessage
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import (
    Accept,
    CountRequest,
    MessageCount,
    Offer,
    Piece,
    Rejected,
    SendAgain,
    SmallMessage,
    Taken,
)

__all__ = ["Receiving"]

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
        *,
        send: SendMessage,
        complete: Callable[[Done, Exception | None], None],
        answers_again: bool = False,
    ) -> None:
        """Begin without receives.

        Args:
            rank: of this node, of `size`.
            size: number of ranks.
            counters: of the process.
            send: see `SendMessage`.
            complete: calls an operation's `done`, soon.
            answers_again: answers may be lost: a rank that forwarded them may have left the job.
        """
        self._rank: Final = rank
        self._answers_again: Final = answers_again
        self._size: Final = size
        self._counters: Final = counters
        self._send: Final = send
        self._complete: Final = complete
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
                self._send(sender, SendAgain(path=(), hop=0), None)
        for rank in self._asked:
            if not self._arrivals[rank].has_count:
                self._send(rank, CountRequest(path=(), hop=0), None)

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
            self._send(sender, accept, None)
        elif rejected is not None:
            self._send(sender, rejected, None)
        elif self._arrivals[sender].was_delivered(number) and not self._is_waiting(sender, number):
            self._send(sender, Taken(path=(), hop=0, number=number), None)

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
            self._complete(receive.done, mismatch_error(sent, receive.what, receive.destination.nbytes))
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
        pieces, arrived = pieces_in(transfer.receive.destination.nbytes), len(transfer.arrived)
        if arrived == pieces:
            del self._transfers[sender, number]
            self._end(sender, number, transfer.receive)
        elif transfer.accepted < pieces and transfer.accepted - arrived <= WINDOW_PIECES // 2:
            transfer.accepted = min(pieces, arrived + WINDOW_PIECES)
            self._send(sender, Accept(path=(), hop=0, number=number, pieces=transfer.accepted), None)

    def _end(self, sender: int, number: int, receive: ReceiveOperation) -> None:
        self._counters.add("receives")
        self._send(sender, Taken(path=(), hop=0, number=number), None)
        self._complete(receive.done, None)

    def _reject(self, arrived: Arrived, expected: str, nbytes: int) -> None:
        self._arrivals[arrived.sender].matched(arrived)
        rejected = Rejected(path=(), hop=0, number=arrived.number, what=expected, nbytes=nbytes)
        self._rejected[arrived.sender, arrived.number] = rejected
        if len(self._rejected) > _MOST_REJECTED:
            del self._rejected[next(iter(self._rejected))]
        self._send(arrived.sender, rejected, None)

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
                self._send(rank, CountRequest(path=(), hop=0), None)
        for receive in self._matching.take_posted(lambda one: self._has_ended(self._origins(one))):
            self._complete(receive.done, never_sent_error(self._rank, receive))

    def _has_ended(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._asked and self._arrivals[rank].has_ended for rank in ranks)

    def _origins(self, receive: ReceiveOperation) -> Iterable[int]:
        """Return the ranks from which a message may come. A program that waits sends nothing to itself."""
        if receive.peer != ANY_PEER:
            return (receive.peer,)
        others = [rank for rank in receive.peers or range(self._size) if rank != self._rank]
        return others or [self._rank]
