"""Fetching the job's state from several ranks at once, piece by piece. Pure.

Each rank that offers the same step is asked for the next pieces whenever it has delivered some. So each
serves in proportion to how fast its link is, and what a lost rank owed is asked of the others.

On slow links rounds go first, and pieces take what is left. On fast ones processors are the limit, which no
order of sending protects: there a rank is asked for a few pieces, and then left alone for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.state_transfer.snapshot import PIECE_BYTES, Snapshot, pieces_in
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer, checksum
from netstorm.protocol.messages import StateAsked, StateMessage, StateOffered, StatePiece, StateWanted

__all__ = ["Fetching"]

_OUTSTANDING: Final = 4
"""Pieces that one rank is asked for and has not sent: 1 MiB, more than a link of 100 Mbit/s carries in
80 ms. No more, since these pieces wait on links behind those of rounds."""

_FAST_S: Final = 0.1
"""A rank that sends all of these within this time has a fast link: 80 Mbit/s or more."""
_REST: Final = 6
"""It is left alone for so many times as long: rounds that take twice as long meanwhile are a sixth slower on
the whole."""

_MOST_BYTES: Final = 1 << 40


@dataclass(slots=True)
class _Provider:
    """A rank that offers the step that is fetched."""

    outstanding: set[int] = field(default_factory=set)
    asked_at: float = 0.0
    """When, for the first of them."""
    is_fast: bool = True
    rest_until: float = 0.0


class Fetching:
    """One newcomer's fetch. `done` is called once, with the state."""

    def __init__(
        self,
        send: Callable[[int, StateMessage], None],
        done: Callable[[Snapshot], None],
        counters: Counters,
    ) -> None:
        """Begin without an offer.

        Args:
            send: sends a message to a rank.
            done: takes the state once it is complete, and its checksum is right.
            counters: of the process.
        """
        self._send: Final = send
        self._done: Final = done
        self._counters: Final = counters
        self._asked: Final[set[int]] = set()
        self._offers: Final[dict[int, StateOffered]] = {}
        """By rank: its newest offer."""
        self._chosen: StateOffered | None = None
        self._content = bytearray()
        self._missing: deque[int] = deque()
        """Pieces that no rank has been asked for."""
        self._left = 0
        self._providers: dict[int, _Provider] = {}
        self._now = 0.0
        """When something last happened."""

    def tick(self, now: float) -> None:
        """Go on with ranks that have been left alone for long enough."""
        self._now = now
        if self._chosen is not None:
            self._ask_for_pieces()

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        if not self._missing:
            return math.inf
        resting = (one.rest_until for one in self._providers.values() if not one.outstanding)
        return min(resting, default=math.inf)

    def ask(self, ranks: set[int]) -> None:
        """Ask ranks with state to offer it; forget those that are not among `ranks` any more.

        Call it again after each change of the view, in which messages may have been lost.
        """
        for rank in self._asked - ranks:
            self.lose(rank)
        self._asked.clear()
        self._asked.update(ranks)
        for rank in sorted(ranks):
            self._send(rank, StateWanted(path=(), hop=0))
        for provider in self._providers.values():
            self._missing.extend(sorted(provider.outstanding))
            provider.outstanding.clear()
        if self._providers:
            self._ask_for_pieces()
            return
        newest = max(self._offers.values(), key=lambda offer: offer.step, default=None)
        self._chosen = None  # nobody has that step any more
        if newest is not None:
            self._choose(newest)

    def lose(self, rank: int) -> None:
        """Take nothing more from a rank, which has left the job. `ask` follows."""
        self._offers.pop(rank, None)
        provider = self._providers.pop(rank, None)
        if provider is not None:
            self._missing.extend(sorted(provider.outstanding))

    def offered(self, rank: int, offer: StateOffered) -> None:
        """Handle an offer.

        Raises:
            ProtocolViolation: the rank was not asked, or no state can be so large.
        """
        if rank not in self._asked or not 0 <= offer.nbytes < _MOST_BYTES:
            raise ProtocolViolation(
                f"rank {rank} offers {offer.nbytes} bytes of state, for which it was not asked"
            )
        if not _fits(offer.nbytes):
            raise ProtocolViolation(
                f"rank {rank} offers {offer.nbytes} bytes of state, more than this machine has memory for"
            )
        self._offers[rank] = offer
        if self._chosen is None:
            self._choose(offer)
        elif self._is_chosen(offer):
            self._providers.setdefault(rank, _Provider())
            self._ask_for_pieces()

    def piece(self, rank: int, message: StatePiece, payload: Buffer | None) -> None:
        """Handle a piece.

        Raises:
            ProtocolViolation: it has another size.
        """
        chosen, provider = self._chosen, self._providers.get(rank)
        if chosen is None or message.step != chosen.step:
            self._counters.add("state_pieces_too_late")
            return
        start = message.piece * PIECE_BYTES
        size = min(PIECE_BYTES, chosen.nbytes - start)
        if provider is None or message.piece not in provider.outstanding:
            self._counters.add("state_pieces_too_late")
            return
        if payload is None or memoryview(payload).nbytes != size:
            raise ProtocolViolation(
                f"rank {rank} sends piece {message.piece} of the state, which has {size} bytes"
            )
        provider.outstanding.discard(message.piece)
        if not provider.outstanding:
            took = self._now - provider.asked_at
            provider.is_fast = took < _FAST_S
            provider.rest_until = self._now + _REST * took if provider.is_fast else 0.0
        self._content[start : start + size] = payload
        self._counters.add("state_bytes_fetched", size)
        self._left -= 1
        self._ask_for_pieces()
        self._end_if_complete()

    def waiting_text(self) -> str:
        """Return what is missing, for a person."""
        if self._chosen is None:
            return f"ranks {sorted(self._asked)} to offer the job's state before their next step"
        return (
            f"{self._left} of {pieces_in(self._chosen.nbytes)} pieces of the job's state, from ranks "
            f"{sorted(self._providers)}"
        )

    def _choose(self, offer: StateOffered) -> None:
        self._chosen = offer
        self._content = bytearray(offer.nbytes)
        self._left = pieces_in(offer.nbytes)
        self._missing = deque(range(self._left))
        self._providers = {
            rank: _Provider() for rank, other in self._offers.items() if self._is_chosen(other)
        }
        self._ask_for_pieces()
        self._end_if_complete()

    def _is_chosen(self, offer: StateOffered) -> bool:
        chosen = self._chosen
        return chosen is not None and (offer.step, offer.nbytes, offer.crc) == (
            chosen.step,
            chosen.nbytes,
            chosen.crc,
        )

    def _ask_for_pieces(self) -> None:
        chosen = self._chosen
        assert chosen is not None
        for rank, provider in self._providers.items():
            if provider.is_fast and (provider.outstanding or self._now < provider.rest_until):
                continue
            if not provider.outstanding:
                provider.asked_at = self._now
            while self._missing and len(provider.outstanding) < _OUTSTANDING:
                piece = self._missing.popleft()
                provider.outstanding.add(piece)
                self._send(rank, StateAsked(path=(), hop=0, step=chosen.step, first=piece, count=1))

    def _end_if_complete(self) -> None:
        chosen = self._chosen
        if chosen is None or self._left:
            return
        if checksum(self._content) != chosen.crc:
            self._counters.add("state_checksum_errors")
            self._choose(chosen)  # fetched once more; each piece was checked, so this hardly happens
            return
        for rank in self._asked:
            self._send(rank, StateWanted(path=(), hop=0, done=True))
        self._done(
            Snapshot(
                step=chosen.step,
                content=self._content,
                crc=chosen.crc,
                rounds=chosen.rounds,
                barriers=chosen.barriers,
            )
        )


def _fits(nbytes: int) -> bool:
    """Return whether there is memory for a state. What is not written takes none."""
    try:
        bytearray(nbytes)
    except MemoryError:
        return False
    return True
