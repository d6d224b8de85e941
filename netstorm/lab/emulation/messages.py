"""What processes tell each other about an emulated network, as JSON. Fields may be added, not renamed."""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "Counters",
    "LinkCounters",
    "LinkReport",
    "NetworkDescription",
    "NetworkEntry",
    "NetworkReport",
    "Order",
    "RelayAnswer",
    "RelayUse",
]


class Order(TypedDict):
    """What a daemon is started with."""

    name: str
    network: str
    """Text of the network file."""
    backend: str
    congestion: str
    start_changes: bool


class NetworkDescription(TypedDict):
    """What does not change while a network is up."""

    name: str
    pid: int
    """Process id of its daemon."""
    backend: str
    backend_why: str
    congestion: str
    pinned_by: str
    """How the congestion control is set: "sysctl" or "routes"."""
    namespaces: list[str]


class NetworkEntry(NetworkDescription):
    """A network's entry in the registry."""

    network: str
    """Text of the network file."""


class LinkCounters(TypedDict):
    """Traffic of one direction of a link, in segments and bytes on the wire."""

    packets: int
    bytes: int
    dropped: int
    """Segments for which the queue had no room."""
    lost: int
    """Segments lost by chance."""


class LinkReport(LinkCounters):
    """One direction of a link: its present values and its traffic."""

    source: int
    target: int
    rate: float
    latency: float
    loss: float


class RelayUse(TypedDict):
    """Processor time of a relay process."""

    pid: int
    cpu_s: float


class RelayAnswer(RelayUse):
    """A relay's answer on its control channel."""

    links: dict[str, LinkCounters]


class Counters(TypedDict):
    """Traffic of all links, by SOURCE-TARGET, and of the relays."""

    links: dict[str, LinkCounters]
    relays: list[RelayUse]


class NetworkReport(NetworkDescription):
    """The state of a network that is up."""

    relays: list[RelayUse]
    changes_for_s: float | None
    """Seconds since the changes in the network file began; None: they have not."""
    changes_ahead: int
    links: list[LinkReport]
