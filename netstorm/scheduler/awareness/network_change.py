"""By how much a network has changed between two estimates of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from netstorm.errors import Unreachable
from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.topology.network import Link, Network, Rank
from netstorm.units import format_duration, format_rate

__all__ = ["largest_change", "throughputs"]

_SIGNIFICANT: Final = 3.0
"""Standard errors by which a link must change: there are dozens of links, and noise alone must change no
policy (docs/measurements/awareness.md, "Noise changes no policy").
"""


def throughputs(network: Network, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return what each (source, target) pair has for itself, in bit/s; 0: it has no connection any more."""
    found = {}
    for source, target in pairs:
        try:
            found[source, target] = network.throughput(Rank(source), Rank(target))
        except Unreachable:
            found[source, target] = 0.0
    return found


def largest_change(
    before: NetworkEstimate, after: NetworkEstimate, rate: float, chunk_bytes: int
) -> tuple[float, str]:
    """Return the largest change of a link or access line, as a logarithm, and its description.

    Changes count that exceed the fraction `rate` and the errors of both estimates; (0, ""): there is none.
    """
    old = {(link.source, link.target): place for place, link in enumerate(before.network.links)}
    new = {(link.source, link.target): place for place, link in enumerate(after.network.links)}
    gone = sorted(old.keys() - new.keys())
    if gone:
        return math.inf, f"link {gone[0][0]}→{gone[0][1]} is gone"
    most, text = 0.0, ""
    for link in after.network.links:
        pair = (link.source, link.target)
        if pair not in old:
            return math.inf, f"link {link} is back"
        was = before.network.links[old[pair]]
        # An assumption has no error of measurement.
        errors = [
            estimate.errors[place] if pair in estimate.measured else 0.0
            for estimate, place in ((before, old[pair]), (after, new[pair]))
        ]
        delays = [8 * chunk_bytes / state.rate + state.latency for state in (was, link)]
        change = abs(math.log(delays[1] / delays[0]))
        if change <= _SIGNIFICANT * math.hypot(*errors):
            change = 0.0
        if abs(link.rate - was.rate) > _SIGNIFICANT * math.hypot(errors[0] * was.rate, errors[1] * link.rate):
            change = max(change, abs(math.log(link.rate / was.rate)))
        if change > max(math.log1p(rate), most):
            most, text = change, f"link {link} from {_described(was)} to {_described(link)}"
    for change, line in _line_changes(before, after):
        if change > max(math.log1p(rate), _SIGNIFICANT * after.cap_error, most):
            most, text = change, line
    return most, text


def _line_changes(before: NetworkEstimate, after: NetworkEstimate) -> Iterator[tuple[float, str]]:
    """Yield the change of each access line, as a logarithm, and its description.

    Without a cap, all links together are the limit: a cap that is no less than these appears and vanishes
    while nothing changes.
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


def _described(link: Link) -> str:
    return f"{format_rate(link.rate)} and {format_duration(link.latency)}"
