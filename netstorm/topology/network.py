"""A network: nodes, directed links between them, and their changes. Trees are formed from it."""

from __future__ import annotations

import enum
import itertools
import math
import random
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NewType, TypeAlias

from netstorm.errors import Unreachable, UsageError

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "FAMILIES",
    "LATENCY",
    "LOSS",
    "RATE",
    "TIME",
    "Bounds",
    "Change",
    "Link",
    "Network",
    "NetworkMismatch",
    "Node",
    "Rank",
    "Routing",
    "changed_link",
    "checked_site",
    "generate",
    "next_hops",
    "shown_ranks",
]


class Routing(enum.Enum):
    """Which pairs of nodes may communicate."""

    OVERLAY = "overlay"
    """Only linked pairs."""
    UNDERLAY = "underlay"
    """All pairs, over the fewest hops; pairs share the links of their routes."""


class NetworkMismatch(UsageError):
    """A node, link or change that does not fit the rest of its network."""

    def __init__(self, item: Node | Link | Change, message: str) -> None:
        super().__init__(message)
        self.item: Final = item
        """The object that was given, by which a file reader can find its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes 0..n-1, directed links between them, and changes by time since the start.

    It may be disconnected, since links fail: `separated` tells, and what needs a path raises `Unreachable`.
    Links are sorted by their ends, changes by time: networks are equal whatever order they came in.

    Raises:
        NetworkMismatch: nodes that are not 0..n-1 in order; two links, or none, where there must be one; two
            changes
            of a link at the same time.
    """

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    routing: Routing = Routing.OVERLAY
    changes: tuple[Change, ...] = ()
    _direct: dict[tuple[int, int], Link] = field(init=False, repr=False, compare=False)
    _linked: tuple[tuple[Rank, ...], ...] = field(init=False, repr=False, compare=False)
    _hops: Hops = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise UsageError("a network without nodes: expected at least one")
        direct = _index(self.nodes, self.links)
        changes = _in_time(self.changes, direct)
        targets: list[list[Rank]] = [[] for _ in self.nodes]
        for link in direct.values():
            targets[link.source].append(link.target)
        linked = tuple(map(tuple, targets))
        object.__setattr__(self, "links", tuple(direct.values()))
        object.__setattr__(self, "changes", changes)
        object.__setattr__(self, "_direct", direct)
        object.__setattr__(self, "_linked", linked)
        object.__setattr__(self, "_hops", next_hops(linked) if self.routing is Routing.UNDERLAY else ())

    @classmethod
    def uniform(cls, size: int, *, rate: float = 100e6, latency: float = 0.0) -> Network:
        """Return a full mesh of equal links, the assumption without a network file. Rate in bit/s."""
        ranks = [Rank(rank) for rank in range(size)]
        return cls(
            nodes=tuple(Node(rank=rank) for rank in ranks),
            links=tuple(
                Link(source=source, target=target, rate=rate, latency=latency)
                for source in ranks
                for target in ranks
                if source != target
            ),
        )

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, in order."""
        return tuple(node.rank for node in self.nodes)

    def neighbours(self, rank: Rank) -> tuple[Rank, ...]:
        """Return the ranks that `rank` may send to directly, in order."""
        if self.routing is Routing.OVERLAY:
            return self._linked[rank]
        return tuple(target for target in self.ranks if self._hops[target][rank] >= 0)

    def pairs(self) -> tuple[tuple[Rank, Rank], ...]:
        """Return all (source, target) that may communicate directly."""
        return tuple((source, target) for source in self.ranks for target in self.neighbours(source))

    def linked_pairs(self) -> tuple[tuple[Rank, Rank], ...]:
        """Return all (source, target) that a link joins."""
        return tuple((link.source, link.target) for link in self.links)

    def graph(self) -> nx.DiGraph[Rank]:
        """Return the links as a networkx graph: nodes have `site`, `egress` and `ingress`; edges have `rate`,
        `latency` and `loss`. It may be changed; the network stays as it is.
        """
        import networkx as nx  # noqa: PLC0415 - 0.2 s of a processor, which few processes need

        graph: nx.DiGraph[Rank] = nx.DiGraph()
        for node in self.nodes:
            graph.add_node(node.rank, site=node.site, egress=node.egress, ingress=node.ingress)
        for link in self.links:
            graph.add_edge(link.source, link.target, rate=link.rate, latency=link.latency, loss=link.loss)
        return graph

    def route(self, source: Rank, target: Rank) -> tuple[Link, ...]:
        """Return the links that data from `source` to `target` passes: one in an overlay.

        Raises:
            Unreachable: the two may not communicate, or have no path.
        """
        if self.routing is Routing.OVERLAY:
            link = self._direct.get((source, target))
            if link is None:
                raise Unreachable(
                    f"rank {source} has no link to rank {target}, only to {shown_ranks(self._linked[source])}"
                )
            return (link,)
        return tuple(self._walk(source, target))

    def _walk(self, source: Rank, target: Rank) -> Iterator[Link]:
        here = source
        while here != target:
            there = Rank(self._hops[target][here])
            if there < 0:
                raise Unreachable(f"there is no path from rank {source} to rank {target}")
            yield self._direct[here, there]
            here = there

    def link(self, source: Rank, target: Rank) -> Link:
        """Return the path from `source` to `target` as one link: least rate, total latency and total loss.

        In an overlay this is the link itself. Access caps are not in it (`throughput` has them).

        Raises:
            Unreachable: the two may not communicate, or have no path.
        """
        route = self.route(source, target)
        if len(route) == 1:
            return route[0]
        if not route:
            raise UsageError(f"rank {source} needs no link to itself")
        return Link(
            source=source,
            target=target,
            rate=min(link.rate for link in route),
            latency=sum(link.latency for link in route),
            loss=1.0 - math.prod(1.0 - link.loss for link in route),
        )

    def throughput(self, source: Rank, target: Rank) -> float:
        """Return the bit/s from `source` to `target` while nothing else is sent: route and access caps.

        Raises:
            Unreachable: the two may not communicate, or have no path.
        """
        caps = (self.nodes[source].egress, self.nodes[target].ingress)
        return min([self.link(source, target).rate, *(cap for cap in caps if cap is not None)])

    def at(self, time: float) -> Network:
        """Return the network `time` seconds after the start; later changes are still ahead of it."""
        links = dict(self._direct)
        for change in self.changes:
            if change.at <= time:
                links[change.source, change.target] = change.apply(links[change.source, change.target])
        return replace(
            self,
            links=tuple(links.values()),
            changes=tuple(change for change in self.changes if change.at > time),
        )

    def scaled(self, share: float) -> Network:
        """Return the network with each rate and cap multiplied by `share`."""

        def part(rate: float | None) -> float | None:
            return None if rate is None else max(share * rate, RATE.least)

        return replace(
            self,
            nodes=tuple(
                replace(node, egress=part(node.egress), ingress=part(node.ingress)) for node in self.nodes
            ),
            links=tuple(replace(link, rate=max(share * link.rate, RATE.least)) for link in self.links),
            changes=tuple(replace(change, rate=part(change.rate)) for change in self.changes),
        )

    def separated(self) -> tuple[tuple[Rank, ...], tuple[Rank, ...]] | None:
        """Return (A, B), together all ranks, if no rank of A has a path to one of B; else None."""
        backwards: list[list[Rank]] = [[] for _ in self.nodes]
        for source, target in self._direct:
            backwards[target].append(Rank(source))
        reached = reached_from(0, self._linked)
        if len(reached) < self.size:
            return self._split(reached)
        reaching = reached_from(0, backwards)
        if len(reaching) < self.size:
            there, cut_off = self._split(reaching)
            return cut_off, there
        return None

    def _split(self, inside: set[int]) -> tuple[tuple[Rank, ...], tuple[Rank, ...]]:
        return (
            tuple(rank for rank in self.ranks if rank in inside),
            tuple(rank for rank in self.ranks if rank not in inside),
        )


def _index(nodes: tuple[Node, ...], links: Iterable[Link]) -> dict[tuple[int, int], Link]:
    """Return the links by their ends, in order, having checked that they fit the nodes."""
    size = len(nodes)
    for place, node in enumerate(nodes):
        if node.rank != place:
            raise NetworkMismatch(
                node, f"rank {node.rank}: expected {place}, since ranks are 0 to {size - 1} without gaps"
            )
    direct: dict[tuple[int, int], Link] = {}
    for link in links:
        for rank in (link.source, link.target):
            if not 0 <= rank < size:
                raise NetworkMismatch(
                    link, f"link {link}: there is no rank {rank}; ranks are 0 to {size - 1}"
                )
        if (link.source, link.target) in direct:
            raise NetworkMismatch(link, f"link {link} is given twice")
        direct[link.source, link.target] = link
    return dict(sorted(direct.items()))


def _in_time(changes: Iterable[Change], direct: Container[tuple[int, int]]) -> tuple[Change, ...]:
    """Return the changes in order, having checked that they fit the links."""
    ordered: dict[tuple[float, int, int], Change] = {}
    for change in changes:
        if (change.source, change.target) not in direct:
            raise NetworkMismatch(change, f"a change of link {change}, which does not exist")
        when = (change.at, change.source, change.target)
        if when in ordered:
            raise NetworkMismatch(change, f"link {change} is changed twice at {change.at}s")
        ordered[when] = change
    return tuple(change for _, change in sorted(ordered.items()))


# The elements of a network: nodes, directed links, and changes of links by time.

Rank = NewType("Rank", int)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a quantity, and its text in error messages."""

    least: float
    most: float
    words: str

    def allow(self, value: float) -> bool:
        """Return whether `value` is within the bounds (NaN is not)."""
        return self.least <= value <= self.most

    def require(self, value: float | None, what: str) -> None:
        """Raise `UsageError` if a value is given that is out of bounds."""
        if value is not None and not self.allow(value):
            raise UsageError(f"{what} is {value!r}: expected {self.words}")


RATE: Final = Bounds(1.0, 1e15, "more than 0: from 1bit/s to 1000Tbit/s")
LATENCY: Final = Bounds(0.0, 3600.0, "from 0s to 1h")
LOSS: Final = Bounds(0.0, math.nextafter(1.0, 0.0), "at least 0% and less than 100%")
PRICE: Final = Bounds(0.0, 1e6, "money for a GB, from 0 to 1e6")
TIME: Final = Bounds(0.0, 1e9, "from 0s to 1e9s")
LATITUDE: Final = Bounds(-90.0, 90.0, "degrees north, from -90 to 90")
LONGITUDE: Final = Bounds(-180.0, 180.0, "degrees east, from -180 to 180")

_SITE: Final = re.compile(r"[^\s,;/]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A general node, the caps of its access link in bit/s (None: not capped), and where it is, for maps.

    `lat` and `lon` are degrees north and east; both are None where nobody knows.
    """

    rank: Rank
    site: str = ""
    egress: float | None = None
    ingress: float | None = None
    lat: float | None = None
    lon: float | None = None

    def __post_init__(self) -> None:
        checked_site(self.site)
        RATE.require(self.egress, f"egress of rank {self.rank}")
        RATE.require(self.ingress, f"ingress of rank {self.rank}")
        LATITUDE.require(self.lat, f"lat of rank {self.rank}")
        LONGITUDE.require(self.lon, f"lon of rank {self.rank}")
        if (self.lat is None) != (self.lon is None):
            raise UsageError(
                f"rank {self.rank} has lat {self.lat} and lon {self.lon}: expected both or neither"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a link: rate in bit/s, latency in s, loss as a fraction of packets, and what 10⁹ bytes
    over it cost, in any currency.
    """

    source: Rank
    target: Rank
    rate: float
    latency: float = 0.0
    loss: float = 0.0
    price: float = 0.0

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise UsageError(f"link {self}: a link joins two different ranks")
        if (
            RATE.allow(self.rate)
            and LATENCY.allow(self.latency)
            and LOSS.allow(self.loss)
            and PRICE.allow(self.price)
        ):
            return  # names in messages take longer than all checks, and 512 nodes have 262 000 links
        RATE.require(self.rate, f"rate of link {self}")
        LATENCY.require(self.latency, f"latency of link {self}")
        LOSS.require(self.loss, f"loss of link {self}")
        PRICE.require(self.price, f"price of link {self}")

    def __str__(self) -> str:
        """Return the link as error messages name it."""
        return f"{self.source}→{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From `at` seconds after the start on, a link has these values (None: as before)."""

    at: float
    source: Rank
    target: Rank
    rate: float | None = None
    latency: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        TIME.require(self.at, f"time of the change of link {self}")
        RATE.require(self.rate, f"new rate of link {self}")
        LATENCY.require(self.latency, f"new latency of link {self}")
        LOSS.require(self.loss, f"new loss of link {self}")
        if self.rate is None and self.latency is None and self.loss is None:
            raise UsageError(f"a change of link {self} to nothing: expected a new rate, latency or loss")

    def __str__(self) -> str:
        """Return the link that changes, as error messages name it."""
        return f"{self.source}→{self.target}"

    def apply(self, link: Link) -> Link:
        """Return `link` after this change."""
        return replace(
            link,
            rate=link.rate if self.rate is None else self.rate,
            latency=link.latency if self.latency is None else self.latency,
            loss=link.loss if self.loss is None else self.loss,
        )


def changed_link(link: Link, values: Mapping[str, float]) -> Link:
    """Return `link` with new values: any of rate (bit/s), latency (s) and loss (a fraction).

    Raises:
        UsageError: a value that no link may have.
    """
    return replace(
        link,
        rate=values.get("rate", link.rate),
        latency=values.get("latency", link.latency),
        loss=values.get("loss", link.loss),
    )


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text for messages, shortened if it is long."""
    shown = ", ".join(str(rank) for rank in ranks[:12])
    more = f" and {len(ranks) - 12} more" if len(ranks) > 12 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def checked_site(site: str) -> str:
    """Return `site` if it is the name of a site.

    Raises:
        UsageError: it is too long, or has characters that no name has.
    """
    if not _SITE.fullmatch(site) or not site.isprintable():
        shown = repr(site if len(site) <= 64 else site[:61] + "...")
        raise UsageError(
            f"site {shown}: expected a name of at most 64 letters, without spaces, commas, ; and /"
        )
    return site


# Paths by number of hops, on bare adjacency.

Hops: TypeAlias = tuple[tuple[int, ...], ...]
"""By target, then by node: the next node on the way (-1: there is no way, or it is the target itself)."""


def reached_from(start: int, targets: Sequence[Sequence[int]]) -> set[int]:
    """Return `start` and all nodes with a path from it; `targets` gives each node's links."""
    reached = {start}
    frontier = [start]
    while frontier:
        for target in targets[frontier.pop()]:
            if target not in reached:
                reached.add(target)
                frontier.append(target)
    return reached


def next_hops(targets: Sequence[Sequence[int]]) -> Hops:
    """Return the next node on the way with the fewest hops, between all pairs; the lowest rank among equals.

    It depends on the target alone, as in IP routing: what joins a route stays on it. O(N·E).
    """
    sources: list[list[int]] = [[] for _ in targets]
    for source, ends in enumerate(targets):
        for target in ends:
            sources[target].append(source)
    return tuple(_towards(target, targets, sources) for target in range(len(targets)))


def _towards(
    target: int, targets: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    away = {target: 0}
    queue = deque([target])
    while queue:
        node = queue.popleft()
        for source in sources[node]:
            if source not in away:
                away[source] = away[node] + 1
                queue.append(source)
    nearer = (
        [end for end in ends if away.get(end, -1) == away.get(node, -1) - 1 >= 0]
        for node, ends in enumerate(targets)
    )
    return tuple(min(ends, default=-1) for ends in nearer)


# Random networks of several families, for studies: the same seed gives the same network everywhere.
#
# Rates are uniform in 20 to 155 Mbit/s, as in the NetStorm paper's test-bed [1]_; latencies in 15 to 75 ms
# one way, the round trips of 30 to 150 ms between regions.
#
# References:
#     .. [1] Li et al., arXiv 2404.11352, §IX-A.

_RATES: Final = (20e6, 155e6)
_LATENCIES: Final = (0.015, 0.075)
_ACCESS: Final = (60e6, 250e6)
"""Below what a node's links add up to from three nodes on, as access lines are."""

_INTERNET2: Final = (
    *((0, 1), (1, 2), (0, 3), (1, 3), (2, 5), (3, 4), (4, 5), (4, 6), (5, 7), (6, 7), (6, 8), (7, 8)),
    *((0, 6), (2, 3)),
)
"""The paper's nine nodes and 14 links, as `examples/networks/internet2.yaml` has them."""

_LINKS_A_NODE: Final = len(_INTERNET2) / 9


def generate(family: str, nodes: int, seed: int) -> Network:
    """Return a random network.

    Args:
        family: a name in `FAMILIES`.
        nodes: how many.
        seed: equal seeds give equal networks.

    Raises:
        UsageError: an unknown family, or fewer than two nodes.
    """
    make = FAMILIES.get(family)
    if make is None:
        raise UsageError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    if nodes < 2:
        raise UsageError(f"{nodes} nodes: expected at least 2")
    return make(nodes, seed)


def mesh(nodes: int, seed: int) -> Network:
    """Return a full mesh of links of their own, equal in both directions."""
    return _network(nodes, itertools.combinations(range(nodes), 2), random.Random(seed))


def asymmetric(nodes: int, seed: int) -> Network:
    """Return a full mesh whose links have rates of their own in each direction."""
    return _network(nodes, itertools.combinations(range(nodes), 2), random.Random(seed), symmetric=False)


def internet2(nodes: int, seed: int) -> Network:
    """Return a sparse network of routers that are also nodes; all pairs may talk, over the fewest hops.

    With nine nodes the paper's; else nodes in a square, joined to their nearest ones, as many links a node.
    """
    draw = random.Random(seed)
    edges = _INTERNET2 if nodes == 9 else _near(nodes, draw)
    return _network(nodes, edges, draw, routing=Routing.UNDERLAY)


def cloud(nodes: int, seed: int) -> Network:
    """Return a full mesh between nodes whose access lines are slower than their links together."""
    draw = random.Random(seed)
    caps = [draw.uniform(*_ACCESS) for _ in range(nodes)]
    return _network(nodes, itertools.combinations(range(nodes), 2), draw, caps=caps)


FAMILIES: Final[Mapping[str, Callable[[int, int], Network]]] = {
    "mesh": mesh,
    "internet2": internet2,
    "cloud": cloud,
    "asymmetric": asymmetric,
}


def _network(
    nodes: int,
    edges: itertools.combinations[tuple[int, int]] | tuple[tuple[int, int], ...],
    draw: random.Random,
    *,
    symmetric: bool = True,
    routing: Routing = Routing.OVERLAY,
    caps: list[float] | None = None,
) -> Network:
    links = []
    for one, other in edges:
        rate, latency = draw.uniform(*_RATES), draw.uniform(*_LATENCIES)
        back = rate if symmetric else draw.uniform(*_RATES)
        links.append(Link(source=Rank(one), target=Rank(other), rate=rate, latency=latency))
        links.append(Link(source=Rank(other), target=Rank(one), rate=back, latency=latency))
    return Network(
        nodes=tuple(
            Node(rank=Rank(rank), egress=cap, ingress=cap) for rank, cap in enumerate(caps or [None] * nodes)
        ),
        links=tuple(links),
        routing=routing,
    )


def _near(nodes: int, draw: random.Random) -> tuple[tuple[int, int], ...]:
    """Return a connected graph of short edges: a minimum spanning tree, and the shortest others."""
    places = [(draw.random(), draw.random()) for _ in range(nodes)]
    lengths = sorted(
        (math.dist(places[one], places[other]), one, other)
        for one, other in itertools.combinations(range(nodes), 2)
    )
    part = list(range(nodes))
    edges: set[tuple[int, int]] = set()
    for _, one, other in lengths:
        if part[one] != part[other]:
            edges.add((one, other))
            part = [part[one] if at == part[other] else at for at in part]
    for _, one, other in lengths:
        if len(edges) >= round(_LINKS_A_NODE * nodes):
            break
        edges.add((one, other))
    return tuple(sorted(edges))
