"""Status of nodes and measurements of links: datagrams, of which only the newest counts."""

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
    """What the node is waiting for, for a person; empty: nothing."""


class Waiting(Datagram, frozen=True, tag=21):
    """The scheduler to a node that waits for others: which nodes have joined and which are missing, for a
    person.
    """

    text: str


class LinkMeasure(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A recent measurement of a link, by its receiver or (in `Measured.outgoing`) by its sender."""

    source: int
    """The node at the other end: the link's sender; in `Measured.outgoing` its receiver."""
    rate: float
    """Bit/s of payload and headers while the link was busy; 0: unknown."""
    error: float
    """Standard error of `rate`, as a fraction of it."""
    latency: float = -1.0
    """Seconds, one way: half of the round trip, so it holds for both directions; -1: unknown."""
    chunks: int = 0
    """Number of chunks that `rate` rests on."""
    shared: float = 0.0
    """Part of the measured time in which other links out of the sender or into the receiver were busy, unless
    it is known that they do not slow one another. Near 1, `rate` is only a lower bound."""
    signal: float = math.inf
    """Shortest time of a small message from `source` to the reporting node in s, plus the difference of their
    clocks, which cancels in the sum of both directions; infinite: unknown."""
    jumped: bool = False
    """The last measurements agree that the rate has changed."""
    delivered: bool = False
    """The rate is what the sender's kernel has delivered, which is more exact than the receiver's
    measurement."""
    trip: float = 0.0
    """Shortest recent round trip in s, by the kernel of the link's sender; 0: unknown."""


class LinkThroughput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one link delivered in one half second."""

    target: int
    rate: float
    """Bit/s."""
    backlogged: bool
    """There was unsent data all the time."""


class ThroughputReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the links out of a node delivered in one half second, by its kernel."""

    number: int
    """Number of the half second on the cluster clock, since its epoch; bytes count when they arrived."""
    links: tuple[LinkThroughput, ...]
    """The links that delivered something."""


class Measured(Datagram, frozen=True, tag=22):
    """A node to the scheduler: measurements of its links and of its access line."""

    links: tuple[LinkMeasure, ...]
    egress: float = 0.0
    """Bit/s of all links out of this node together while they limited one another; 0: unknown; infinite: the
    links are independent."""
    ingress: float = 0.0
    """The same for all links into it."""
    outgoing: tuple[LinkMeasure, ...] = ()
    """The links out of this node, measured by what its kernel has delivered (`LinkMeasure.delivered`) or else
    by acknowledgements. The latter are less exact than the receivers' measurements, and `shared` covers this
    end alone; they serve for latencies and for links whose receivers report nothing."""
    throughput: tuple[ThroughputReport, ...] = ()
    """What the links out of this node have delivered since the last report."""


class NodeStatus(Datagram, frozen=True, tag=23):
    """A node to the scheduler: its progress, for people and metrics."""

    rounds: int
    """Rounds of all keys complete so far."""
    round_s: float
    """Duration of the last one in s."""
    waited_s: float
    """Seconds so far in which operations were outstanding."""
    bytes_sent: int
    """To other nodes, headers included."""
    clock_offset: float
    """Cluster clock less the node's, in s."""
    clock_drift: float
    """How much faster the cluster clock runs than the node's, in s/s."""
    detoured: int = 0
    """Chunks sent over auxiliary paths so far."""
    last_round: int = -1
    """Number of the newest round that is complete in all keys that have begun it; `round_s` is its time."""
    clock_error: float = -1.0
    """Largest error of `clock_offset`, in s; -1: unknown."""
    clock_hops: int = 0
    """Exchanges between this node's clock and the scheduler's: 1 if it asks the scheduler; 0: unknown."""
    compression: str = ""
    """How gradients travel, for a person; empty: as they are."""
