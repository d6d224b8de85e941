"""The discrete events behind `predict`: chunks wait, cross connections, arrive, are added and forwarded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Network, Rank
from netstorm.topology.prediction.agenda import Agenda
from netstorm.topology.prediction.connections import Alone, Connection, window_of
from netstorm.topology.prediction.sharing import Shares, Sharing
from netstorm.topology.tree import Tree
from netstorm.topology.trees.resources import Resources
from netstorm.topology.trees.withholding import LookAheadSpan, Withholding

__all__ = ["Chunk", "Events"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that is routed."""

    bits: float
    tree: int
    tensor: int = 0
    """Tensors have rising numbers, in the order of chunks."""


class Events:
    """One all-reduce of chunks, whose contributions are all ready at time 0."""

    def __init__(
        self,
        network: Network,
        trees: Sequence[Tree],
        chunks: Sequence[Chunk],
        *,
        look_ahead: int = 0,
        look_ahead_s: float = 0.0,
    ) -> None:
        """Make connections for the edges of `trees`.

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
        self._trees: Final = trees
        self._chunks: Final = chunks
        self._agenda: Final = Agenda()
        self._missing = len(chunks) * network.size
        needs = [tuple(map(len, tree.reduce_children)) for tree in trees]
        self._needs: Final = [list(needs[chunk.tree]) for chunk in chunks]
        """By chunk and rank: number of children whose contributions have not arrived."""
        self._first_chunks, tensors = _layout(chunks)
        self._withholding: Final = [Withholding[int]() for _ in network.ranks if look_ahead]
        self._spans: Final = [
            [
                LookAheadSpan(place, offsets, look_ahead, priority=-place)
                for place, offsets in enumerate(tensors)
            ]
            for _ in self._withholding
        ]
        """By rank and tensor."""
        resources = Resources.of(network)
        self._shares: Final = Shares(resources.capacities.tolist())
        self._connections: Final = self._connect(network, resources)
        self._measure(network, resources)
        edges = [self._edges_of(tree) for tree in trees]
        self._up: Final = [edges[chunk.tree][0] for chunk in chunks]
        """By chunk and rank: the connection to its reduce parent."""
        self._down: Final = [edges[chunk.tree][1] for chunk in chunks]
        """By chunk and rank: those to its broadcast children."""
        if self._withholding:
            self._agenda.at(look_ahead_s, self._expire)
        for time in sorted({change.at for change in network.changes}):
            self._agenda.at(time, self._change, network.at(time))

    @property
    def now(self) -> float:
        """Seconds; after `run`, when all ranks have everything."""
        return self._agenda.now

    @property
    def bits(self) -> dict[tuple[int, int], float]:
        """Bits sent so far, by (source, target)."""
        return {ends: connection.total for ends, connection in self._connections.items()}

    def run(self) -> None:
        """Run all events."""
        for withholding, spans in zip(self._withholding, self._spans, strict=True):
            for span in spans:
                withholding.begin(span)
        for number in range(len(self._chunks)):
            for rank, need in enumerate(self._needs[number]):
                if need == 0:
                    self._complete(number, rank)
        agenda, shares = self._agenda, self._shares
        shares.settle()
        sharing = bool(shares)
        while self._missing:
            agenda.next()
            if sharing and agenda.at_rest():
                shares.settle()

    # -------------------------------------------------------------------------------------------------- nodes

    def _complete(self, number: int, rank: int) -> None:
        """Handle a complete sum of a rank's subtree."""
        connection = self._up[number][rank]
        if connection is None:
            self._deliver(number, rank)
            return
        if self._withholding:
            tensor = self._chunks[number].tensor
            place = number - self._first_chunks[tensor]
            if self._withholding[rank].withhold(self._spans[rank][tensor], place):
                return
        connection.push(number, result=False)

    def _deliver(self, number: int, rank: int) -> None:
        """Handle the arrival of a result at a rank."""
        self._missing -= 1
        for connection in self._down[number][rank]:
            connection.push(number, result=True)
        if self._withholding:
            tensor = self._chunks[number].tensor
            place = number - self._first_chunks[tensor]
            self._release(rank, self._withholding[rank].record_result(self._spans[rank][tensor], place))

    def _release(self, rank: int, released: Iterable[tuple[int, int]]) -> None:
        """Send sums that were withheld."""
        for tensor, place in released:
            number = self._first_chunks[tensor] + place
            up = self._up[number][rank]
            assert up is not None  # a root withholds nothing
            up.push(number, result=False)

    def _expire(self) -> None:
        """Stop waiting for tensors without a result: their look-ahead time is over."""
        for rank, spans in enumerate(self._spans):
            for span in spans:
                self._release(rank, self._withholding[rank].expire(span))

    def _arrive(self, number: int, rank: int, result: bool) -> None:
        if result:
            self._deliver(number, rank)
            return
        needs = self._needs[number]
        needs[rank] -= 1
        if needs[rank] == 0:
            self._complete(number, rank)

    # ------------------------------------------------------------------------------------------------ network

    def _change(self, network: Network) -> None:
        resources = Resources.of(network)
        self._shares.change(resources.capacities.tolist())
        self._measure(network, resources)

    def _measure(self, network: Network, resources: Resources) -> None:
        """Look up the latency and the window of each connection."""
        largest = max((chunk.bits for chunk in self._chunks), default=0.0)
        alone = resources.pair_capacities
        for (source, target), connection in self._connections.items():
            connection.latency = network.link(Rank(source), Rank(target)).latency
            back = resources.index.get((target, source))
            connection.return_latency = (
                connection.latency if back is None else network.link(Rank(target), Rank(source)).latency
            )
            connection.window = window_of(
                largest,
                float(alone[resources.place((source, target))]),
                connection.latency + connection.return_latency,
            )

    # ------------------------------------------------------------------------------------------------- inside

    def _connect(self, network: Network, resources: Resources) -> dict[tuple[int, int], Connection]:
        """Return a connection for each pair that trees use, in order."""
        pairs = sorted(
            {
                pair
                for tree in self._trees
                for rank in range(tree.size)
                if rank != tree.root
                for pair in ((rank, tree.reduce_parent[rank]), (tree.broadcast_parent[rank], rank))
            }
        )
        uses = {pair: resources.used_by(pair) for pair in pairs}
        users = Counter(resource for used in uses.values() for resource in used)
        bits = [chunk.bits for chunk in self._chunks]
        connections: dict[tuple[int, int], Connection] = {}
        for pair, used in uses.items():
            if network.changes or any(users[resource] > 1 for resource in used):
                connections[pair] = Sharing(
                    self._agenda, pair, bits, self._arrive, shares=self._shares, uses=used
                )
            else:
                rate = float(resources.pair_capacities[resources.place(pair)])
                connections[pair] = Alone(self._agenda, pair, bits, self._arrive, rate=rate)
        return connections

    def _edges_of(self, tree: Tree) -> tuple[list[Connection | None], list[list[Connection]]]:
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
