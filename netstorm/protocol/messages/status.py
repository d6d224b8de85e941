"""How nodes and links are: datagrams, of which the newest counts."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from netstorm.protocol.messages.kinds import Datagram

__all__ = [
    "THROUGHPUT_PERIOD_S",
    "Heartbeat",
    "LinkMeasure",
    "LinkThroughput",
    "Measured",
    "NodeStatus",
    "ThroughputReport",
    "Waiting",
]

THROUGHPUT_PERIOD_S: Final = 0.5
"""Seconds that a `ThroughputReport` covers."""


class Heartbeat(Datagram, frozen=True, tag=20):
    """A node to the scheduler, every `PS_HEARTBEAT_INTERVAL`."""

    busy: str = ""
    """What the node is waiting for, for a person; empty if nothing."""


class Waiting(Datagram, frozen=True, tag=21):
    """The scheduler to a node that waits for others: who is here and who is missing, for a person."""

    text: str


class LinkMeasure(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What a receiver has seen of the link from `source` of late, or a sender of the link to it."""

    source: int
    """The node at the other end: in `Measured.outgoing` that is the receiver."""
    rate: float
    """Bit/s of payload and headers while the link was busy; 0: no chunk has measured it."""
    error: float
    """Standard error of `rate`, as a fraction of it."""
    latency: float = -1.0
    """Seconds, one way: half of the way there and back, so it holds for both directions; -1: not known."""
    chunks: int = 0
    """How many have measured it."""
    shared: float = 0.0
    """Part of that time in which other links out of the sender or into the receiver were busy, too, unless it
    is known that they don't slow one another. Near 1, `rate` is only a lower bound.
    """
    signal: float = math.inf
    """Seconds that anything small took at least from `source` to the node that reports, and what their clocks
    are off by; infinite: not known. There and back together, clocks cancel.
    """
    jumped: bool = False
    """Several transfers in a row, the last ones, agree that the rate is another one than before."""
    delivered: bool = False
    """The sender's kernel says what it has delivered, which is more exact than what its receiver can say."""
    trip: float = 0.0
    """Seconds there and back at least, of late, by the kernel of the link's source; 0: not known."""


class LinkThroughput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one link carried in some time."""

    target: int
    rate: float
    """Bit/s."""
    backlogged: bool
    """There was unsent data all the time."""


class ThroughputReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the links out of a node delivered in one half second, by its kernel."""

    number: int
    """The half second: of the cluster clock, since its epoch. What counts is when something arrived."""
    links: tuple[LinkThroughput, ...]
    """Those that carried something."""


class Measured(Datagram, frozen=True, tag=22):
    """A node to the scheduler: what its traffic says of the links into it, and of its access link."""

    links: tuple[LinkMeasure, ...]
    egress: float = 0.0
    """Bit/s of all links out of this node together while they limited one another; 0: not known; infinite:
    they do not, each did the same in any company."""
    ingress: float = 0.0
    """The same of all links into it."""
    outgoing: tuple[LinkMeasure, ...] = ()
    """The links out of this node, by what its kernel has delivered (`LinkMeasure.delivered`), or else by the
    acknowledgements. Those are less exact than what their receivers say, who also
    know of what is shared at either end (`shared` is of this end alone here); for their latency, and for
    links whose receivers say nothing.
    """
    throughput: tuple[ThroughputReport, ...] = ()
    """What the links out of this node have delivered since the last report."""


class NodeStatus(Datagram, frozen=True, tag=23):
    """A node to the scheduler: how it is doing, for people and metrics."""

    rounds: int
    """Rounds of all keys complete so far."""
    round_s: float
    """Seconds from the begin to the end of the last one."""
    waited_s: float
    """Seconds so far in which operations were outstanding."""
    bytes_sent: int
    """To other nodes, headers included."""
    clock_offset: float
    """Cluster clock less the node's, in s."""
    clock_drift: float
    """How much faster the cluster clock goes."""
    detoured: int = 0
    """Chunks sent over auxiliary paths so far."""
    last_round: int = -1
    """Number of the newest round that is complete in all keys that have begun it; `round_s` is its time."""
    clock_error: float = -1.0
    """Most that `clock_offset` may be wrong, in s; -1: not known."""
    clock_hops: int = 0
    """Exchanges between this node's clock and the scheduler's: 1 if it asks the scheduler; 0: not known."""
