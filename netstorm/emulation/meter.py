"""A small measuring tool: goodput, latency and loss between ranks of an emulated network.

All its sockets are this process's own, opened inside the namespaces: so both ends read one clock, and what
arrives is counted by one loop. Data that arrives is discarded by the kernel, uncopied (MSG_TRUNC, tcp(7)).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

from netstorm import clock
from netstorm.emulation.links.packets import FRAME_BYTES
from netstorm.emulation.namespaces import inside
from netstorm.emulation.wan import Wan
from netstorm.errors import UsageError
from netstorm.topology.networks.elements import Rank

__all__ = ["Carried", "OneWay", "latencies", "saturate"]

_HEADERS: Final = 20 + 32
"""IPv4, and TCP with timestamps."""
_BLOCK: Final = bytes(1 << 18)
_DISCARD: Final = 1 << 22
_BUFFER_S: Final = 0.5
"""Of a link's rate, at each end: this process may be kept waiting so long before a link falls idle."""
_LEAST_BUFFER: Final = 1 << 19
_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33
_ABORT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what has not been sent, or it would be sent on after the measurement."""
_TCP_INFO_BYTES: Final = 232
_CONNECT_S: Final = 20.0
_PING_BYTES: Final = 22
_PING_GAP_S: Final = 0.005
_PATIENCE_S: Final = 1.0
"""Beyond the expected latency: a datagram that takes longer is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What TCP has carried from one rank to another within a time."""

    goodput: float
    """Bit/s of data that arrived."""
    of_rate: float
    """The goodput of a link over its rate: segments are full, and each has headers and a frame."""
    segments: int
    """Sent since the connections were made."""
    retransmitted: int
    """Of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay:
    """Latencies of small datagrams there and back, in seconds: the median of each."""

    there: float
    back: float
    round_trip: float
    answered: int
    sent: int


def latencies(wan: Wan, source: int, target: int, *, expected: float, count: int = 10) -> OneWay:
    """Return the latencies between two ranks, by datagrams, one at a time.

    Raises:
        UsageError: none came back.
    """
    there, back = [], []
    with (
        _udp(wan, source) as here,
        _udp(wan, target) as other,
    ):
        here.connect(other.getsockname())
        other.connect(here.getsockname())
        for number in range(count + 1):
            payload = number.to_bytes(_PING_BYTES, "big")
            first = _one_way(here, other, payload, expected)
            second = _one_way(other, here, payload, expected)
            if first is not None and second is not None and number > 0:  # the first one warms caches
                there.append(first)
                back.append(second)
            clock.sleep(_PING_GAP_S)
    if not there:
        raise UsageError(f"no datagram from rank {source} to rank {target} and back has arrived")
    both = [one + other for one, other in zip(there, back, strict=True)]
    return OneWay(
        there=_median(there), back=_median(back), round_trip=_median(both), answered=len(there), sent=count
    )


def _one_way(sender: socket.socket, receiver: socket.socket, payload: bytes, expected: float) -> float | None:
    began = clock.monotonic()
    sender.send(payload)
    receiver.settimeout(expected + _PATIENCE_S)
    with contextlib.suppress(TimeoutError):
        while receiver.recv(64) != payload:  # one that came too late for its turn
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

        Those behind a gap count too: in order, what waits behind one loss is a tenth of what 2 s carry.
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


def saturate(
    wan: Wan,
    pairs: Sequence[tuple[int, int]],
    *,
    streams: int = 1,
    warm_up_s: float = 1.5,
    measure_s: float = 2.5,
) -> list[Carried]:
    """Send as much as TCP can between all these (source, target) at once, and return what each has carried.

    Args:
        wan: the network.
        pairs: who sends to whom.
        streams: connections for each of them: while one finds its rate again, the others fill the link.
        warm_up_s: before bytes count.
        measure_s: how long they count.

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
        return [_carried(flow, had) for flow, had in zip(flows, before, strict=True)]


def _carried(flow: Sequence[_Stream], before: Sequence[tuple[float, int]]) -> Carried:
    goodput = 0.0
    for stream, (began, had) in zip(flow, before, strict=True):
        goodput += (stream.arrived() - had) * 8 / (clock.monotonic() - began)
    told = [stream.sent() for stream in flow]
    mss = told[0][0]
    return Carried(
        goodput=goodput,
        of_rate=mss / (mss + _HEADERS + FRAME_BYTES),
        segments=sum(sent for _, sent, _ in told),
        retransmitted=sum(retransmitted for _, _, retransmitted in told),
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
        clock.sleep(0.001)  # what comes meanwhile is taken together: the relay needs the core more


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
