"""Asynchronous training on one node: its own requests, and what it forwards and serves. Pure.

Each block of a key has an owner, fixed for the job (`owners`). A push goes to the owners, who apply it at
once and say so; a pull asks them for the newest values, and waits there for this rank's own pushes and, if
staleness is bounded, for the slowest rank. Nothing here waits for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from netstorm.errors import NetStormError
from netstorm.kvstore.asynchronous.owners import Owners
from netstorm.kvstore.asynchronous.requests import Requests
from netstorm.kvstore.asynchronous.serving import BlockStore, Serving
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.source_routes import check_route, order_of, passed_on
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
    """A clock that has ended here, and that owners have not been told of."""

    namespace: int
    clock: int
    pushes: dict[Key, int] = field(default_factory=dict)
    whole: bool = False


class Asynchronous:
    """All of it on one node."""

    def __init__(
        self,
        rank: int,
        policy: Policy,
        weights: tuple[int, ...],
        *,
        outbox: Outbox,
        counters: Counters,
        blame: Callable[[NetStormError], None],
    ) -> None:
        """Begin.

        Args:
            rank: of this node.
            policy: over whose links others are reached.
            weights: of the owners, by rank.
            outbox: what is to be done.
            counters: of the process.
            blame: ends the job.
        """
        self.owners: Final = Owners(weights)
        self._rank: Final = rank
        self._counters: Final = counters
        self._paths = paths_from(policy, rank)
        self._version = policy.version
        self._size: Final = policy.size
        self._keys: dict[int, Key] = {}
        self._waiting: list[AsyncOperation] = []
        """Their keys have not been granted."""
        self._requests: Final = Requests(self.owners, counters, send=self._send, complete=outbox.call)
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
            blame=blame,
            settled=self._deliver_local,
        )

    # ------------------------------------------------------------------------------------ what the user wants

    def submit(self, operation: AsyncOperation, now: float) -> None:
        """Begin a push or a pull; its `done` is called in any case."""
        if self._failure is not None:
            self._outbox.call(operation.done, self._failure)
            return
        operation.begun_at = now
        if operation.key.identity < 0:
            self._waiting.append(operation)
        else:
            self._begin(operation)
            self._deliver_local()

    def clock(self, namespace: int, clock: int, pushes: dict[Key, int], *, whole: bool) -> None:
        """A clock of this rank has ended, its `clock`-th, in which it pushed these keys so often."""
        self._ended_clocks.append(_EndedClock(namespace, clock, pushes, whole))
        self._tell_clocks()
        self._deliver_local()

    def serve(self, key: Key, keeper: BlockStore) -> None:
        """Begin to serve what this rank owns of a key."""
        if self._failure is None:
            self._serving.serve(key, keeper)
            self._deliver_local()

    def outstanding(self) -> Iterator[AsyncOperation]:
        """Yield the operations that are not complete."""
        yield from self._waiting
        yield from self._requests.outstanding()

    # --------------------------------------------------------------------------------------- what is told it

    def granted(self, key: Key) -> None:
        """A key has its number."""
        self._keys[key.identity] = key
        ready = [one for one in self._waiting if one.key is key]
        self._waiting = [one for one in self._waiting if one.key is not key]
        for operation in ready:
            self._begin(operation)
        self._tell_clocks()
        self._deliver_local()

    def new_policy(self, policy: Policy) -> None:
        """Send what comes over the links of a newer policy: some of the older one's may be gone."""
        if policy.version > self._version:
            self._version = policy.version
            self._paths = paths_from(policy, self._rank)

    def finished(self, rank: int) -> None:
        """A rank will push no more."""
        self._serving.finished(rank)
        self._deliver_local()

    def receive(self, peer: Peer, message: Routed, payload: Buffer | None, payload_crc: int) -> None:
        """Take a source-routed message.

        Raises:
            ProtocolViolation: no correct node sends that.
        """
        check_route(message, peer, self._rank, self._size)
        further = passed_on(message, payload, payload_crc, self._offset(message))
        if further is not None:
            self._outbox.add(further)
            return
        self._take(message.path[0], message, payload)
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
            self._outbox.call(operation.done, error)

    # ----------------------------------------------------------------------------------------------- its own

    def _begin(self, operation: AsyncOperation) -> None:
        self._keys[operation.key.identity] = operation.key
        self._requests.begin(operation)

    def _tell_clocks(self) -> None:
        """Tell owners of clocks that have ended, as soon as it is known what they own of what was pushed."""
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

    def _take(self, origin: int, message: Routed, payload: Buffer | None) -> None:
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
                order=order_of(message, self._offset(message)),
            )
        )

    def _deliver_local(self) -> None:
        """Take what this rank has sent itself, and what follows from that."""
        while self._local:
            messages, self._local = self._local, []
            for message, payload in messages:
                self._take(self._rank, message, payload)

    def _offset(self, message: Routed) -> int:
        """Return the place of a message's chunk among the job's bytes; 0 if that is not known here."""
        if not isinstance(message, (Push, Value)):
            return 0
        key = self._keys.get(message.key)
        return 0 if key is None else key.offset_of(message.chunk)

    # --------------------------------------------------------------------------------------------- for people

    def waits(self, since: float) -> str:
        """Say what this rank has been waiting for since `since`, for a person; empty if for nothing."""
        for operation in self.outstanding():
            if operation.begun_at <= since:
                return self._requests.missing_in(operation)
        return ""

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)
