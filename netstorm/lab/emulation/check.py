"""Measures an emulated network, and compares it with its network file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from netstorm import clock
from netstorm.emulation.meter import Latencies, Throughput, measure_latencies, measure_throughput
from netstorm.emulation.wan import LinkStatus, Wan
from netstorm.topology.network import Rank

__all__ = ["ALONE", "RTT_WITHIN_S", "TOGETHER", "LinkCheck", "check"]

ALONE: Final = 0.03
"""Allowed relative error of a rate while one link at a time is loaded."""
TOGETHER: Final = 0.10
"""The same while all links are loaded both ways: each direction also carries acknowledgements."""
RTT_WITHIN_S: Final = 0.001
_STREAMS_ALONE: Final = 3
_SIGMAS: Final = 4.0
"""Standard deviations from which a number of losses is implausible: about 1 case in 16 000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCheck:
    """One direction of a link: the values of the network file, and the measured ones."""

    source: Rank
    target: Rank
    rate: float
    """Bit/s on the wire, as the file says, limited by the access caps."""
    measured_rate: float
    """The same, computed from the goodput of TCP: bytes that arrived, with their headers and frames."""
    goodput: float
    """Bit/s of the data that arrived."""
    latency: float
    """Seconds, one way."""
    measured_latency: float
    round_trip: float
    """Of both directions, in seconds."""
    measured_round_trip: float
    loss: float
    """Fraction of segments, as the file says."""
    measured_loss: float
    """Fraction of segments that TCP retransmitted, without those that the full queue dropped."""
    segments: int
    """Segments sent: the sample size of the loss."""
    allowed: float
    """Allowed relative error of the rate."""
    relay_cpu: float
    """Cores that the relays used during the measurement."""

    @property
    def rate_error(self) -> float:
        """The measured rate over the true one, less 1."""
        return self.measured_rate / self.rate - 1

    @property
    def round_trip_error(self) -> float:
        """Measured round trip less the true one, in seconds."""
        return self.measured_round_trip - self.round_trip

    @property
    def loss_is_plausible(self) -> bool:
        """Whether this number of losses is plausible for the fraction; some retransmissions are spurious."""
        expected = self.loss * self.segments
        off = abs(self.measured_loss * self.segments - expected)
        return off <= _SIGMAS * math.sqrt(expected) + 2 + 0.0005 * self.segments

    @property
    def out_of_tolerance(self) -> tuple[str, ...]:
        """The values that are out of tolerance: any of rate, round trip and loss."""
        return tuple(
            name
            for name, bad in (
                ("rate", abs(self.rate_error) > self.allowed),
                ("round trip", abs(self.round_trip_error) > RTT_WITHIN_S),
                ("loss", not self.loss_is_plausible),
            )
            if bad
        )


def check(
    wan: Wan, *, together: bool = False, warm_up_s: float = 1.5, measure_s: float = 2.5
) -> Iterator[LinkCheck]:
    """Yield each direction of each link, measured: one at a time, or all at once.

    Latencies are measured before anything is loaded: under load they have the queue in them.

    Args:
        wan: the network; no other program may send in it meanwhile.
        together: load all links at once, both ways.
        warm_up_s: time from the start of a connection to the measurement.
        measure_s: duration of the measurement.
    """
    links = {(link.source, link.target): link for link in wan.status()}
    pings: dict[tuple[Rank, Rank], Latencies] = {}
    for (source, target), link in links.items():
        if (target, source) not in pings:
            back = links.get((target, source), link)
            expected = link.latency + back.latency
            pings[source, target] = measure_latencies(wan, source, target, expected=expected)
    groups: Iterable[list[LinkStatus]] = (
        [list(links.values())] if together else [[link] for link in links.values()]
    )
    for group in groups:
        began, used = clock.monotonic(), _relay_cpu(wan)
        carried = measure_throughput(
            wan,
            [(link.source, link.target) for link in group],
            streams=1 if together else _STREAMS_ALONE,
            warm_up_s=warm_up_s,
            measure_s=measure_s,
        )
        share = (_relay_cpu(wan) - used) / (clock.monotonic() - began)
        dropped = {(link.source, link.target): link.dropped for link in wan.status()}
        for link, flow in zip(group, carried, strict=True):
            there = (link.source, link.target)
            back = links.get((link.target, link.source), link)
            yield _checked(
                wan,
                link,
                back,
                _oriented(pings, link),
                flow,
                dropped=dropped[there] - link.dropped,
                allowed=TOGETHER if together else ALONE,
                relay_cpu=share,
            )


def _relay_cpu(wan: Wan) -> float:
    return float(sum(relay["cpu_s"] for relay in wan.report()["relays"]))


def _oriented(pings: dict[tuple[Rank, Rank], Latencies], link: LinkStatus) -> tuple[float, float]:
    """Return (one way, round trip) of a direction, whichever way round it was measured."""
    ping = pings.get((link.source, link.target))
    if ping is not None:
        return ping.there, ping.round_trip
    ping = pings[link.target, link.source]
    return ping.back, ping.round_trip


def _checked(
    wan: Wan,
    link: LinkStatus,
    back: LinkStatus,
    ping: tuple[float, float],
    flow: Throughput,
    *,
    dropped: int,
    allowed: float,
    relay_cpu: float,
) -> LinkCheck:
    caps = (wan.network.nodes[link.source].egress, wan.network.nodes[link.target].ingress)
    again = max(0, flow.retransmitted - dropped)
    # What is lost has used the link too.
    on_the_wire = flow.goodput / flow.of_rate / (1 - link.loss)
    return LinkCheck(
        source=link.source,
        target=link.target,
        rate=min([link.rate, *(cap for cap in caps if cap is not None)]),
        measured_rate=on_the_wire,
        goodput=flow.goodput,
        latency=link.latency,
        measured_latency=ping[0],
        round_trip=link.latency + back.latency,
        measured_round_trip=ping[1],
        loss=link.loss,
        measured_loss=again / flow.segments if flow.segments else 0.0,
        segments=flow.segments,
        allowed=allowed,
        relay_cpu=relay_cpu,
    )
