"""Asynchronous training on one node: its own requests, and what it forwards and serves. Pure.

Each block of a key has an owner (`owners`). A push goes to the owners, which apply it at
once and confirm it. A pull asks them for the newest values. It waits there for this rank's own pushes and, if
staleness is bounded, for the slowest rank. Nothing here waits for all ranks.

In an elastic job owners change with each view. Messages say of which view they are: those of an earlier one
are dropped, since their senders send them again; those of a later one wait until it is here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import NetStormError, NodeLost, ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import AsynchronousOutbox, BlockStore, Owners
from netstorm.kvstore.asynchronous.client import Requests
from netstorm.kvstore.asynchronous.server import Serving
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import AsyncOperation, Outbox
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import (
    Applied,
    CopiesHeld,
    CopyMessage,
    Pull,
    PullRows,
    PullStates,
    Push,
    Tick,
    Value,
)
from netstorm.protocol.messages import AsynchronousMessage as Routed
from netstorm.pslite.machine import Charge, WaitingBytes
from netstorm.topology.policy import Policy

__all__ = ["Asynchronous"]

_log = logging.getLogger(__name__)

_LATER_VIEW: Final = "a later view"
"""What messages of a view that is not here yet wait for (`pslite.machine.WaitingBytes`)."""

_PATIENT_FOR: Final = 4
"""A rank that does not send what another one needs may hold it up for such a part of NETSTORM_WAIT_TIMEOUT:
those who wait for that one's blocks can go on with several other states before they give up."""


@dataclass(slots=True)
class _EndedClock:
    """A clock that has ended here, and that is not announced to owners yet."""

    namespace: int
    clock: int
    pushes: dict[Key, int] = field(default_factory=dict)
    whole: bool = False


class Asynchronous:
    """The asynchronous side of one node."""

    def __init__(
        self,
        rank: int,
        policy: Policy,
        weights: tuple[int, ...],
        *,
        outbox: Outbox,
        counters: Counters,
        end_job: Callable[[NetStormError], None],
        elastic: bool = False,
        later: bool = False,
        known_keys: int = 0,
        waiting: WaitingBytes | None = None,
        wait_timeout_s: float = math.inf,
    ) -> None:
        """Begin without keys.

        Args:
            rank: of this node.
            policy: its links lead to the other ranks.
            weights: of the owners, by rank.
            outbox: takes instructions.
            counters: of the process.
            end_job: fails the whole job.
            elastic: ranks may leave the job and join it; this one has perhaps joined `later`.
            known_keys: see `Requests`.
            waiting, wait_timeout_s: see `Serving`, and NETSTORM_WAIT_TIMEOUT.
        """
        self.owners: Final = Owners(weights, _eligible(policy) if elastic else None)
        self._elastic: Final = elastic
        self._silent = policy.silent
        """Of the present view."""
        self._routed: Final = AsynchronousOutbox(rank, policy, outbox, view=policy.version if elastic else 0)
        self._waiting_bytes: Final = waiting or WaitingBytes()
        self._early: list[tuple[int, Routed, Buffer | None, Charge]] = []
        """Messages of later views, with the ranks that they are from, and what they count."""
        self._clocks: Final[dict[int, int]] = {}
        """Newest clock that owners have heard of, by namespace."""
        self._rank, self._counters = rank, counters
        self._version = policy.version
        self._waiting: list[AsyncOperation] = []
        self._stores: Final[dict[Key, BlockStore]] = {}
        """This and `_waiting`: of keys that have not been granted."""
        self._requests: Final = Requests(
            self.owners,
            counters,
            self._routed,
            later=later,
            known_keys=known_keys,
            on_loss=self._went_back,
        )
        self._ended_clocks: list[_EndedClock] = []
        self._failure: NetStormError | None = None
        self._end_job: Final = end_job
        self._serving: Final = Serving(
            rank,
            policy.size,
            self.owners,
            self._routed,
            counters,
            end_job=end_job,
            on_progress=self._deliver_local,
            seen=self._requests.seen,
            waiting=self._waiting_bytes,
            present=(policy.members or range(policy.size)) if elastic else None,
            patience_s=wait_timeout_s / _PATIENT_FOR,
        )

    # ------------------------------------------------------------------------------------ the user's requests

    def submit(self, operation: AsyncOperation, now: float) -> None:
        """Begin a push or a pull; its `done` is called in any case."""
        if self._failure is not None:
            self._routed.complete(operation.done, self._failure)
            return
        operation.begun_at = now
        if operation.key.identity < 0:
            self._waiting.append(operation)
        else:
            self._begin(operation)
            self._deliver_local()

    def clock(self, namespace: int, clock: int, pushes: dict[Key, int], *, whole: bool) -> None:
        """End a clock of this rank, its `clock`-th, in which it pushed each key so often."""
        self._ended_clocks.append(_EndedClock(namespace, clock, pushes, whole))
        self._announce_clocks()
        self._deliver_local()

    def serve(self, key: Key, store: BlockStore) -> None:
        """Begin to serve what this rank owns of a key, once the scheduler has numbered it."""
        if self._failure is not None:
            return
        if key.identity < 0:
            self._stores[key] = store
            return
        self._routed.keys[key.identity] = key
        self._serving.serve(key, store)
        self._deliver_local()

    def outstanding(self) -> Iterator[AsyncOperation]:
        """Yield the operations that are not complete."""
        yield from self._waiting
        yield from self._requests.outstanding()

    # ---------------------------------------------------------------------------- events and messages come in

    def key_granted(self, key: Key) -> None:
        """Begin the operations on a key that the scheduler has numbered."""
        self._routed.keys[key.identity] = key
        store = self._stores.pop(key, None)
        if store is not None:
            self._serving.serve(key, store)
        ready = [operation for operation in self._waiting if operation.key is key]
        self._waiting = [operation for operation in self._waiting if operation.key is not key]
        for operation in ready:
            self._begin(operation)
        self._announce_clocks()
        self._deliver_local()

    def new_policy(self, policy: Policy, *, of_view: bool = False) -> None:
        """Send over the links of a newer policy from now on: some links of the old one may have failed. With
        another view, or if a newcomer has its state, blocks get other owners.
        """
        if policy.version <= self._version:
            return
        self._version = policy.version
        self._routed.new_policy(policy)
        if self._elastic and (of_view or policy.silent != self._silent) and _eligible(policy):
            self._change_view(policy)

    def _change_view(self, policy: Policy) -> None:
        self._routed.view, self._silent = policy.version, policy.silent
        self._routed.local.clear()
        self.owners.change(_eligible(policy))
        self._serving.change_view(
            members=policy.members or range(policy.size),
            silent=policy.silent,
            later=policy.later,
        )
        self._requests.send_again()
        for namespace, clock in self._clocks.items():
            self._send_clock(namespace, clock)
        early, self._early = self._early, []
        self._waiting_bytes.ready(_LATER_VIEW)
        for *_, charge in early:
            self._waiting_bytes.give_back(charge)
        for origin, message, payload, charge in early:
            self._waiting_bytes.begin(charge.peer, again=True)
            try:
                self._receive(origin, message, payload)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a message that rank %d sent early: %s", origin, error)
        self._deliver_local()

    def departed(self, rank: int, error: NetStormError) -> None:
        """Go on without a rank's process in an elastic job. End any other job that trains asynchronously:
        what a lost rank owns is lost with it.
        """
        if self._elastic:
            self._serving.forget(rank)
            return
        if self._waiting or self._serving.is_used or any(True for _ in self._requests.outstanding()):
            reason = f"{error}; asynchronous training does not go on without a rank, which owns parameters"
            self._end_job(NodeLost(reason))

    def finished(self, rank: int) -> None:
        """Record that a rank pushes no more."""
        self._serving.finished(rank)
        self._deliver_local()

    def receive(self, peer: Peer, message: Routed, payload: Buffer | None, payload_crc: int | None) -> None:
        """Handle a source-routed message: forward it, or receive it at its end.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        if self._routed.has_arrived(peer, message, payload, payload_crc):
            self._receive(message.path[0], message, payload)
            self._deliver_local()

    def _receive(self, origin: int, message: Routed, payload: Buffer | None) -> None:
        """Handle a message of another rank, if it is of this view."""
        if message.view == self._routed.view:
            self._handle(origin, message, payload)
        elif message.view < self._routed.view:
            self._counters.add("messages_of_earlier_views")
        elif not self._elastic:
            raise ProtocolViolation(
                f"rank {origin} sends {type(message).__name__} of view {message.view}, and there are no views"
            )
        else:
            size = 0 if payload is None else memoryview(payload).nbytes
            charge = self._waiting_bytes.take(size, _LATER_VIEW, f"views after {self._routed.view}")
            self._early.append((origin, message, payload, charge))

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now >= self.next_tick():
            self._serving.pass_over_silent(now)
            self._deliver_local()

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return self._serving.handover.next_tick()

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        operations = list(self.outstanding())
        self._failure = error
        self._waiting.clear()
        self._requests.clear()
        self._routed.local.clear()
        self._serving.stop()
        for operation in operations:
            self._routed.complete(operation.done, error)

    # ---------------------------------------------------------------------------------------- this rank's own

    def _went_back(self, key: Key, block: int, seen: int, here: int) -> None:
        self._serving.went_back(key, block, seen, here)

    def _begin(self, operation: AsyncOperation) -> None:
        self._routed.keys[operation.key.identity] = operation.key
        self._requests.begin(operation)

    def _announce_clocks(self) -> None:
        """Announce ended clocks to owners, once it is known what they own of the pushed keys."""
        while self._ended_clocks:
            ended = self._ended_clocks[0]
            if any(key.identity < 0 for key in ended.pushes):
                return
            if self._elastic:  # owners need not count pushes then, which may be confirmed by several of them
                if self._requests.has_pushes_before(ended.namespace, ended.clock):
                    return
                del self._ended_clocks[0]
                self._clocks[ended.namespace] = ended.clock
                self._send_clock(ended.namespace, ended.clock)
                continue
            del self._ended_clocks[0]
            pushed: dict[int, int] = {}
            for key, times in ended.pushes.items():
                for owner, blocks in self.owners.count(key, whole=ended.whole).items():
                    pushed[owner] = pushed.get(owner, 0) + times * blocks
            for owner in self.owners.ranks:
                tick = Tick(
                    path=(),
                    hop=0,
                    namespace=ended.namespace,
                    clock=ended.clock,
                    pushed=pushed.get(owner, 0),
                )
                self._routed.send(owner, tick)

    def _send_clock(self, namespace: int, clock: int) -> None:
        """Announce to all owners that clocks have ended, and that all their pushes are confirmed."""
        clock += self._requests.clock_begin(namespace)
        for owner in self.owners.ranks:
            self._routed.send(owner, Tick(path=(), hop=0, namespace=namespace, clock=clock, pushed=0))

    # ---------------------------------------------------------------------------------- messages of this view

    def _handle(self, origin: int, message: Routed, payload: Buffer | None) -> None:
        if isinstance(message, Push):
            self._serving.push(origin, message, payload)
        elif isinstance(message, (Pull, PullRows, PullStates)):
            self._serving.pull(origin, message, payload)
        elif isinstance(message, Tick):
            self._serving.tick(origin, message)
        elif isinstance(message, Applied):
            self._requests.applied(origin, message)
            self._announce_clocks()
        elif isinstance(message, CopyMessage):
            self._serving.copy(origin, message, payload)
        elif isinstance(message, CopiesHeld):
            self._serving.held(origin, message)
        elif isinstance(message, Value):
            self._requests.value(origin, message, payload)
        else:
            self._requests.states(origin, message, payload)

    def _deliver_local(self) -> None:
        """Handle what this rank has sent to itself, until nothing is left."""
        routed = self._routed
        if routed.local:
            self._waiting_bytes.end()  # it is no peer's
        while routed.local:
            messages, routed.local = routed.local, []
            for message, payload in messages:
                self._handle(self._rank, message, payload)

    # --------------------------------------------------------------------------------------------- for people

    def waiting_text(self, since: float) -> str:
        """Return what this rank has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.outstanding():
            if operation.begun_at <= since:
                own = self._serving.waiting_text()
                return self._requests.waiting_text_of(operation) + (f"; here {own}" if own else "")
        return ""

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)


def _eligible(policy: Policy) -> list[int]:
    """Return the ranks that may own blocks: those in the job that have its state."""
    return sorted(set(policy.members or range(policy.size)) - set(policy.silent))
