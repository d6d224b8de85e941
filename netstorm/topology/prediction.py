"""Predicts how long a policy takes, by a simulation of its chunks. The scheduler and `netstorm plan` use it.

Modelled: store and forward of chunks; the transport's order on each connection (most urgent first, after what
    is within the window); aggregation and broadcast without processing time; the look-ahead; latencies;
    max-min fair shares of links, links under routed pairs and access caps; loss as reduced goodput; changes
    of links. Not
modelled: slow start, auxiliary paths, tensors that become ready one after the other.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final, Protocol

from netstorm.errors import UsageError
from netstorm.topology.look_ahead import LookAheadSpan, Withholding
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.resources import Resources
from netstorm.topology.tree import Tree

__all__ = ["MaxMin", "Prediction", "chunks_of", "predict", "prediction_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time and traffic of a policy."""

    seconds: float
    """Until all ranks have all results."""
    bits: Mapping[tuple[int, int], float]
    """Sent on each (source, target) that the policy uses."""


def predict(
    network: Network,
    policy: Policy,
    tensors: Sequence[int],
    *,
    chunk_bytes: int,
    header_bytes: int = 0,
    start: float = 0.0,
    most_chunks: int | None = None,
) -> Prediction:
    """Return how long one all-reduce of `tensors` takes under `policy`, all of them ready at once.

    A discrete-event simulation, the same for the same arguments: O(chunks · N · log) where no two connections
    share anything, and about 5 times that behind access caps.

    Args:
        network: links and their changes; cap and share as in `Resources`.
        tensors: bytes of each, in order of priority.
        chunk_bytes: of a full chunk.
        header_bytes: of each chunk.
        start: seconds from the network's start to that of the all-reduce.
        most_chunks: if there are more chunks, the tensors are predicted as one tensor of so many chunks: this
            is
            faster to compute, and some per cent too pessimistic for deep trees.

    Raises:
        UsageError: sizes out of range, or trees that don't fit the network.
    """
    if chunk_bytes < 1 or any(size < 0 for size in tensors) or (most_chunks is not None and most_chunks < 1):
        raise UsageError(
            f"tensors of {list(tensors)[:8]} bytes in chunks of {chunk_bytes}, at most {most_chunks}: "
            "expected no negative sizes, and at least 1 byte and 1 chunk"
        )
    if start < 0:
        raise UsageError(f"start is {start}: expected 0 s or more after the network's start")
    chunks = chunks_of(policy, tensors, chunk_bytes, header_bytes)
    look_ahead, look_ahead_s = policy.look_ahead, policy.look_ahead_s
    if most_chunks is not None and len(chunks) > most_chunks:
        total = sum(tensors)
        larger = -(-total // most_chunks)
        chunks = chunks_of(policy, [total], larger, header_bytes * larger // chunk_bytes)
        look_ahead = look_ahead * larger // chunk_bytes  # else it would be too small for the larger chunks
        look_ahead_s *= larger / chunk_bytes
    if network.changes:
        network = network.at(start)
        changes = tuple(replace(change, at=change.at - start) for change in network.changes)
        network = replace(network, changes=changes)
    events = Events(network, policy.trees, chunks, look_ahead=look_ahead, look_ahead_s=look_ahead_s)
    events.run()
    return Prediction(seconds=events.now, bits=events.bits)


def prediction_work(network: Network, chunks: int) -> float:
    """Return about how much work a prediction of so many chunks is: transmissions, as many times as one takes
    longer that shares something. It moves the rates of up to all connections at its ends, or under its route.
    """
    resources = Resources.of(network)
    shares = resources.matrix.nnz > len(resources.pairs)
    return 2 * chunks * max(1, network.size - 1) * (1 + network.size / 4 if shares else 1)


def chunks_of(policy: Policy, tensors: Sequence[int], chunk_bytes: int, header_bytes: int = 0) -> list[Chunk]:
    """Return the chunks of tensors of so many bytes, in order, each with its tree.

    A tensor's first chunk is in the slot of its first byte, the others in those after it.
    """
    chunks = []
    offset = 0
    for tensor, size in enumerate(tensors):
        slot = offset // chunk_bytes
        for begin in range(0, size, chunk_bytes):
            bits = 8.0 * (min(chunk_bytes, size - begin) + header_bytes)
            chunks.append(Chunk(bits, policy.tree_of(slot + begin // chunk_bytes), tensor))
        offset += size
    return chunks


# The discrete events behind `predict`: chunks wait, cross connections, arrive, are added and forwarded.


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


# Connections of the discrete events behind `predict`: their queue, their window, and when chunks arrive.
#
# The queue is in order of urgency. Chunks within the window have been handed to the operating system, which
# sends them in order of arrival. A connection that shares nothing knows at once when such a chunk arrives
# (`Alone`); the rates of connections that share change whenever one of them begins or ends
# (`sharing.Sharing`).

_SMALLEST_WINDOW: Final = 8 * 1024 * 1024
_WINDOW_FACTOR: Final = 4

_A_BIT: Final = 0.5
"""Bits are floats: fewer than this are none."""


def window_of(largest: float, rate: float, round_trip: float) -> float:
    """Return the bits that a connection may have unacknowledged.

    The transport's rule: 4 times (the largest chunk and the bandwidth-delay product), but at least 1 MiB.
    """
    return max(_SMALLEST_WINDOW, _WINDOW_FACTOR * (largest + rate * round_trip))


class Arrive(Protocol):
    """Called when a chunk arrives."""

    def __call__(self, number: int, rank: int, result: bool, /) -> None:
        """Handle the arrival of chunk `number` at `rank`: a contribution, or a result."""


class Connection:
    """One direction of a pair.

    Attributes:
        latency: seconds; `return_latency`: of acknowledgements.
        window: bits that may be unacknowledged.
        total: bits sent.
    """

    __slots__ = (
        "_acknowledgements",
        "_agenda",
        "_arrive",
        "_bits",
        "_in_flight",
        "_pushed",
        "_waiting",
        "latency",
        "return_latency",
        "source",
        "target",
        "total",
        "window",
    )

    def __init__(self, agenda: Agenda, ends: tuple[int, int], bits: Sequence[float], arrive: Arrive) -> None:
        """Begin idle; `bits` are the size of each chunk, and `arrive` is called with each that arrives."""
        self._agenda: Final = agenda
        self.source, self.target = ends
        self._bits: Final = bits
        self._arrive: Final = arrive
        self._waiting: Final[list[tuple[int, int, bool]]] = []
        """Heap of (chunk, arrival here, is a result)."""
        self._pushed = 0
        self._in_flight = 0.0
        self._acknowledgements: Final[deque[tuple[float, float]]] = deque()
        """(When it arrives, bits) of each chunk that is sent."""
        self.latency = 0.0
        self.return_latency = 0.0
        self.window = math.inf
        self.total = 0.0

    def push(self, number: int, *, result: bool) -> None:
        """Send a chunk when its turn comes."""
        acknowledgements = self._acknowledgements
        if self._waiting or (acknowledgements and acknowledgements[0][0] <= self._agenda.now):
            self._commit()
        if self._waiting or not self._fits(number):
            self._pushed += 1
            heappush(self._waiting, (number, self._pushed, result))
            self._wait()
        else:
            self._send(number, result=result)

    def _commit(self) -> None:
        """Hand over what fits into the window, the most urgent first. Nothing overtakes it from then on."""
        acknowledgements, now = self._acknowledgements, self._agenda.now
        while acknowledgements and acknowledgements[0][0] <= now:
            self._in_flight -= acknowledgements.popleft()[1]
        waiting = self._waiting
        while waiting and self._fits(waiting[0][0]):
            number, _, result = heappop(waiting)
            self._send(number, result=result)
        if waiting:
            self._wait()

    def _fits(self, number: int) -> bool:
        """Return whether the window has room; if so, reserve it for the chunk."""
        after = self._in_flight + self._bits[number]
        if after > self.window and self._in_flight > _A_BIT:
            return False
        self._in_flight = after
        return True

    def _wait(self) -> None:
        """Schedule `_commit` for when the window has room, if nothing else calls it then."""

    def _send(self, number: int, *, result: bool) -> None:
        raise NotImplementedError


class Alone(Connection):
    """A connection that shares nothing, on links that do not change: arrivals are known at once."""

    __slots__ = ("_free_at", "_rate", "_wakes_at")

    def __init__(
        self,
        agenda: Agenda,
        ends: tuple[int, int],
        bits: Sequence[float],
        arrive: Arrive,
        *,
        rate: float,
    ) -> None:
        """Begin idle."""
        super().__init__(agenda, ends, bits, arrive)
        self._rate: Final = rate
        self._free_at = 0.0
        """When all that was handed over is sent."""
        self._wakes_at = -1.0

    def _wait(self) -> None:
        if self._wakes_at <= self._agenda.now:
            self._wakes_at = self._acknowledgements[0][0]
            self._agenda.at(self._wakes_at, self._commit)

    def _send(self, number: int, *, result: bool) -> None:
        bits, now = self._bits[number], self._agenda.now
        self._free_at = ends = max(now, self._free_at) + bits / self._rate
        self.total += bits
        there = ends + self.latency
        self._acknowledgements.append((there + self.return_latency, bits))
        self._agenda.at(there, self._arrive, number, self.target, result)


# Connections of the discrete events behind `predict` that share resources, max-min fairly.


class Sharing(Connection):
    """A connection that shares resources with others, or whose link changes: its rate changes over time."""

    __slots__ = ("_committed", "_ends", "_event", "_flow", "_left", "_rate", "_sending", "_shares", "_since")

    def __init__(
        self,
        agenda: Agenda,
        ends: tuple[int, int],
        bits: Sequence[float],
        arrive: Arrive,
        *,
        shares: Shares,
        uses: Sequence[int],
    ) -> None:
        """Begin idle; `uses` are the resources of the pair."""
        super().__init__(agenda, ends, bits, arrive)
        self._shares: Final = shares
        self._flow: Final = shares.add(self, uses)
        self._committed: Final[deque[tuple[int, bool]]] = deque()
        self._sending: tuple[int, bool] | None = None
        self._left = 0.0
        """Bits of the present chunk that were not sent at `_since`."""
        self._since = 0.0
        self._rate = 0.0
        self._ends = math.inf
        """When the present chunk is sent, at the present rate."""
        self._event = math.inf
        """Time of the next event: `_ends` or, if the rate has fallen since, earlier."""

    def push(self, number: int, *, result: bool) -> None:
        """Send a chunk when its turn comes."""
        super().push(number, result=result)
        if self._sending is None:
            self._begin()

    def set_rate(self, rate: float) -> None:
        """Continue at another rate."""
        now = self._agenda.now
        self._left -= self._rate * (now - self._since)
        self._since = now
        self._rate = rate
        self._ends = now + (self._left / rate if self._left > 0 else 0.0)
        if self._ends < self._event:
            self._event = self._ends
            self._agenda.at(self._ends, self._finish)

    def _send(self, number: int, *, result: bool) -> None:
        self._committed.append((number, result))

    def _begin(self) -> bool:
        """Send the next chunk; return False, and become idle, if there is none."""
        if not self._committed:
            if self._waiting:
                self._agenda.at(self._acknowledgements[0][0], self._wake)
            return False
        if self._sending is None:
            self._shares.start(self._flow)
            self._rate = 0.0
        self._sending = self._committed.popleft()
        self._left = self._bits[self._sending[0]]
        self._since = self._agenda.now
        if self._rate > 0:
            self._ends = self._event = self._since + self._left / self._rate
            self._agenda.at(self._ends, self._finish)
        return True

    def _wake(self) -> None:
        """Go on: the window has room again."""
        if self._sending is None:
            self._commit()
            self._begin()

    def _finish(self) -> None:
        """End the present chunk, unless the rate has fallen in the meantime."""
        now = self._agenda.now
        if self._sending is None or self._event != now:
            return
        if self._ends > now:
            self._event = self._ends
            self._agenda.at(self._ends, self._finish)
            return
        number, result = self._sending
        bits = self._bits[number]
        self.total += bits
        there = now + self.latency
        self._acknowledgements.append((there + self.return_latency, bits))
        self._agenda.at(there, self._arrive, number, self.target, result)
        self._commit()
        if not self._begin():
            self._sending = None
            self._ends = self._event = math.inf
            self._shares.stop(self._flow)


class Shares:
    """The max-min fair rates of connections that share."""

    def __init__(self, capacities: Sequence[float]) -> None:
        """Begin without connections."""
        self._flows: Final = MaxMin(capacities)
        self._connections: Final[list[Sharing]] = []
        self.start: Final = self._flows.start
        self.stop: Final = self._flows.stop

    def add(self, connection: Sharing, uses: Sequence[int]) -> int:
        """Return the number of a connection's flow, stopped."""
        self._connections.append(connection)
        return self._flows.add(uses)

    def change(self, capacities: Sequence[float]) -> None:
        """Change the capacities of the resources, in bit/s."""
        self._flows.set_capacities(capacities)

    def settle(self) -> None:
        """Bring rates up to date."""
        for flow in self._flows.settle():
            self._connections[flow].set_rate(self._flows.rates[flow])

    def __bool__(self) -> bool:
        return bool(self._connections)


# Max-min fair rates of flows that come and go: progressive filling, done again only where something changed.
#
# Each resource has a level: the most that it gives to any one flow. A flow's rate is the least level of its
# resources, and a resource's level is what fills it when each flow takes no more than the levels of its other
# resources allow. Rates for which both hold are the max-min fair ones [1]_, and there are no others; so after
# a change only levels that it reaches are worked out again, the lowest first, until nothing moves [2]_.
#
# References:
#     .. [1] Bertsekas and Gallager, Data Networks, 2nd edition, §6.5.2.
#     .. [2] Charny, Clark and Jain, Congestion control with explicit rate indication, ICC 1995: the levels
#        settle in finitely many steps, in whatever order they are worked out.

_SAME: Final = 1e-9
"""Levels that differ by less, relative to their size, are the same: rounding must not ripple on."""


class MaxMin:
    """Flows over resources 0..R-1; those that are started share what they use.

    Attributes:
        rates: by flow, in the unit of the capacities; 0 while it is stopped.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        """Begin without a flow."""
        self.rates: Final[list[float]] = []
        self._uses: Final[list[tuple[int, ...]]] = []
        self._limits: Final[list[float]] = []
        self._started: Final[list[bool]] = []
        self._moved: Final[dict[int, None]] = {}
        """Started flows whose rate may be another one; a dict, since its order is that of insertion."""
        self._capacities = list(capacities)
        self._forget()

    def add(self, uses: Sequence[int], limit: float = math.inf) -> int:
        """Return the number of a new flow, stopped, that never takes more than `limit`.

        Args:
            uses: its resources, at least one, each once.
            limit: in the unit of the capacities.
        """
        flow = len(self._uses)
        self._uses.append(tuple(uses))
        self._limits.append(limit)
        self._started.append(False)
        self.rates.append(0.0)
        self._place(flow)
        return flow

    def remove(self, flow: int) -> None:
        """Forget a flow; its number is not used again."""
        if self._started[flow]:
            self.stop(flow)
        for resource in self._uses[flow]:
            self._users[resource].remove(flow)
            self._wanted[resource] -= self._bound[flow]
        self._uses[flow] = self._shared[flow] = ()

    def start(self, flow: int) -> None:
        """Let a flow take its part; nothing changes before `settle`."""
        self._started[flow] = True
        self._moved[flow] = None
        for resource in self._shared[flow]:
            self._active[resource][flow] = None
            self._mark(resource)

    def stop(self, flow: int) -> None:
        """Take a flow out; nothing changes for the others before `settle`."""
        self._started[flow] = False
        self.rates[flow] = 0.0
        self._moved.pop(flow, None)
        for resource in self._shared[flow]:
            del self._active[resource][flow]
            self._mark(resource)

    def set_capacities(self, capacities: Sequence[float], limits: Mapping[int, float] | None = None) -> None:
        """Change the capacities, and the limits of some flows; their rates change in `settle`. O(flows)."""
        self._capacities = list(capacities)
        for flow, limit in (limits or {}).items():
            self._limits[flow] = limit
        self._forget()
        for flow in range(len(self._uses)):
            self._place(flow)
        for flow, started in enumerate(self._started):
            if started:
                self.start(flow)

    def settle(self) -> list[int]:
        """Bring all rates up to date; return the started flows whose rate is another one now."""
        while self._dirty:
            _, resource = heapq.heappop(self._dirty)
            if self._is_dirty[resource]:
                self._is_dirty[resource] = False
                self._refill(resource)
        if not self._moved:
            return []
        changed = []
        level = self._level
        for flow in self._moved:
            rate = self._bound[flow]
            for resource in self._shared[flow]:
                rate = min(rate, level[resource])
            if rate != self.rates[flow]:
                self.rates[flow] = rate
                changed.append(flow)
        self._moved.clear()
        return changed

    def _forget(self) -> None:
        """Begin to place flows anew."""
        count = len(self._capacities)
        self._users: list[list[int]] = [[] for _ in range(count)]
        self._wanted = [0.0] * count
        """By resource: what its users would take if they were alone."""
        self._is_shared = [False] * count
        """Whether a resource can be too small for its users: the others have no level."""
        self._bound: list[float] = []
        """By flow: what it gets if it is alone."""
        self._shared: list[tuple[int, ...]] = []
        """By flow: those of its resources that have a level."""
        self._active: list[dict[int, None]] = [{} for _ in range(count)]
        """By resource with a level: its started users."""
        self._level = [math.inf] * count
        self._dirty: list[tuple[float, int]] = []
        self._is_dirty = [False] * count

    def _place(self, flow: int) -> None:
        """Tell a flow what it shares, and its resources, which may be shared from now on."""
        uses = self._uses[flow]
        bound = min((self._capacities[resource] for resource in uses), default=0.0)
        bound = min(bound, self._limits[flow])
        self._bound.append(bound)
        self._shared.append(tuple(resource for resource in uses if self._is_shared[resource]))
        for resource in uses:
            users = self._users[resource]
            users.append(flow)
            self._wanted[resource] += bound
            if (
                self._is_shared[resource]
                or len(users) == 1
                or self._wanted[resource] <= self._capacities[resource]
            ):
                continue
            self._is_shared[resource] = True
            for user in users:
                self._shared[user] = (*self._shared[user], resource)
                if self._started[user]:
                    self._active[resource][user] = None
            self._mark(resource)

    def _mark(self, resource: int) -> None:
        if not self._is_dirty[resource]:
            self._is_dirty[resource] = True
            heapq.heappush(self._dirty, (self._level[resource], resource))

    def _refill(self, resource: int) -> None:
        """Work out one level, and mark the resources that must follow."""
        level, bound, shared = self._level, self._bound, self._shared
        active = self._active[resource]
        demands = []
        for flow in active:
            demand = bound[flow]
            for other in shared[flow]:
                if level[other] < demand and other != resource:
                    demand = level[other]
            demands.append(demand)
        before, now = level[resource], _fill(demands, self._capacities[resource])
        if now == before or abs(now - before) <= _SAME * min(now, before):
            return
        level[resource] = now
        lower = min(now, before)
        moved, is_dirty = self._moved, self._is_dirty
        for flow in active:
            if bound[flow] <= lower:
                continue  # neither level, the old one or the new, is what holds it back
            moved[flow] = None
            for other in shared[flow]:
                # What asks for more than a level, before and now, does not move that level.
                if other != resource and lower < level[other] and not is_dirty[other]:
                    self._mark(other)


def _fill(demands: list[float], capacity: float) -> float:
    """Return the level at which demands, none getting more than that, fill a capacity; inf: they cannot."""
    demands.sort()
    left, count = capacity, len(demands)
    for demand in demands:
        if demand * count >= left:
            return left / count
        left -= demand
        count -= 1
    return math.inf


# The agenda of a discrete-event simulation: events in order of time.


class Agenda:
    """Future events in order of time.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: Final[list[tuple[float, int, Callable[..., None], tuple[object, ...]]]] = []
        self._number: Final = itertools.count().__next__

    def at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        """Schedule an event. Events of the same time happen in the order in which they were scheduled."""
        heappush(self._entries, (time, self._number(), action, arguments))

    def next(self) -> None:
        """Run the next event, and advance the time to it."""
        self.now, _, action, arguments = heappop(self._entries)
        action(*arguments)

    def at_rest(self) -> bool:
        """Return whether no event is left at the present time."""
        return not self._entries or self._entries[0][0] > self.now
