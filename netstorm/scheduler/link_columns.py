"""A network as columns, one array for each property of its links. Pure.

A job of 512 nodes has 262,000 links. What is worked out of all of them at once is worked out in arrays, since
the scheduler's thread must answer meanwhile. That is done in slices, between which it answers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from netstorm.topology.network import Link, Network, Node, Rank, Routing

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

__all__ = [
    "SLICE",
    "Flags",
    "Floats",
    "LinkColumns",
    "NetworkColumns",
    "PackedLinks",
    "Places",
    "finish",
    "row_slices",
    "slices",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_Result = TypeVar("_Result")

SLICE: Final = 16_384
"""Links that are worked on at once: planning so many anew takes 4 ms."""


def row_slices(size: int) -> Iterator[slice]:
    """Yield which rows of an (N, N) matrix to work on at once; `size`: N."""
    step = max(1, SLICE // size)
    return (slice(first, first + step) for first in range(0, size, step))


def slices(places: Places) -> Iterator[Places]:
    """Yield which of some links to work on at once."""
    return (places[first : first + SLICE] for first in range(0, len(places), SLICE))


def finish(sliced: Generator[None, None, _Result]) -> _Result:
    """Do at once what a generator does in slices."""
    while True:
        try:
            next(sliced)
        except StopIteration as finished:
            result: _Result = finished.value
            return result


class PackedLinks(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`LinkColumns` for a message between two processes of one machine: the arrays' bytes."""

    source: bytes
    target: bytes
    rate: bytes
    latency: bytes
    loss: bytes
    price: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkColumns:
    """Links, sorted by their ends. No array changes."""

    source: Places
    target: Places
    rate: Floats
    """Bit/s."""
    latency: Floats
    """Seconds."""
    loss: Floats
    price: Floats

    @classmethod
    def of(cls, links: Iterable[Link]) -> Self:
        """Return the columns of links."""
        links = tuple(links)
        return cls(
            source=np.fromiter((link.source for link in links), np.int64, len(links)),
            target=np.fromiter((link.target for link in links), np.int64, len(links)),
            rate=np.fromiter((link.rate for link in links), np.float64, len(links)),
            latency=np.fromiter((link.latency for link in links), np.float64, len(links)),
            loss=np.fromiter((link.loss for link in links), np.float64, len(links)),
            price=np.fromiter((link.price for link in links), np.float64, len(links)),
        )

    @classmethod
    def unpack(cls, packed: PackedLinks) -> Self:
        """Return what `pack` has packed."""
        return cls(
            source=np.frombuffer(packed.source, np.int64),
            target=np.frombuffer(packed.target, np.int64),
            rate=np.frombuffer(packed.rate),
            latency=np.frombuffer(packed.latency),
            loss=np.frombuffer(packed.loss),
            price=np.frombuffer(packed.price),
        )

    def pack(self) -> PackedLinks:
        """Return the links for a message."""
        return PackedLinks(
            source=self.source.tobytes(),
            target=self.target.tobytes(),
            rate=self.rate.tobytes(),
            latency=self.latency.tobytes(),
            loss=self.loss.tobytes(),
            price=self.price.tobytes(),
        )

    def __len__(self) -> int:
        return len(self.source)

    def replaced(self, *, rate: Floats, latency: Floats, loss: Floats) -> Self:
        """Return the same links with other properties."""
        return replace(self, rate=rate, latency=latency, loss=loss)

    def chosen(self, which: Flags) -> Self:
        """Return some of the links."""
        return type(self)(
            source=self.source[which],
            target=self.target[which],
            rate=self.rate[which],
            latency=self.latency[which],
            loss=self.loss[which],
            price=self.price[which],
        )

    def links(self) -> tuple[Link, ...]:
        """Return the links."""
        return tuple(
            Link(source=Rank(source), target=Rank(target), rate=rate, latency=latency, loss=loss, price=price)
            for source, target, rate, latency, loss, price in zip(
                self.source.tolist(),
                self.target.tolist(),
                self.rate.tolist(),
                self.latency.tolist(),
                self.loss.tolist(),
                self.price.tolist(),
                strict=True,
            )
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkColumns:
    """A network without changes."""

    nodes: tuple[Node, ...]
    links: LinkColumns
    routing: Routing

    @classmethod
    def of(cls, network: Network) -> Self:
        """Return the columns of a network, without its changes."""
        return cls(nodes=network.nodes, links=LinkColumns.of(network.links), routing=network.routing)

    @cached_property
    def network(self) -> Network:
        """The network; of 512 nodes it takes 2 s of a processor."""
        return Network(nodes=self.nodes, links=self.links.links(), routing=self.routing)

    @cached_property
    def ids(self) -> Places:
        """By link: a number of its pair of ends, ascending."""
        return self.links.source * len(self.nodes) + self.links.target

    def throughputs(self) -> Floats:
        """Return what each pair of an overlay has for itself, (N, N), in bit/s; 0: it has no link."""
        links = self.links
        egress, ingress = (
            np.array([np.inf if cap is None else cap for cap in caps])
            for caps in ([node.egress for node in self.nodes], [node.ingress for node in self.nodes])
        )
        rates = np.zeros((len(self.nodes), len(self.nodes)))
        least = np.minimum(egress[links.source], ingress[links.target])
        rates[links.source, links.target] = np.minimum(links.rate, least)
        return rates
