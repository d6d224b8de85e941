"""What no round of a job can be faster than, and why, from its status. Pure.

Whoever watches a job computes this: its linear program takes time that the scheduler has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from netstorm.errors import NetStormError
from netstorm.scheduler.status import JobStatus, LinkStatus, NodeView
from netstorm.topology.network import Link, Network, Node, Rank

if TYPE_CHECKING:
    from netstorm.topology.resources import Optimum

__all__ = ["Bound", "RoundBounds", "known_network", "known_optimum"]


_MOST_NODES: Final = 16
"""The optimum of so many takes 0.3 s of a processor, that of 32 seconds."""
_EVERY_S: Final = 10.0
"""Rates change with each measurement, a bound need not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The time that no all-reduce of a job's values takes less than.

    Attributes:
        seconds: for all keys together.
        reason: which nodes and links everything must pass, on one line.
        assumed: links whose rate is not measured; the bound holds if they are as fast as assumed.
        links: links in all.
        took_s: the last round, at the node where it took longest; None: not known.
    """

    seconds: float
    reason: str
    assumed: int
    links: int
    took_s: float | None

    def __str__(self) -> str:
        """Return the bound in words."""
        assumed = f" (rates of {self.assumed} of {self.links} links are assumed)" if self.assumed else ""
        took = ""
        if self.took_s is not None and self.took_s > 0:
            took = (
                f"; the last one took {self.took_s:.3g} s, {min(1.0, self.seconds / self.took_s):.0%} of it"
            )
        return f"no round takes less than {self.seconds:.3g} s: {self.reason}{assumed}{took}"


class RoundBounds:
    """The bound of a job that is watched."""

    def __init__(self) -> None:
        """Begin without one."""
        self._of: object = None
        self._at = 0.0
        self._found: tuple[float, str] | None = None

    def of(self, status: JobStatus) -> Bound | None:
        """Return the bound of a status.

        None: nothing is measured, values are compressed, there are more than 16 nodes, or ranks below others
        are free.
        """
        nodes = _members(status)
        links = _links(status)
        measured = sum(link.measured for link in links)
        ranks = [node.rank for node in nodes]
        compressed = any(node.compression for node in nodes)
        if not status.keys.bytes or compressed or ranks != list(range(len(ranks))):
            return None
        of = (ranks, status.keys.bytes, [(link.source, link.target) for link in links])
        if of != self._of or not self._at <= status.time < self._at + _EVERY_S:
            self._of, self._at = of, status.time
            network = known_network(status)
            self._found = None if network is None else _bound(network, status.keys.bytes)
        if self._found is None:
            return None
        took = [node.round_s for node in nodes if node.round_s is not None]
        return Bound(
            seconds=self._found[0],
            reason=self._found[1],
            assumed=len(links) - measured,
            links=len(links),
            took_s=max(took, default=None),
        )


def known_network(status: JobStatus) -> Network | None:
    """Return what a status knows of the network between a job's members, who are numbered anew.

    None: nothing is measured, some member cannot be reached over what is known, or there are more than 16.
    """
    nodes, links = _members(status), _links(status)
    if not any(link.measured for link in links) or not 1 < len(nodes) <= _MOST_NODES:
        return None
    number = {node.rank: Rank(place) for place, node in enumerate(nodes)}
    network = Network(
        nodes=tuple(
            Node(rank=Rank(place), egress=node.egress, ingress=node.ingress)
            for place, node in enumerate(nodes)
        ),
        links=tuple(
            Link(
                source=number[link.source],
                target=number[link.target],
                rate=link.rate or 1.0,
                latency=link.latency_s or 0.0,
            )
            for link in links
        ),
    )
    return None if network.separated() else network


def _members(status: JobStatus) -> list[NodeView]:
    nodes = [node for node in status.nodes if node.rank is not None and node.state not in {"left", "joining"}]
    return sorted(nodes, key=lambda node: node.rank or 0)


def _links(status: JobStatus) -> list[LinkStatus]:
    """Return the links between members whose rates are known or assumed."""
    members = {node.rank for node in _members(status)}
    none = {(link.source, link.target) for link in status.failed_links} | set(status.routed_pairs)
    return [
        link
        for link in status.links
        if link.rate and {link.source, link.target} <= members and (link.source, link.target) not in none
    ]


def known_optimum(network: Network, nbytes: float) -> Optimum | None:
    """Return the optimum of what is known of a network; None: rates so unequal that it is not found."""
    from netstorm.topology.resources import optimum  # noqa: PLC0415 - a second of SciPy

    try:
        return optimum(network, nbytes)
    except NetStormError:
        return None


def _bound(network: Network, nbytes: int) -> tuple[float, str] | None:
    from netstorm.topology.lower_bound import lower_bound  # noqa: PLC0415 - a second of SciPy

    best = known_optimum(network, nbytes)
    if best is None:
        return None
    found = lower_bound(network, best, [nbytes])  # how values are cut into chunks a status does not say
    reason = found.reason.replace("\n", " ")
    return found.seconds, f"{reason}; {found.worth}" if found.worth else reason
