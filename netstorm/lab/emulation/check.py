"""Measures an emulated network, and compares it with its network file."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

from netstorm import clock
from netstorm.errors import UsageError
from netstorm.lab.emulation.namespaces import inside
from netstorm.lab.emulation.shaping import FRAME_BYTES
from netstorm.lab.emulation.wan import EmulatedLinkStatus, Wan
from netstorm.topology.network import Rank

__all__ = [
    "ALONE",
    "RTT_WITHIN_S",
    "TOGETHER",
    "LinkCheck",
    "check",
    "measure_latencies",
    "measure_throughput",
]


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
    groups: Iterable[list[EmulatedLinkStatus]] = (
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


def _oriented(pings: dict[tuple[Rank, Rank], Latencies], link: EmulatedLinkStatus) -> tuple[float, float]:
    """Return (one way, round trip) of a direction, whichever way round it was measured."""
    ping = pings.get((link.source, link.target))
    if ping is not None:
        return ping.there, ping.round_trip
    ping = pings[link.target, link.source]
    return ping.back, ping.round_trip


def _checked(
    wan: Wan,
    link: EmulatedLinkStatus,
    back: EmulatedLinkStatus,
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


# Measures goodput, latency and loss between ranks of an emulated network.
#
# This process opens all sockets itself, inside the namespaces: both ends read the same clock, and one loop
# counts what arrives. The kernel discards the data that arrives, without a copy (MSG_TRUNC, tcp(7)).

_HEADERS: Final = 20 + 32
"""IPv4, and TCP with timestamps."""
_BLOCK: Final = bytes(1 << 18)
_DISCARD: Final = 1 << 22
_BUFFER_S: Final = 0.5
"""Socket buffer at each end, in time at the link's rate: this process may stall so long without idle links.
"""
_LEAST_BUFFER: Final = 1 << 19
_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33
_ABORT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops unsent data, which would else be sent after the measurement."""
_TCP_INFO_BYTES: Final = 232
_CONNECT_S: Final = 20.0
_PINGS: Final = 10
_PING_BYTES: Final = 22
_PING_GAP_S: Final = 0.005
_LATE_S: Final = 1.0
"""A datagram that takes longer than the expected latency and this is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What TCP has carried from one rank to another."""

    goodput: float
    """Bit/s of the data that arrived."""
    of_rate: float
    """Goodput over rate for full segments: each has headers and a frame."""
    segments: int
    """Segments sent since the connections were opened."""
    retransmitted: int
    """Segments of those that were retransmitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Latencies of small datagrams there and back, in seconds: the median of each."""

    there: float
    back: float
    round_trip: float
    answered: int
    sent: int


def measure_latencies(wan: Wan, source: int, target: int, *, expected: float) -> Latencies:
    """Return the latencies between two ranks, measured by datagrams, one at a time.

    Raises:
        UsageError: no datagram came back.
    """
    there, back = [], []
    with (
        _udp(wan, source) as here,
        _udp(wan, target) as other,
    ):
        here.connect(other.getsockname())
        other.connect(here.getsockname())
        for number in range(_PINGS + 1):
            payload = number.to_bytes(_PING_BYTES, "big")
            first = _one_way(here, other, payload, expected)
            second = _one_way(other, here, payload, expected)
            if first is not None and second is not None and number > 0:  # the first one fills caches
                there.append(first)
                back.append(second)
            clock.sleep(_PING_GAP_S)
    if not there:
        raise UsageError(f"no datagram from rank {source} to rank {target} and back has arrived")
    both = [one + other for one, other in zip(there, back, strict=True)]
    return Latencies(
        there=_median(there), back=_median(back), round_trip=_median(both), answered=len(there), sent=_PINGS
    )


def _one_way(sender: socket.socket, receiver: socket.socket, payload: bytes, expected: float) -> float | None:
    began = clock.monotonic()
    sender.send(payload)
    receiver.settimeout(expected + _LATE_S)
    with contextlib.suppress(TimeoutError):
        while receiver.recv(64) != payload:  # a late datagram of an earlier turn
            pass
        return clock.monotonic() - began
    return None


@contextmanager
def _udp(wan: Wan, rank: int) -> Iterator[socket.socket]:
    with inside(wan.namespace(rank)):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with closing(made):
        made.bind((wan.address(rank), 0))
        yield made


class _Stream:
    """One connection that sends as much as it can."""

    def __init__(self, wan: Wan, source: int, target: int, buffer: int, stack: ExitStack) -> None:
        with inside(wan.namespace(target)):
            listener = stack.enter_context(closing(socket.socket()))
        listener.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer)
        listener.bind((wan.address(target), 0))
        listener.listen(1)
        with inside(wan.namespace(source)):
            self.sender = stack.enter_context(closing(socket.socket()))
        self.sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer)
        self.sender.settimeout(_CONNECT_S)
        self.sender.bind((wan.address(source), 0))
        try:
            self.sender.connect(listener.getsockname())
        except OSError as error:
            raise UsageError(f"rank {source} cannot connect to rank {target}: {error}") from error
        self.receiver, _ = listener.accept()
        stack.enter_context(closing(self.receiver))
        for end in (self.sender, self.receiver):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)

    def arrived(self) -> int:
        """Return the bytes that the sender knows to have arrived: tcpi_delivered of linux/tcp.h, in segments.

        Bytes behind a gap count too: a tenth of what 2 s carry may wait behind one loss.
        """
        raw = self.sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (mss,) = struct.unpack_from("=I", raw, 16)
        (delivered,) = struct.unpack_from("=I", raw, 192)
        return int(delivered * mss)

    def sent(self) -> tuple[int, int, int]:
        """Return (largest segment, segments with data sent, retransmitted), of the same struct."""
        raw = self.sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (mss,) = struct.unpack_from("=I", raw, 16)
        (retransmitted,) = struct.unpack_from("=I", raw, 100)
        (sent,) = struct.unpack_from("=I", raw, 156)
        return mss, sent, retransmitted


def measure_throughput(
    wan: Wan,
    pairs: Sequence[tuple[int, int]],
    *,
    streams: int = 1,
    warm_up_s: float = 1.5,
    measure_s: float = 2.5,
) -> list[Throughput]:
    """Send as much as TCP can between all these (source, target) at once, and return the throughput of each.

    Args:
        wan: the network.
        pairs: sender and receiver of each.
        streams: connections of each pair: while one recovers from a loss, the others fill the link.
        warm_up_s: time before the measurement.
        measure_s: duration of the measurement.

    Raises:
        UsageError: two ranks cannot connect.
    """
    with ExitStack() as stack:
        rates = {(link.source, link.target): link.rate for link in wan.status()}
        flows = []
        for source, target in pairs:
            held = rates.get((Rank(source), Rank(target)), 0.0) / 8 * _BUFFER_S / streams
            buffer = max(_LEAST_BUFFER, int(held))
            flows.append([_Stream(wan, source, target, buffer, stack) for _ in range(streams)])
        poll = stack.enter_context(closing(select.epoll()))
        by_number: dict[int, tuple[socket.socket, bool]] = {}
        for stream in (stream for flow in flows for stream in flow):
            by_number[stream.sender.fileno()] = (stream.sender, True)
            by_number[stream.receiver.fileno()] = (stream.receiver, False)
            poll.register(stream.sender, select.EPOLLOUT)
            poll.register(stream.receiver, select.EPOLLIN)
        _pump(poll, by_number, warm_up_s)
        before = [[(clock.monotonic(), stream.arrived()) for stream in flow] for flow in flows]
        _pump(poll, by_number, measure_s)
        return [_throughput(flow, had) for flow, had in zip(flows, before, strict=True)]


def _throughput(flow: Sequence[_Stream], before: Sequence[tuple[float, int]]) -> Throughput:
    goodput = 0.0
    for stream, (began, had) in zip(flow, before, strict=True):
        goodput += (stream.arrived() - had) * 8 / (clock.monotonic() - began)
    sent = [stream.sent() for stream in flow]
    mss = sent[0][0]
    return Throughput(
        goodput=goodput,
        of_rate=mss / (mss + _HEADERS + FRAME_BYTES),
        segments=sum(segments for _, segments, _ in sent),
        retransmitted=sum(retransmitted for _, _, retransmitted in sent),
    )


def _pump(poll: select.epoll, by_number: dict[int, tuple[socket.socket, bool]], seconds: float) -> None:
    until = clock.monotonic() + seconds
    scratch = bytearray(_DISCARD)
    while (left := until - clock.monotonic()) > 0:
        for number, _ in poll.poll(left):
            end, sends = by_number[number]
            with contextlib.suppress(BlockingIOError):
                if sends:
                    end.send(_BLOCK)
                else:
                    end.recv_into(scratch, 0, socket.MSG_TRUNC)
        clock.sleep(0.001)  # reads more at once: the relay needs the core


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
