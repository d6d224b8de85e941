"""By how much a network has moved between two looks at it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from netstorm.errors import Unreachable
from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.topology.networks.network import Link, Network, Rank
from netstorm.units import format_duration, format_rate

__all__ = ["moved", "rates_of"]

_MOVED: Final = 3.0
"""Standard errors by which a link has moved: there are dozens of them."""


def rates_of(network: Network, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return what each (source, target) has for itself, in bit/s; 0 if it has nothing any more."""
    found = {}
    for source, target in pairs:
        try:
            found[source, target] = network.throughput(Rank(source), Rank(target))
        except Unreachable:
            found[source, target] = 0.0
    return found


def moved(
    before: NetworkEstimate, after: NetworkEstimate, rate: float, chunk_bytes: int
) -> tuple[float, str]:
    """Return by how much what has moved most has, as a logarithm, and what to say of it, if any link or
    access line has moved by more than `rate`, a part of it, and more than the errors.
    """
    old = {(link.source, link.target): place for place, link in enumerate(before.network.links)}
    new = {(link.source, link.target): place for place, link in enumerate(after.network.links)}
    gone = sorted(old.keys() - new.keys())
    if gone:
        return math.inf, f"there is no link {gone[0][0]}→{gone[0][1]} any more"
    most, text = 0.0, ""
    for link in after.network.links:
        pair = (link.source, link.target)
        if pair not in old:
            return math.inf, f"there is a link {link} again"
        was = before.network.links[old[pair]]
        # What was only assumed has no error: it is nobody's word.
        doubts = [
            picture.errors[place] if pair in picture.measured else 0.0
            for picture, place in ((before, old[pair]), (after, new[pair]))
        ]
        delays = [8 * chunk_bytes / one.rate + one.latency for one in (was, link)]
        change = abs(math.log(delays[1] / delays[0]))
        if change <= _MOVED * math.hypot(*doubts):
            change = 0.0
        if abs(link.rate - was.rate) > _MOVED * math.hypot(doubts[0] * was.rate, doubts[1] * link.rate):
            change = max(change, abs(math.log(link.rate / was.rate)))
        if change > max(math.log1p(rate), most):
            most, text = change, f"link {link} from {_told(was)} to {_told(link)}"
    for change, line in _moved_lines(before, after):
        if change > max(math.log1p(rate), _MOVED * after.cap_error, most):
            most, text = change, line
    return most, text


def _moved_lines(before: NetworkEstimate, after: NetworkEstimate) -> Iterator[tuple[float, str]]:
    """Yield by how much each access line has moved, as a logarithm, and what to say of it.

    Where there is no cap all links together are the limit: a cap that is no less than these comes and goes
    without a change of anything.
    """
    networks = before.network, after.network
    for word, end in (("egress", "source"), ("ingress", "target")):
        totals = [dict.fromkeys(network.ranks, 0.0) for network in networks]
        for total, network in zip(totals, networks, strict=True):
            for link in network.links:
                total[getattr(link, end)] += link.rate
        for node in after.network.nodes:
            caps = [getattr(network.nodes[node.rank], word) for network in networks]
            if caps == [None, None]:
                continue
            limits = [
                total[node.rank] if cap is None else min(cap, total[node.rank])
                for cap, total in zip(caps, totals, strict=True)
            ]
            shown = ["no limit" if cap is None else format_rate(cap) for cap in caps]
            change = abs(math.log(limits[1] / limits[0])) if all(limits) else 0.0
            yield change, f"{word} of rank {node.rank} from {shown[0]} to {shown[1]}"


def _told(link: Link) -> str:
    return f"{format_rate(link.rate)} and {format_duration(link.latency)}"
