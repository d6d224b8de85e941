"""State transfer of one node: as a newcomer, and for newcomers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from netstorm.errors import NetStormError, NotAuthorised, ProtocolViolation
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.relay import forwarded_send
from netstorm.kvstore.paths.source_routes import check_route
from netstorm.kvstore.state_transfer.fetching import Fetching
from netstorm.kvstore.state_transfer.providing import Providing
from netstorm.kvstore.state_transfer.snapshot import Snapshot
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import (
    StateAsked,
    StateMessage,
    StateOffered,
    StatePiece,
    StateReceived,
    StateWanted,
)
from netstorm.pslite.machine import URGENT, Order, Send
from netstorm.topology.owners import paths_from
from netstorm.topology.policy import Policy

__all__ = ["StateTransfer"]

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
        self._later: Final = needed
        self._rank: Final = rank
        self._policy = policy
        self._outbox: Final = outbox
        self._counters: Final = counters
        self.providing: Final = Providing(self._send, counters)
        self._fetching: Fetching | None = None
        self._done: Done | None = None

    @property
    def policy(self) -> Policy:
        """The policy whose members state comes from and goes to."""
        return self._policy

    def fetch(self, take: Callable[[Snapshot], None], done: Done, *, changing: bool) -> None:
        """Fetch the state from all ranks that have it. See `Fetching`.

        Args:
            take: called with the state.
            done: called after that, or with the error that ended the job.
            changing: the view is not agreed on yet.
        """
        self._done = done

        def complete(snapshot: Snapshot) -> None:
            self._fetching, self.needed, self._done = None, False, None
            take(snapshot)
            self._outbox.complete(done, None)

        self._fetching = Fetching(
            lambda rank, message: self._send(rank, message, None), complete, self._counters
        )
        if not changing:
            self._ask()

    def view_agreed(self) -> None:
        """Ask again, now that all members know each other: what was sent before may be lost."""
        self._ask()

    def new_policy(self, policy: Policy) -> None:
        """Go on with the members of a new policy."""
        if policy.version <= self._policy.version:
            return
        self._policy = policy
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
        check_route(message, peer, self._rank, self._policy.size)
        further = forwarded_send(message, payload, payload_crc, _order(message))
        if further is not None:
            self._outbox.add(further)
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
                if origin not in self._policy.silent:
                    raise NotAuthorised(
                        f"rank {origin} wants the job's state, but it is no newcomer by policy "
                        f"{self._policy.version}"
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
        return now >= self.next_report()

    def next_report(self) -> float:
        """Return when to report next."""
        return self._report_at if self._later else math.inf

    def report(self, received: dict[int, int], now: float) -> None:
        """Tell the other ranks up to which rounds all results are here: they keep no more."""
        self._report_at = now + _REPORT_EVERY_S
        if received != self._reported:
            self._reported = dict(received)
            for rank in sorted(set(self._policy.members) - {self._rank}):
                self._send(rank, StateReceived(path=(), hop=0, rounds=received), None)

    def tick(self, now: float) -> None:
        """Fetch on."""
        if self._fetching is not None:
            self._fetching.tick(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return math.inf if self._fetching is None else self._fetching.next_tick()

    def fail_all(self, error: NetStormError) -> None:
        """End the fetch: the job has failed."""
        done, self._done, self._fetching = self._done, None, None
        if done is not None:
            self._outbox.complete(done, error)

    def waiting_text(self) -> str:
        """Return what the program waits for, for a person; empty: for nothing."""
        return "" if self._fetching is None else f"{self._fetching.waiting_text()}"

    def _ask(self) -> None:
        if self._fetching is not None:
            self._fetching.ask(self._others())

    def _others(self) -> set[int]:
        """Return the other ranks that have the job's state."""
        return set(self._policy.members) - set(self._policy.silent) - {self._rank}

    def _send(self, target: int, message: StateMessage, payload: Buffer | None) -> None:
        path = paths_from(self._policy, self._rank)[target]
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


def _order(message: StateMessage) -> Order:
    return (_LAST, 0, message.piece) if isinstance(message, StatePiece) else URGENT
