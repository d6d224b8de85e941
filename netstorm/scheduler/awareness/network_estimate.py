"""The estimate of a network at some moment: what policies are formed for, and what people are shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.topology.network import Network

__all__ = ["LinkEstimate", "NetworkEstimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """What is known of one link, for a person."""

    source: int
    target: int
    rate: float
    """Bit/s that is planned with."""
    error: float
    """Standard error, as a fraction of the rate."""
    latency: float
    """Seconds."""
    age: float
    """Seconds since the last reading; infinite: never measured."""
    censored: bool
    """Measured only while an access line was the limit: it may carry more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEstimate:
    """The network as it was known at some moment."""

    network: Network
    errors: tuple[float, ...]
    """Standard errors of the rates, as fractions, by link in the order of `network.links`."""
    cap_error: float
    """The largest of those of access caps."""
    measured: frozenset[tuple[int, int]]
    """(source, target) links that have been measured."""
    routed: frozenset[tuple[int, int]] = frozenset()
    """(source, target) pairs that are no links: their paths lead past other nodes."""
