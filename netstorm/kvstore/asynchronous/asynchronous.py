"""Asynchronous training on one node: its own requests, and what it forwards and serves. Pure.

Each block of a key has an owner, fixed for the job (`owners`). A push goes to the owners, which apply it at
once and confirm it. A pull asks them for the newest values. It waits there for this rank's own pushes and, if
staleness is bounded, for the slowest rank. Nothing here waits for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from netstorm.errors import NetStormError
from netstorm.kvstore.asynchronous.block_store import BlockStore
from netstorm.kvstore.asynchronous.owners import Owners
from netstorm.kvstore.asynchronous.requests import Requests
from netstorm.kvstore.asynchronous.serving import Serving
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.source_routes import check_route, forwarded, queue_order
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Applied, Pull, PullRows, PullStates, Push, Routed, Tick, Value
from netstorm.pslite.machine import Send
from netstorm.topology.owners import paths_from
from netstorm.topology.policy import Policy

__all__ = ["Asynchronous"]


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
    ) -> None:
        """Begin without keys.

        Args:
            rank: of this node.
            policy: its links lead to the other ranks.
            weights: of the owners, by rank.
            outbox: takes instructions.
            counters: of the process.
            end_job: fails the whole job.
        """
        self.owners: Final = Owners(weights)
        self._rank: Final = rank
        self._counters: Final = counters
        self._paths = paths_from(policy, rank)
        self._version = policy.version
        self._size: Final = policy.size
        self._keys: dict[int, Key] = {}
        self._waiting: list[AsyncOperation] = []
        """Operations whose keys have not been granted."""
        self._requests: Final = Requests(self.owners, counters, send=self._send, complete=outbox.complete)
        self._ended_clocks: list[_EndedClock] = []
        self._local: list[tuple[Routed, Buffer | None]] = []
        """Messages from this rank to itself."""
        self._failure: NetStormError | None = None
        self._outbox: Final = outbox
        self._serving: Final = Serving(
            rank,
            policy.size,
            self.owners,
            outbox,
            counters,
            answer=self._send,
            end_job=end_job,
            on_progress=self._deliver_local,
        )

    # ------------------------------------------------------------------------------------ the user's requests

    def submit(self, operation: AsyncOperation, now: float) -> None:
        """Begin a push or a pull; its `done` is called in any case."""
        if self._failure is not None:
            self._outbox.complete(operation.done, self._failure)
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
        """Begin to serve what this rank owns of a key."""
        if self._failure is None:
            self._serving.serve(key, store)
            self._deliver_local()

    def outstanding(self) -> Iterator[AsyncOperation]:
        """Yield the operations that are not complete."""
        yield from self._waiting
        yield from self._requests.outstanding()

    # ---------------------------------------------------------------------------- events and messages come in

    def key_granted(self, key: Key) -> None:
        """Begin the operations on a key that the scheduler has numbered."""
        self._keys[key.identity] = key
        ready = [operation for operation in self._waiting if operation.key is key]
        self._waiting = [operation for operation in self._waiting if operation.key is not key]
        for operation in ready:
            self._begin(operation)
        self._announce_clocks()
        self._deliver_local()

    def new_policy(self, policy: Policy) -> None:
        """Send over the links of a newer policy from now on: some links of the old one may have failed."""
        if policy.version > self._version:
            self._version = policy.version
            self._paths = paths_from(policy, self._rank)

    def finished(self, rank: int) -> None:
        """Record that a rank pushes no more."""
        self._serving.finished(rank)
        self._deliver_local()

    def receive(self, peer: Peer, message: Routed, payload: Buffer | None, payload_crc: int) -> None:
        """Handle a source-routed message: forward it, or receive it at its end.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        check_route(message, peer, self._rank, self._size)
        further = forwarded(message, payload, payload_crc, self._offset(message))
        if further is not None:
            self._outbox.add(further)
            return
        self._handle(message.path[0], message, payload)
        self._deliver_local()

    def fail_all(self, error: NetStormError) -> None:
        """Fail every operation, now and later."""
        operations = list(self.outstanding())
        self._failure = error
        self._waiting.clear()
        self._requests.clear()
        self._local.clear()
        self._serving.stop()
        for operation in operations:
            self._outbox.complete(operation.done, error)

    # ---------------------------------------------------------------------------------------- this rank's own

    def _begin(self, operation: AsyncOperation) -> None:
        self._keys[operation.key.identity] = operation.key
        self._requests.begin(operation)

    def _announce_clocks(self) -> None:
        """Announce ended clocks to owners, once it is known what they own of the pushed keys."""
        while self._ended_clocks:
            ended = self._ended_clocks[0]
            if any(key.identity < 0 for key in ended.pushes):
                return
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
                self._send(owner, tick, None)

    # ------------------------------------------------------------------------------------------------ sending

    def _handle(self, origin: int, message: Routed, payload: Buffer | None) -> None:
        if isinstance(message, Push):
            self._serving.push(origin, message, payload)
        elif isinstance(message, (Pull, PullRows, PullStates)):
            self._serving.pull(origin, message, payload)
        elif isinstance(message, Tick):
            self._serving.tick(origin, message)
        elif isinstance(message, Applied):
            self._requests.applied(message)
        elif isinstance(message, Value):
            self._requests.value(origin, message, payload)
        else:
            self._requests.states(origin, message, payload)

    def _send(self, target: int, message: Routed, payload: Buffer | None) -> None:
        if target == self._rank:
            self._local.append((message, payload))
            return
        path = self._paths[target]
        self._outbox.add(
            Send(
                peer=Peer(path[1]),
                message=msgspec.structs.replace(message, path=path, hop=1),
                payload=payload,
                order=queue_order(message, self._offset(message)),
            )
        )

    def _deliver_local(self) -> None:
        """Handle what this rank has sent to itself, until nothing is left."""
        while self._local:
            messages, self._local = self._local, []
            for message, payload in messages:
                self._handle(self._rank, message, payload)

    def _offset(self, message: Routed) -> int:
        """Return the offset of a message's chunk among the job's bytes; 0 if it is not known here."""
        if not isinstance(message, (Push, Value)):
            return 0
        key = self._keys.get(message.key)
        return 0 if key is None else key.offset_of(message.chunk)

    # --------------------------------------------------------------------------------------------- for people

    def waiting_text(self, since: float) -> str:
        """Return what this rank has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.outstanding():
            if operation.begun_at <= since:
                return self._requests.waiting_text_of(operation)
        return ""

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)
