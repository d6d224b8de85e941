"""A network: nodes, directed links between them, and their changes. Trees are formed from it."""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from netstorm.errors import Unreachable, UsageError
from netstorm.topology.networks.elements import RATE, Change, Link, Node, Rank, shown_ranks
from netstorm.topology.networks.hops import Hops, next_hops, reached_from

__all__ = ["Change", "Link", "Network", "NetworkMismatch", "Node", "Rank", "Routing"]


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
