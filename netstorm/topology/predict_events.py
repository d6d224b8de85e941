"""The discrete events behind `predict`: chunks wait, cross connections, arrive, are added and passed on."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.errors import UsageError
from netstorm.topology.holding import Holding, Stretch
from netstorm.topology.maxmin import MaxMin
from netstorm.topology.network import Network
from netstorm.topology.policy import Tree
from netstorm.topology.resources import Resources

__all__ = ["Chunk", "Events"]

_SMALLEST_WINDOW: Final = 8 * 1024 * 1024
_WINDOW_FACTOR: Final = 4
"""The transport's rule: max(1 MiB, 4 chunks, 4 times the bandwidth-delay product) may be un-acknowledged."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is routed as one."""

    bits: float
    tree: int
    tensor: int = 0
    """Tensors have rising numbers, in the order of chunks."""


class _Connection:
    """One direction of a pair: chunks that wait, chunks under way, and the one that is being sent."""

    __slots__ = (
        "acknowledgements",
        "committed",
        "ends",
        "event",
        "in_flight",
        "latency",
        "left",
        "number",
        "rate",
        "return_latency",
        "sending",
        "since",
        "source",
        "target",
        "total",
        "waiting",
        "window",
    )

    def __init__(self, number: int, source: int, target: int) -> None:
        self.number: Final = number
        self.source: Final = source
        self.target: Final = target
        self.latency = 0.0
        self.return_latency = 0.0
        self.window = math.inf
        """Bits that may be un-acknowledged."""
        self.waiting: Final[list[tuple[int, int, bool]]] = []
        """Heap of (chunk, arrival here, is a result)."""
        self.committed: Final[deque[tuple[int, bool]]] = deque()
        """Within the window: handed over to the operating system, whose order is that of arrival."""
        self.in_flight = 0.0
        self.acknowledgements: Final[deque[tuple[float, float]]] = deque()
        """(When it comes, bits) of each chunk that is through."""
        self.sending: tuple[int, bool] | None = None
        self.left = 0.0
        """Bits of it that were not through at `since`."""
        self.since = 0.0
        self.rate = 0.0
        self.ends = math.inf
        """When it is through at the present rate."""
        self.event = math.inf
        """When we look again: at `ends` or, after the rate has fallen, earlier."""
        self.total = 0.0
        """Bits sent."""


class Events:
    """One all-reduce of chunks, all contributions ready at time 0. What comes first is found in a heap.

    Attributes:
        now: seconds; after `run`, when all ranks have everything.
    """

    def __init__(
        self,
        network: Network,
        trees: Sequence[Tree],
        chunks: Sequence[Chunk],
        *,
        look_ahead: int = 0,
        look_ahead_s: float = 0.0,
    ) -> None:
        """Set up connections for the edges of `trees`.

        Args:
            network: as it is at time 0; its changes are at times after that.
            chunks: in order of priority.
            look_ahead: of the policy, in bytes.
            look_ahead_s: of the policy, in seconds.

        Raises:
            UsageError: a tree has an edge between ranks that may not talk, or does not fit the network.
        """
        if trees[0].size != network.size:
            raise UsageError(f"trees of {trees[0].size} ranks for a network of {network.size}")
        self.now = 0.0
        self._network = network
        self._trees: Final = trees
        self._chunks: Final = chunks
        self._sequence = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._missing = len(chunks) * network.size
        self._needs: Final = [_children_of(trees[chunk.tree]) for chunk in chunks]
        """By chunk and rank: how many children's contributions have not come."""
        self._first_chunks, tensors = _layout(chunks)
        self._holding: Final = [Holding[int]() for _ in network.ranks if look_ahead]
        self._stretches: Final = [
            [Stretch(place, offsets, look_ahead, priority=-place) for place, offsets in enumerate(tensors)]
            for _ in self._holding
        ]
        """By rank and tensor."""
        self._connections: Final = self._connect()
        resources = Resources.of(network)
        self._sharing: Final = MaxMin(resources.capacities.tolist())
        for ends in self._connections:
            self._sharing.add(resources.used_by(ends))
        self._by_number: Final = list(self._connections.values())
        self._measure(resources)
        tree_connections = [self._edges_of(tree) for tree in trees]
        self._up: Final = [up for up, _ in tree_connections]
        self._down: Final = [down for _, down in tree_connections]
        if self._holding:
            self._at(look_ahead_s, self._doubt)
        for time in sorted({change.at for change in network.changes}):
            self._at(time, self._change, network.at(time))

    @property
    def bits(self) -> dict[tuple[int, int], float]:
        """Bits sent so far, by (source, target)."""
        return {ends: connection.total for ends, connection in self._connections.items()}

    def run(self) -> None:
        """Let everything happen."""
        for holding, stretches in zip(self._holding, self._stretches, strict=True):
            for stretch in stretches:
                holding.begin(stretch)
        for number in range(len(self._chunks)):
            for rank, need in enumerate(self._needs[number]):
                if need == 0:
                    self._complete(number, rank)
        self._share()
        events = self._events
        while self._missing:
            self.now, _, action, arguments = heapq.heappop(events)
            action(*arguments)
            if not events or events[0][0] > self.now:
                self._share()

    # ------------------------------------------------------------------------------------------ what nodes do

    def _complete(self, number: int, rank: int) -> None:
        """A rank has the sum of its subtree."""
        chunk = self._chunks[number]
        connection = self._up[chunk.tree][rank]
        if connection is None:
            self._deliver(number, rank)
        elif not self._holding or not self._holding[rank].hold(
            self._stretches[rank][chunk.tensor], number - self._first_chunks[chunk.tensor]
        ):
            self._push(connection, number, result=False)

    def _deliver(self, number: int, rank: int) -> None:
        """A rank has the result."""
        self._missing -= 1
        chunk = self._chunks[number]
        for connection in self._down[chunk.tree][rank]:
            self._push(connection, number, result=True)
        if self._holding:
            stretch, place = self._stretches[rank][chunk.tensor], number - self._first_chunks[chunk.tensor]
            self._release(rank, self._holding[rank].result(stretch, place))

    def _release(self, rank: int, released: Iterable[tuple[int, int]]) -> None:
        """Send what was held."""
        for tensor, place in released:
            number = self._first_chunks[tensor] + place
            up = self._up[self._chunks[number].tree][rank]
            assert up is not None  # what a root has is not held
            self._push(up, number, result=False)

    def _doubt(self) -> None:
        """What no result has come of is waited for no longer."""
        for rank, stretches in enumerate(self._stretches):
            for stretch in stretches:
                self._release(rank, self._holding[rank].doubt(stretch))

    def _arrive(self, number: int, rank: int, result: bool) -> None:  # noqa: FBT001 - an event's argument
        if result:
            self._deliver(number, rank)
            return
        needs = self._needs[number]
        needs[rank] -= 1
        if needs[rank] == 0:
            self._complete(number, rank)

    # ------------------------------------------------------------------------------------ what connections do

    def _push(self, connection: _Connection, number: int, *, result: bool) -> None:
        if connection.waiting:
            self._commit(connection)
        self._sequence += 1
        heapq.heappush(connection.waiting, (number, self._sequence, result))
        self._commit(connection)
        if connection.sending is None:
            self._begin(connection)

    def _commit(self, connection: _Connection) -> None:
        """Move what fits into the window, the most urgent first: then nothing overtakes it any more."""
        acknowledgements = connection.acknowledgements
        while acknowledgements and acknowledgements[0][0] <= self.now:
            connection.in_flight -= acknowledgements.popleft()[1]
        waiting = connection.waiting
        while waiting:
            number, _, result = waiting[0]
            after = connection.in_flight + self._chunks[number].bits
            if after > connection.window and connection.in_flight > 0.5:  # bits are counted in floats
                return
            heapq.heappop(waiting)
            connection.in_flight = after
            connection.committed.append((number, result))

    def _begin(self, connection: _Connection) -> bool:
        """Send the next chunk, if there is one; a connection without any is idle."""
        if not connection.committed:
            if connection.waiting:
                self._at(connection.acknowledgements[0][0], self._wake, connection)
            return False
        if connection.sending is None:
            self._sharing.start(connection.number)
            connection.rate = 0.0
        connection.sending = connection.committed.popleft()
        connection.left = self._chunks[connection.sending[0]].bits
        connection.since = self.now
        if connection.rate > 0:
            connection.ends = connection.event = self.now + connection.left / connection.rate
            self._at(connection.ends, self._finish, connection)
        return True

    def _wake(self, connection: _Connection) -> None:
        """The window has opened."""
        if connection.sending is None:
            self._commit(connection)
            self._begin(connection)

    def _finish(self, connection: _Connection) -> None:
        """The last bit leaves, if the rate has not fallen in the meantime."""
        if connection.sending is None or connection.event != self.now:
            return
        if connection.ends > self.now:
            connection.event = connection.ends
            self._at(connection.ends, self._finish, connection)
            return
        number, result = connection.sending
        bits = self._chunks[number].bits
        connection.total += bits
        arrival = self.now + connection.latency
        connection.acknowledgements.append((arrival + connection.return_latency, bits))
        self._at(arrival, self._arrive, number, connection.target, result)
        self._commit(connection)
        if not self._begin(connection):
            connection.sending = None
            connection.ends = connection.event = math.inf
            self._sharing.stop(connection.number)

    # ---------------------------------------------------------------------------------- what the network does

    def _share(self) -> None:
        """Bring rates up to date."""
        rates = self._sharing.rates
        for number in self._sharing.settle():
            connection = self._by_number[number]
            connection.left -= connection.rate * (self.now - connection.since)
            connection.since = self.now
            connection.rate = rates[number]
            connection.ends = self.now + max(0.0, connection.left) / connection.rate
            if connection.ends < connection.event:
                connection.event = connection.ends
                self._at(connection.ends, self._finish, connection)

    def _change(self, network: Network) -> None:
        self._network = network
        resources = Resources.of(network)
        self._sharing.set_capacities(resources.capacities.tolist())
        self._measure(resources)

    def _measure(self, resources: Resources) -> None:
        """Look up the latency and the window of each connection."""
        network = self._network
        largest = max((chunk.bits for chunk in self._chunks), default=0.0)
        alone = resources.pair_capacities
        for (source, target), connection in self._connections.items():
            connection.latency = network.link(network.ranks[source], network.ranks[target]).latency
            back = resources.index.get((target, source))
            connection.return_latency = (
                connection.latency
                if back is None
                else network.link(network.ranks[target], network.ranks[source]).latency
            )
            round_trip = connection.latency + connection.return_latency
            product = float(alone[resources.place((source, target))]) * round_trip
            connection.window = max(_SMALLEST_WINDOW, _WINDOW_FACTOR * (largest + product))

    # ------------------------------------------------------------------------------------------------- inside

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, action, arguments))

    def _connect(self) -> dict[tuple[int, int], _Connection]:
        """Return a connection for each pair that trees use, in order."""
        ends = {
            pair
            for tree in self._trees
            for rank in range(tree.size)
            if rank != tree.root
            for pair in ((rank, tree.reduce_parent[rank]), (tree.broadcast_parent[rank], rank))
        }
        return {pair: _Connection(number, *pair) for number, pair in enumerate(sorted(ends))}

    def _edges_of(self, tree: Tree) -> tuple[list[_Connection | None], list[list[_Connection]]]:
        """Return, by rank, the connection to its reduce parent, and those to its broadcast children."""
        connections = self._connections
        up = [
            None if parent < 0 else connections[rank, parent]
            for rank, parent in enumerate(tree.reduce_parent)
        ]
        down = [
            [connections[rank, child] for child in children]
            for rank, children in enumerate(tree.broadcast_children)
        ]
        return up, down


def _children_of(tree: Tree) -> list[int]:
    return [len(children) for children in tree.reduce_children]


def _layout(chunks: Sequence[Chunk]) -> tuple[list[int], list[list[int]]]:
    """Return each tensor's first chunk, and the byte offsets of its chunks."""
    first: list[int] = []
    offsets: list[list[int]] = []
    offset = 0
    for number, chunk in enumerate(chunks):
        while len(first) <= chunk.tensor:
            first.append(number)
            offsets.append([])
        offsets[chunk.tensor].append(offset)
        offset += round(chunk.bits / 8)
    return first, offsets
