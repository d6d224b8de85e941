"""A network file from what a job has measured: the network as it was, with its changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from netstorm.errors import UsageError
from netstorm.scheduler.status import JobStatus, NodeView
from netstorm.topology.network import Change, Link, Network, Node, Rank
from netstorm.units import rounded

__all__ = ["recorded_network"]


_CHANGED: Final = 0.15
"""A rate that differs by less is the same, measured again."""

_LATENCY_CHANGED: Final = 0.3
"""The same for latencies, whose noise is larger: queues are in them."""

_LEAST_LATENCY_S: Final = 1e-3
"""Latencies that differ by less are the same."""


def recorded_network(statuses: Iterable[JobStatus]) -> Network:
    """Return the network that a job's statuses show; changes are in seconds since the first one.

    Links that were never measured are left out, and what is planned for access lines is as in the last
    status.

    Args:
        statuses: of one job, in order.

    Raises:
        UsageError: there are none, none has a measured link, ranks are missing, or measured links do not
            connect them.
    """
    begin: float | None = None
    nodes: dict[int, NodeView] = {}
    first: dict[tuple[int, int], tuple[float, float]] = {}
    now: dict[tuple[int, int], tuple[float, float]] = {}
    changes: list[Change] = []
    for status in statuses:
        begin = status.time if begin is None else begin
        nodes |= {node.rank: node for node in status.nodes if node.rank is not None}
        for link in status.links:
            if not link.measured or not link.rate:
                continue
            ends = (link.source, link.target)
            found = (rounded(link.rate), round(link.latency_s or 0.0, 6))
            if ends not in first:
                first[ends] = now[ends] = found
            elif status.time > begin and _differs(found, now[ends]):
                now[ends] = found
                changes.append(
                    Change(
                        at=round(status.time - begin, 1),
                        source=Rank(link.source),
                        target=Rank(link.target),
                        rate=found[0],
                        latency=found[1],
                    )
                )
    if begin is None:
        raise UsageError("no status of a job: there is nothing to make a network of")
    if not first:
        raise UsageError(
            "no link of this job has been measured yet: links are measured by the sums that cross them"
        )
    size = 1 + max(max(ends) for ends in first)
    missing = [rank for rank in range(size) if rank not in nodes]
    if missing:
        raise UsageError(f"ranks {missing} have links and are not among the nodes: the recording is damaged")
    network = Network(
        nodes=tuple(
            Node(
                rank=Rank(rank),
                site=nodes[rank].site,
                egress=rounded(nodes[rank].egress),
                ingress=rounded(nodes[rank].ingress),
            )
            for rank in range(size)
        ),
        links=tuple(
            Link(source=Rank(source), target=Rank(target), rate=rate, latency=latency)
            for (source, target), (rate, latency) in sorted(first.items())
        ),
        changes=tuple(changes),
    )
    parts = network.separated()
    if parts is not None:
        raise UsageError(
            f"of the links that were measured, none leads from ranks {list(parts[0])} to ranks "
            f"{list(parts[1])}: record for longer, while the job trains"
        )
    return network


def _differs(found: tuple[float, float], before: tuple[float, float]) -> bool:
    rate, latency = abs(found[0] - before[0]), abs(found[1] - before[1])
    return rate > _CHANGED * before[0] or latency > max(_LEAST_LATENCY_S, _LATENCY_CHANGED * before[1])
