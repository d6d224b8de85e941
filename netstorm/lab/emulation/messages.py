"""What processes tell each other about an emulated network, as JSON: reports, and requests to its daemon.
Pure.
"""

from __future__ import annotations

from typing import Final, TypeAlias, TypedDict

import msgspec

from netstorm.errors import UsageError

__all__ = [
    "MOST_BYTES",
    "Down",
    "EmulatedLinkCounters",
    "LinkReport",
    "NetworkDescription",
    "NetworkEntry",
    "NetworkReport",
    "Order",
    "RelayAnswer",
    "RelayUse",
    "Request",
    "SetLink",
    "Start",
    "Status",
    "WanCounters",
    "parse_request",
]


# What processes tell each other about an emulated network, as JSON. Fields may be added, not renamed.


class Order(TypedDict):
    """What a daemon is started with."""

    name: str
    network: str
    """Text of the network file."""
    backend: str
    congestion: str
    queues: str
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


class EmulatedLinkCounters(TypedDict):
    """Traffic of one direction of a link, in segments and bytes on the wire."""

    packets: int
    bytes: int
    dropped: int
    """Segments for which the queue had no room."""
    lost: int
    """Segments lost by chance."""


class LinkReport(EmulatedLinkCounters):
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

    links: dict[str, EmulatedLinkCounters]


class WanCounters(TypedDict):
    """Traffic of all links, by SOURCE-TARGET, and of the relays."""

    links: dict[str, EmulatedLinkCounters]
    relays: list[RelayUse]


class NetworkReport(NetworkDescription):
    """The state of a network that is up."""

    relays: list[RelayUse]
    changes_for_s: float | None
    """Seconds since the changes in the network file began; None: they have not."""
    changes_ahead: int
    links: list[LinkReport]


# Requests to the daemon of an emulated network, as they come through its control socket.

MOST_BYTES: Final = 2**16
"""Of a request: they are short."""


class SetLink(msgspec.Struct, frozen=True, tag_field="do", tag="set"):
    """Change a link."""

    source: int
    target: int
    rate: float | None = None
    """Bit/s; None: as before."""
    latency: float | None = None
    """In s."""
    loss: float | None = None
    """Part of the packets."""


class Start(msgspec.Struct, frozen=True, tag_field="do", tag="start"):
    """Begin to apply the changes of the network file."""


class Status(msgspec.Struct, frozen=True, tag_field="do", tag="status"):
    """Report what the links are, and what they carried."""


class Down(msgspec.Struct, frozen=True, tag_field="do", tag="down"):
    """End the network."""


Request: TypeAlias = SetLink | Start | Status | Down

_decoder: Final = msgspec.json.Decoder(SetLink | Start | Status | Down)


def parse_request(data: bytes) -> Request:
    """Return the request in what was received.

    Raises:
        UsageError: it is none.
    """
    if len(data) > MOST_BYTES:
        raise UsageError(f"a request of more than {MOST_BYTES} bytes: expected set, start, status or down")
    try:
        request: Request = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = f"a request that makes no sense ({error}): expected set, start, status or down"
        raise UsageError(text) from None
    return request
