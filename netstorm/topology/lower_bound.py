"""A time that no all-reduce of given tensors takes less than, and its certificate in words.

It is the later of two times, each of which is proved by itself; both count what is sent, headers included.

*Links.* By the dual program of the optimum, each resource has a price, and every bit of a tensor that is
summed costs at least 1, whatever the trees. What crosses a resource has its latency, so in `t` seconds a
resource is of use for no more than `t` less the least latency of a pair that uses it. So all that resources
are of use for, at their prices, must reach the bits of the tensors.

*Way.* Rank b's result depends on what rank a contributes. So of each bit some copy leaves a over one of its
links and goes on to b, and leaves early enough for the rest of the way. What a's links carry until then must
reach the bits of the tensors; so must what b's links carry since the first bit can have come to them. If data
is sent in chunks that are forwarded whole, each further hop takes the time of the smallest chunk, and a link
carries whole chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import sparse

from netstorm.topology.network import Network, Routing
from netstorm.topology.resources import Floats, Optimum, Resources
from netstorm.units import format_duration, format_rate

__all__ = ["PART_HEADER_BYTES", "LowerBound", "latency_bound", "lower_bound"]

PART_HEADER_BYTES: Final = 57
"""Of the smallest `protocol.messages.Part` of float32: on no hop a chunk's header is smaller."""

_BISECTIONS: Final = 50

_CLEARLY: Final = 1.0001
"""Of equals the links' certificate is given; their optimum is this exact."""

_NO_TIME: Final = 1e-9

_NOTHING: Final = 0.0005
"""What is shown as 0.0 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """A time that no all-reduce takes less than."""

    seconds: float
    reason: str
    """Why, on a line or two; empty: there is only one node."""
    worth: str
    """What more of the dearest resource is worth, on one line; empty: it is not known, or nothing."""

    def certificate(self) -> str:
        """Return the bound and its reason in words, on one line; empty: there is only one node."""
        return self.text().replace("\n", " ")

    def text(self) -> str:
        """Return the same on several lines."""
        worth = f";\n{self.worth}" if self.worth else ""
        return f"no round takes less than {self.seconds:.3g} s:\n{self.reason}{worth}" if self.reason else ""


def lower_bound(
    network: Network,
    best: Optimum,
    tensors: Sequence[int],
    *,
    chunk_bytes: int = 0,
    header_bytes: int = 0,
    payload_share: float = 1.0,
) -> LowerBound:
    """Return the bound of an all-reduce of `tensors`, on a network as it is at its start.

    Args:
        network: links, routes and access caps.
        best: the optimum of this network, for any bytes.
        tensors: bytes of each.
        chunk_bytes: of a full chunk, if data is sent in chunks that are forwarded whole; 0: it need not be.
        header_bytes: of each chunk, at least.
        payload_share: of what links carry, at most, that is not the transport's own.
    """
    chunks = sum(-(-size // chunk_bytes) for size in tensors) if chunk_bytes else 0
    bits = 8 * (sum(tensors) + header_bytes * chunks) / payload_share
    by_links = best.with_latencies(bits / best.rate)
    way = _longest_way(network, bits, _wire_chunks(tensors, chunk_bytes, header_bytes, payload_share))
    if way is None:
        return LowerBound(seconds=0.0, reason="", worth="")
    if way.seconds > by_links * _CLEARLY:
        return LowerBound(seconds=way.seconds, reason=way.reason(), worth=way.worth())
    most = best.prices[0]
    return LowerBound(
        seconds=max(by_links, way.seconds),
        reason=best.reason(),
        worth=f"a tenth more of {most.name} is worth at most {most.share / 10:.1%} of that time",
    )


def latency_bound(network: Network, nbytes: float) -> float:
    """Return seconds that no all-reduce of a tensor can take less than, by the ways between all ranks: the
    higher bound for small tensors. See the module; without headers and chunks.
    """
    way = _longest_way(network, 8 * nbytes, None)
    return 0.0 if way is None else way.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What rank `a` contributes to rank `b`'s result."""

    seconds: float
    a: int
    b: int
    outwards: bool
    """The links out of `a` are the limit; else those into `b`."""
    rate: float
    """bit/s of these links together."""
    latency: float
    """Least seconds from `a` to `b`."""
    sending_s: float
    """Of the seconds, so many go with the rate."""
    dearest: str
    """The fastest of the links, or the access line if that is the limit."""
    dearest_share: float
    """Of the rate."""

    def reason(self) -> str:
        over = f"leave it ({format_rate(self.rate)})" if self.outwards else f"enter rank {self.b}"
        onwards = f"reach rank {self.b}" if self.outwards else f"({format_rate(self.rate)})"
        joint = "\nand " if self.outwards else " "
        away = f", which is at least {format_duration(self.latency)} away" if self.latency > _NO_TIME else ""
        return f"all that rank {self.a} contributes must {over}{joint}{onwards}{away}"

    def worth(self) -> str:
        """Return what a tenth more of the dearest link is worth; empty: nothing that is shown."""
        more = 0.1 * self.dearest_share
        share = more / (1 + more) * self.sending_s / self.seconds if self.seconds else 0.0
        return (
            f"a tenth more of {self.dearest} is worth at most {share:.1%} of that time"
            if share > _NOTHING
            else ""
        )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Bits on the wire."""

    full: float
    full_count: int
    least: float
    """Of the smallest chunk."""


def _wire_chunks(tensors: Sequence[int], size: int, header: int, payload_share: float) -> _Chunks | None:
    if not size or not any(tensors):
        return None
    least = min(size if one % size == 0 else one % size for one in tensors if one)
    return _Chunks(
        full=8 * (size + header) / payload_share,
        full_count=sum(one // size for one in tensors),
        least=8 * (least + header) / payload_share,
    )


def _longest_way(network: Network, bits: float, chunks: _Chunks | None) -> _Way | None:
    """Return the way that takes longest; None: there is only one node."""
    from scipy.sparse import csgraph  # noqa: PLC0415 - as in `resources`

    size = network.size
    if size == 1:
        return None
    resources = Resources.of(network)
    useful = resources.useful
    pairs = np.array(resources.pairs)[useful]
    rates = resources.pair_capacities[useful]
    latencies = np.array([network.link(*resources.pairs[place]).latency for place in useful])
    whole = chunks is not None and network.routing is Routing.OVERLAY  # routers forward packets, not chunks
    hops = latencies + (chunks.least / rates if chunks is not None and whole else 0.0)
    ends = (pairs[:, 0], pairs[:, 1])
    # csgraph takes a stored zero for no edge.
    plain, way = (
        csgraph.shortest_path(sparse.csr_array((cost + 1e-12, ends), shape=(size, size)))
        for cost in (latencies, hops)
    )
    longest: _Way | None = None
    for node, outwards in itertools.product(network.nodes, (True, False)):
        rank, cap = int(node.rank), node.egress if outwards else node.ingress
        mine = np.flatnonzero(ends[0 if outwards else 1] == rank)
        others = ends[1 if outwards else 0][mine]
        # (links, ranks): what is left of the way to each rank, or from it, once a bit is through the link.
        lost = latencies[mine, None] + (way[others] if outwards else way[:, others].T)
        found = _fluid(bits, rates[mine], lost, cap)
        if chunks is not None and chunks.full_count:
            found = np.maximum(found, _whole_chunks(chunks, rates[mine], lost))
        found[rank] = -1.0
        other = int(found.argmax())
        if longest is not None and found[other] <= longest.seconds:
            continue
        a, b = (rank, other) if outwards else (other, rank)
        total, fastest = float(rates[mine].sum()), int(rates[mine].argmax())
        is_line = cap is not None and cap < total
        link = f"{pairs[mine[fastest]][0]}→{pairs[mine[fastest]][1]}"
        longest = _Way(
            seconds=float(found[other]),
            a=a,
            b=b,
            outwards=outwards,
            rate=cap if is_line and cap is not None else total,
            dearest=f"{'egress' if outwards else 'ingress'} of rank {rank}" if is_line else link,
            dearest_share=1.0 if is_line else float(rates[mine][fastest]) / total,
            latency=float(plain[a, b]),
            sending_s=float(found[other] - lost[:, other].min()),
        )
    return longest


def _fluid(bits: float, rates: Floats, lost: Floats, cap: float | None) -> Floats:
    """Return by rank the time t in which links carry `bits`, if each can be used for t less what is lost."""
    order = np.argsort(lost, axis=0, kind="stable")
    sorted_lost = np.take_along_axis(lost, order, axis=0)
    carried = np.cumsum(rates[order], axis=0)
    missed = np.cumsum(rates[order] * sorted_lost, axis=0)
    found: Floats = ((bits + missed) / carried).min(axis=0)
    return found if cap is None else np.maximum(found, bits / cap + sorted_lost[0])


def _whole_chunks(chunks: _Chunks, rates: Floats, lost: Floats) -> Floats:
    """Return by rank a time that is too short for all full chunks, if each goes over one of the links."""
    low: Floats = lost.min(axis=0)
    high: Floats = low + chunks.full * chunks.full_count / rates.max() + lost.max(axis=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        counts: npt.NDArray[np.float64] = np.floor(
            np.maximum(middle - lost, 0) * rates[:, None] / chunks.full
        )
        enough = counts.sum(axis=0) >= chunks.full_count
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low
