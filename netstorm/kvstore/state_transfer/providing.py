"""Offering this rank's state to newcomers, and sending the pieces that they ask for. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.state_transfer.snapshot import Snapshot, pieces_in
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import StateAsked, StateMessage, StateOffered, StatePiece

__all__ = ["Providing"]


class Providing:
    """What one rank offers.

    Attributes:
        requests: numbers of the requests that were not answered yet. Another thread may read this: it is
            replaced as a whole.
        last: the state at the end of this rank's program, offered to all who ask after that; None before.
    """

    def __init__(self, send: Callable[[int, StateMessage, Buffer | None], None], counters: Counters) -> None:
        """Begin without newcomers.

        Args:
            send: sends a message, and its payload, to a rank.
            counters: of the process.
        """
        self.requests: frozenset[int] = frozenset()
        self.last: Snapshot | None = None
        self._send: Final = send
        self._counters: Final = counters
        self._offered: Final[dict[int, Snapshot]] = {}
        """By newcomer."""
        self._wanted: Final[dict[int, int]] = {}
        """By newcomer that has asked, and was not offered anything yet: the number of its request."""
        self._numbers: Final = itertools.count()

    def want(self, rank: int) -> None:
        """Record that a newcomer asks for the state. What was offered before is offered again."""
        snapshot = self._offered.get(rank) or self.last
        if snapshot is None:
            if rank not in self._wanted:
                self._wanted[rank] = next(self._numbers)
                self._changed()
        else:
            self._offered[rank] = snapshot
            self._offer(rank, snapshot)

    def forget(self, rank: int) -> None:
        """Record that a rank has the state, is not in the job any more, or is another process now."""
        self._wanted.pop(rank, None)
        self._changed()
        self._offered.pop(rank, None)

    def offer(self, snapshot: Snapshot) -> None:
        """Offer a state to all that had asked before it was made; the last one, to all.

        One that has come since does not get the results of rounds between the two: it needs a later state.
        """
        if snapshot.requests is None:
            self.last = snapshot
        for rank, number in sorted(self._wanted.items()):
            if snapshot.requests is None or number in snapshot.requests:
                self._offered[rank] = snapshot
                self._offer(rank, snapshot)
                del self._wanted[rank]
        self._changed()

    def _changed(self) -> None:
        self.requests = frozenset(self._wanted.values())

    def _offer(self, rank: int, snapshot: Snapshot) -> None:
        offer = StateOffered(
            path=(),
            hop=0,
            step=snapshot.step,
            nbytes=snapshot.nbytes,
            crc=snapshot.crc,
            rounds=dict(snapshot.rounds),
            barriers=snapshot.barriers,
        )
        self._send(rank, offer, None)

    def asked(self, rank: int, message: StateAsked) -> None:
        """Send pieces.

        Raises:
            ProtocolViolation: the rank was not offered them.
        """
        snapshot = self._offered.get(rank)
        if snapshot is None or snapshot.step != message.step:
            self._counters.add("state_pieces_too_late")
            return
        end = message.first + message.count
        if not 0 <= message.first < end <= pieces_in(snapshot.nbytes):
            raise ProtocolViolation(
                f"rank {rank} asks for {message.count} pieces from {message.first} of a state that has "
                f"{pieces_in(snapshot.nbytes)}"
            )
        for piece in range(message.first, end):
            self._counters.add("state_pieces_sent")
            self._send(
                rank, StatePiece(path=(), hop=0, step=message.step, piece=piece), snapshot.piece(piece)
            )
