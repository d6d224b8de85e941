"""State transfer of one node: as a newcomer, and for newcomers. Pure."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import NetStormError, NotAuthorised, ProtocolViolation
from netstorm.kvstore.operations import Done, Outbox
from netstorm.kvstore.paths.routes import RoutedOutbox
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, Peer, checksum
from netstorm.protocol.messages import (
    StateAsked,
    StateMessage,
    StateOffered,
    StatePiece,
    StateReceived,
    StateWanted,
)
from netstorm.pslite.machine import URGENT, Order
from netstorm.topology.policy import Policy

__all__ = ["PIECE_BYTES", "Fetching", "Providing", "StateSnapshot", "StateTransfer", "pieces_in"]


_REPORT_EVERY_S: Final = 0.2
"""Between two reports of a silent rank. Meanwhile others keep the results of so much more time."""

_MOST_KEYS: Final = 2**17
"""As the scheduler bounds them."""

_LAST: Final = 1 << 60
"""Pieces wait on links behind everything that rounds send."""


class StateTransfer:
    """The state transfer of one node.

    Attributes:
        needed: this node has joined a job that had begun, and does not have its state yet.
        fetched: it has got the state since, all of it.
        policy: state comes from its members, and goes to them.
        providing: what this rank offers.
    """

    def __init__(
        self,
        rank: int,
        policy: Policy,
        *,
        needed: bool,
        outbox: Outbox,
        counters: Counters,
        on_receipt: Callable[[int, dict[int, int]], None],
    ) -> None:
        """Begin.

        Args:
            rank: of this node.
            policy: its links lead to the other ranks.
            needed: this node has joined later, and has no state.
            outbox: takes messages.
            counters: of the process.
            on_receipt: called with a silent rank, and the rounds up to which it has all results.
        """
        self._on_receipt: Final = on_receipt
        self._reported: dict[int, int] = {}
        self._report_at = 0.0
        self.needed = needed
        self.fetched = False
        self._later: Final = needed
        self._rank: Final = rank
        self.policy = policy
        self._routed: Final = _StateOutbox(rank, policy, outbox)
        self._counters: Final = counters
        self.providing: Final = Providing(self._routed, counters)
        self._fetching: Fetching | None = None
        self._done: Done | None = None

    def fetch(self, take: Callable[[StateSnapshot], None], done: Done, *, changing: bool) -> None:
        """Fetch the state from all ranks that have it. See `Fetching`.

        Args:
            take: called with the state.
            done: called after that, or with the error that ended the job.
            changing: the view is not agreed on yet.
        """
        self._done = done

        def complete(snapshot: StateSnapshot) -> None:
            self._fetching, self.needed, self._done = None, False, None
            self.fetched = True
            take(snapshot)
            self._routed.complete(done)

        self._fetching = Fetching(self._routed, complete, self._counters)
        if not changing:
            self._ask()

    def view_agreed(self) -> None:
        """Ask again, now that all members know each other: what was sent before may be lost."""
        self._ask()

    def new_policy(self, policy: Policy) -> None:
        """Go on with the members of a new policy."""
        if policy.version <= self.policy.version:
            return
        self.policy = policy
        self._routed.new_policy(policy)
        members = set(policy.members)
        for rank in range(policy.size):
            if rank not in members:
                self.providing.forget(rank)
            if self._fetching is not None and (rank not in members or rank in policy.silent):
                self._fetching.lose(rank)

    def receive(
        self,
        peer: Peer,
        message: StateMessage,
        payload: Buffer | None,
        payload_crc: int | None,
        now: float,
    ) -> None:
        """Handle a message: forward it, or receive it at its end.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        if not self._routed.has_arrived(peer, message, payload, payload_crc):
            return
        origin = message.path[0]
        if self._fetching is not None:
            self._fetching.tick(now)
        match message:
            case StateReceived():
                if not all(0 <= key < _MOST_KEYS for key in message.rounds):
                    raise ProtocolViolation(f"rank {origin} has results of keys that no job can have")
                self._on_receipt(origin, message.rounds)
            case StateWanted(done=True):
                self.providing.forget(origin)
            case StateWanted():
                if origin not in self.policy.silent:
                    raise NotAuthorised(
                        f"rank {origin} wants the job's state, but it is no newcomer by policy "
                        f"{self.policy.version}"
                    )
                self.providing.want(origin)
            case StateAsked():
                self.providing.asked(origin, message)
            case StateOffered() if self._fetching is not None:
                self._fetching.offered(origin, message)
            case StatePiece() if self._fetching is not None:
                self._fetching.piece(origin, message, payload)
            case _:
                self._counters.add("state_pieces_too_late")

    def report_due(self, now: float) -> bool:
        """Return whether `report` has something to do; it has only on a rank that joined later."""
        return self._later and now >= self._report_at

    def report(self, received: dict[int, int], now: float) -> None:
        """Tell the other ranks up to which rounds all results are here: they keep no more."""
        self._report_at = now + _REPORT_EVERY_S
        if received != self._reported:
            self._reported = dict(received)
            for rank in sorted(set(self.policy.members) - {self._rank}):
                self._routed.send(rank, StateReceived(path=(), hop=0, rounds=received))

    def tick(self, now: float) -> None:
        """Fetch on."""
        if self._fetching is not None:
            self._fetching.tick(now)

    def next_tick(self) -> float:
        """Return when `tick` or `report` has something to do."""
        due = self._report_at if self._later else math.inf
        return due if self._fetching is None else min(due, self._fetching.next_tick())

    def fail_all(self, error: NetStormError) -> None:
        """End the fetch: the job has failed."""
        done, self._done, self._fetching = self._done, None, None
        if done is not None:
            self._routed.complete(done, error)

    def waiting_text(self) -> str:
        """Return what the program waits for, for a person; empty: for nothing."""
        return "" if self._fetching is None else self._fetching.waiting_text()

    def _ask(self) -> None:
        if self._fetching is not None:
            self._fetching.ask(self._others())

    def _others(self) -> set[int]:
        """Return the other ranks that have the job's state."""
        return set(self.policy.members) - set(self.policy.silent) - {self._rank}


class _StateOutbox(RoutedOutbox[StateMessage]):
    """Takes messages about the state."""

    def order(self, message: StateMessage) -> Order:
        """See the base class: pieces go last."""
        return (_LAST, 0, message.piece) if isinstance(message, StatePiece) else URGENT


# Offering this rank's state to newcomers, and sending the pieces that they ask for.


class Providing:
    """What one rank offers.

    Attributes:
        requests: numbers of the requests that were not answered yet. Another thread may read this: it is
            replaced as a whole.
        last: the state at the end of this rank's program, offered to all who ask after that; None before.
    """

    def __init__(self, routed: RoutedOutbox[StateMessage], counters: Counters) -> None:
        """Begin without newcomers; `routed` takes messages."""
        self.requests: frozenset[int] = frozenset()
        self.last: StateSnapshot | None = None
        self._routed: Final = routed
        self._counters: Final = counters
        self._offered: Final[dict[int, StateSnapshot]] = {}
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

    def offer(self, snapshot: StateSnapshot) -> None:
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

    def _offer(self, rank: int, snapshot: StateSnapshot) -> None:
        offer = StateOffered(
            path=(),
            hop=0,
            step=snapshot.step,
            nbytes=snapshot.nbytes,
            crc=snapshot.crc,
            rounds=dict(snapshot.rounds),
            barriers=snapshot.barriers,
        )
        self._routed.send(rank, offer)

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
        if not 0 <= message.first < end <= pieces_in(snapshot.nbytes) or message.count > _OUTSTANDING:
            raise ProtocolViolation(
                f"rank {rank} asks for {message.count} pieces from {message.first} of a state that has "
                f"{pieces_in(snapshot.nbytes)}: expected at most {_OUTSTANDING} of those"
            )
        for piece in range(message.first, end):
            self._counters.add("state_pieces_sent")
            self._routed.send(
                rank, StatePiece(path=(), hop=0, step=message.step, piece=piece), snapshot.piece(piece)
            )


# Fetching the job's state from several ranks at once, piece by piece.
#
# Each rank that offers the same step is asked for the next pieces whenever it has delivered some. So each
# serves in proportion to how fast its link is, and what a lost rank owed is asked of the others.
#
# On slow links rounds go first, and pieces take what is left. On fast ones processors are the limit, which no
# order of sending protects: there a rank is asked for a few pieces, and then left alone for a while.

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
        routed: RoutedOutbox[StateMessage],
        done: Callable[[StateSnapshot], None],
        counters: Counters,
    ) -> None:
        """Begin without an offer.

        Args:
            routed: takes messages.
            done: takes the state once it is complete, and its checksum is right.
            counters: of the process.
        """
        self._routed: Final = routed
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
            self._routed.send(rank, StateWanted(path=(), hop=0))
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
                self._routed.send(rank, StateAsked(path=(), hop=0, step=chosen.step, first=piece, count=1))

    def _end_if_complete(self) -> None:
        chosen = self._chosen
        if chosen is None or self._left:
            return
        if checksum(self._content) != chosen.crc:
            self._counters.add("state_checksum_errors")
            self._choose(chosen)  # fetched once more; each piece was checked, so this hardly happens
            return
        for rank in self._asked:
            self._routed.send(rank, StateWanted(path=(), hop=0, done=True))
        self._done(
            StateSnapshot(
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


# The state of a rank's program before one of its steps, as bytes.

PIECE_BYTES = 262_144
"""Bytes of a piece: as those of a chunk, so that rounds wait for no more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """What a newcomer needs to go on from a step as this rank does. It must not change any more."""

    step: int
    """Counts the steps of the program: the same at all ranks."""
    content: Buffer
    crc: int
    """CRC-32C of the content."""
    rounds: Mapping[int, int] = field(default_factory=dict)
    """By key: the first round of the step."""
    barriers: int = 0
    """How many barriers come before the step."""
    requests: frozenset[int] | None = None
    """Numbers of the requests that it answers (`Providing.requests`): those that there were before it was
    made. None: it is the last one, at the end of the program, and answers all, also those that come later."""

    def piece(self, number: int) -> Buffer:
        """Return a piece of the content."""
        return memoryview(self.content)[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]

    @property
    def nbytes(self) -> int:
        """Size of the content."""
        return memoryview(self.content).nbytes


def pieces_in(nbytes: int) -> int:
    """Return the number of pieces of so many bytes."""
    return -(-nbytes // PIECE_BYTES)
