"""Reads the state of a TCP connection from Linux, chooses or restarts BBR on it, and shuts it down.

The values are in `struct tcp_info` of linux/tcp.h and in `struct tcp_bbr_info` of linux/inet_diag.h.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import zmq

from netstorm.pslite.rates import TcpProgress

__all__ = [
    "MOST_WAITING_BYTES",
    "Backlog",
    "answers_late",
    "borrowed_socket",
    "bytes_received",
    "descriptor_of",
    "is_acknowledged",
    "loses",
    "of_streams",
    "progress_of",
    "restart_bbr",
    "shut_down",
    "use_bbr",
]

_BYTES: Final = 196
"""Size up to `tcpi_delivered`, which Linux has since 4.18; older versions return less."""

_SEGMENT, _ROUND_TRIP, _WINDOW, _SENT_AGAIN = 16, 68, 80, 100
_WAITING, _SHORTEST, _BUSY, _STARVED, _DELIVERED = 144, 148, 168, 176, 192
"""Offsets in `struct tcp_info`: tcpi_snd_mss, tcpi_rtt, tcpi_snd_cwnd, tcpi_total_retrans,
tcpi_notsent_bytes, tcpi_min_rtt, tcpi_busy_time, tcpi_rwnd_limited and tcpi_delivered. Times are in us."""

_ESTABLISHED: Final = 1
"""TCP_ESTABLISHED, the value of tcpi_state, the first byte."""

_PROBES: Final = 3
"""Offset of tcpi_probes, of 8 bits: unanswered probes, of an idle connection or of a closed window."""

_UNACKED, _DATA_SENT, _ACK_RECEIVED = 24, 44, 56
"""Offsets of tcpi_unacked, tcpi_last_data_sent and tcpi_last_ack_recv. Times are in ms, and past."""

_ANSWER_MS: Final = 200
"""A kernel that acknowledges does so within this time, and some round trips as they are now."""

_LATE_MS: Final = 1000
"""A round trip of so long, and four times the shortest, waits for other data, or for losses."""

_ARRIVED, _RECEIVED = 120, 128
"""Offsets of tcpi_bytes_acked and tcpi_bytes_received, of 64 bits."""

MOST_WAITING_BYTES: Final = 512 * 2**20
"""Bytes that may wait for room in one connection: more than windows let wait, but where the bandwidth-delay
product is above 128 MB (`Backlog`). A peer that takes nothing can make more wait."""

_LOOK_BYTES: Final = 2**20
"""So much is handed over to a connection between two looks at what has arrived."""

_FLIGHTS: Final = 8
"""So many times what TCP has had in flight may wait: twice a window (`Window`)."""

_CONTROL: Final = 26
"""TCP_CC_INFO: the state of the congestion control. Only BBR's has `_BBR_BYTES`."""
_BBR_BYTES: Final = 20
_BANDWIDTH: Final = struct.Struct("=II")
"""First fields of `struct tcp_bbr_info`: bbr_bw_lo and bbr_bw_hi, in bytes/s."""

_BBR: Final = b"bbr"
_OTHER: Final = b"reno"
"""Every kernel has it, and every process may use it."""
_NAME_BYTES: Final = 16

_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")


def progress_of(descriptor: int) -> TcpProgress | None:
    """Return how much a connection has delivered; None if that is unknown (not Linux, or the connection is
    closed).

    libzmq owns the descriptor and may close it at any time. The state is only read, so it does no harm if the
    number has become that of another connection (`DeliveryMonitor` notices that its counts are lower).
    """
    try:
        with borrowed_socket(descriptor) as connection:
            raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
            control = connection.getsockopt(socket.IPPROTO_TCP, _CONTROL, 2 * _BBR_BYTES)
    except OSError:
        return None
    if len(raw) < _BYTES:
        return None
    segment, trip, window, again, waiting, shortest, delivered = (
        int(_U32.unpack_from(raw, place)[0])
        for place in (_SEGMENT, _ROUND_TRIP, _WINDOW, _SENT_AGAIN, _WAITING, _SHORTEST, _DELIVERED)
    )
    low, high = _BANDWIDTH.unpack_from(control) if len(control) == _BBR_BYTES else (0, 0)
    busy, starved = (int(_U64.unpack_from(raw, place)[0]) for place in (_BUSY, _STARVED))
    return TcpProgress(
        delivered=delivered,
        segment=segment,
        retransmitted=again,
        unsent=waiting,
        window=window,
        busy_s=busy * 1e-6,
        receiver_limited_s=starved * 1e-6,
        smoothed_rtt_s=trip * 1e-6,
        min_rtt_s=shortest * 1e-6,
        bandwidth=8.0 * ((high << 32) + low),
    )


def _raw(descriptor: int) -> bytes:
    """Return the kernel's tcp_info of a connection; empty: there is none, or the kernel says less."""
    try:
        with borrowed_socket(descriptor) as connection:
            raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    except OSError:
        return b""
    return raw if len(raw) >= _BYTES else b""


def bytes_received(descriptor: int) -> int:
    """Return how many bytes have come over a connection; 0: unknown."""
    raw = _raw(descriptor)
    return int(_U64.unpack_from(raw, _RECEIVED)[0]) if raw else 0


class Backlog:
    """What was handed over to a connection and has not come to the machine at its other end.

    A peer may acknowledge what it has not read, or ask for it again and again. Its kernel does not.
    """

    __slots__ = ("_arrived", "_flight", "_handed", "_look_at")

    def __init__(self) -> None:
        self._handed = self._arrived = self._flight = 0
        self._look_at = _LOOK_BYTES

    def is_full(self, nbytes: int, descriptors: Callable[[], Iterable[int]]) -> bool:
        """Note that so many bytes are to be handed over; return whether too many wait already.

        Args:
            nbytes: of frames. What ZeroMQ and encryption add is not known, so a little less seems to wait.
            descriptors: returns those of all streams.
        """
        self._handed += nbytes
        if self._handed < self._look_at:
            return False
        each = [raw for descriptor in descriptors() if (raw := _raw(descriptor))]
        arrived = sum(int(_U64.unpack_from(raw, _ARRIVED)[0]) for raw in each)
        flight = sum(_U32.unpack_from(raw, _UNACKED)[0] * _U32.unpack_from(raw, _SEGMENT)[0] for raw in each)
        self._flight = max(self._flight, flight)
        waiting = self._handed - (arrived - self._arrived)
        if waiting <= 0 or not each:  # all has arrived, or nobody knows
            self._handed, self._arrived, waiting = 0, arrived, 0
        self._look_at = self._handed + _LOOK_BYTES
        return waiting > MOST_WAITING_BYTES + _FLIGHTS * self._flight


def is_acknowledged(descriptor: int, limit_s: float) -> bool:
    """Return whether the kernel at the other end of a connection acknowledges: within `limit_s`, or whenever
    it was asked to. False: it does not, or that is unknown.

    It does so for a process that is stopped, or whose interpreter is busy. If that process reads nothing, the
    window closes, and the kernel here probes it ever more rarely. So a long silence alone says nothing.
    """
    raw = _raw(descriptor)
    if not raw or raw[0] != _ESTABLISHED:
        return False
    unacked, sent, heard, trip = (
        int(_U32.unpack_from(raw, place)[0]) for place in (_UNACKED, _DATA_SENT, _ACK_RECEIVED, _ROUND_TRIP)
    )
    if heard <= limit_s * 1000:
        return True
    answer_ms = _ANSWER_MS + 4 * trip // 1000
    return raw[_PROBES] < 2 and not (unacked and answer_ms <= sent < heard)


def answers_late(descriptor: int) -> bool:
    """Return whether what was sent over a connection is still on its way, later than the kernel at the other
    end answers by itself: the link is full or loses much, and what its process sends may be late, too.

    False: it is not, nothing was sent lately, or that is unknown.
    """
    raw = _raw(descriptor)
    if not raw or raw[0] != _ESTABLISHED:
        return False
    unacked, sent, trip, shortest = (
        int(_U32.unpack_from(raw, place)[0]) for place in (_UNACKED, _DATA_SENT, _ROUND_TRIP, _SHORTEST)
    )
    trip_ms, shortest_ms = trip // 1000, shortest // 1000
    return unacked > 0 and (sent >= _ANSWER_MS + 4 * shortest_ms or trip_ms >= max(_LATE_MS, 4 * shortest_ms))


def use_bbr(descriptor: int) -> bool:
    """Have BBR control a connection from now on; return whether it does.

    A process may choose what is in net.ipv4.tcp_allowed_congestion_control; with CAP_NET_ADMIN, everything.
    """
    try:
        with borrowed_socket(descriptor) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _BBR)
    except OSError:
        return False
    return True


def loses(descriptor: int) -> bool:
    """Return whether losses slow a connection down: it has lost packets, and they are congestion to whatever
    controls it, as to all but BBR.
    """
    progress = progress_of(descriptor)
    if progress is None or not progress.retransmitted:
        return False
    try:
        with borrowed_socket(descriptor) as connection:
            name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return False
    return not name.startswith(_BBR)


def of_streams(each: Sequence[TcpProgress]) -> TcpProgress:
    """Return how much the streams of one connection have delivered together."""
    first = each[0]
    if len(each) == 1:
        return first
    return TcpProgress(
        delivered=sum(one.delivered for one in each),
        segment=first.segment,
        retransmitted=sum(one.retransmitted for one in each),
        unsent=sum(one.unsent for one in each),
        window=sum(one.window for one in each),
        busy_s=sum(one.busy_s for one in each) / len(each),
        receiver_limited_s=sum(one.receiver_limited_s for one in each) / len(each),
        smoothed_rtt_s=sum(one.smoothed_rtt_s for one in each) / len(each),
        min_rtt_s=min(one.min_rtt_s for one in each),
        bandwidth=sum(one.bandwidth for one in each),
    )


def restart_bbr(descriptor: int) -> bool:
    """Reset BBR's estimate of the link; return whether that worked.

    Setting the congestion control to another one and back puts it into its initial state. Nothing in flight
    is lost, and BBR sends no more than on a new connection.

    The descriptor may have become that of another connection, as for `progress_of`: that one would be
    restarted.
    """
    option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
    try:
        with borrowed_socket(descriptor) as connection, socket.socket() as other:
            other.setsockopt(*option, _BBR)  # fails where setting it back would fail
            if connection.getsockopt(*option, _NAME_BYTES).rstrip(b"\0") != _BBR:
                return False
            connection.setsockopt(*option, _OTHER)
            connection.setsockopt(*option, _BBR)
    except OSError:
        return False
    return True


def descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection over which a frame has come; -1: unknown."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def shut_down(descriptor: int, port: int) -> None:
    """Shut down a connection to a port of this process. A ROUTER cannot disconnect a peer.

    If libzmq has closed it, and its number has become that of another connection to this port, that one
    breaks, and its session makes a new one.
    """
    with contextlib.suppress(OSError), borrowed_socket(descriptor) as connection:
        if connection.getsockname()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def borrowed_socket(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor, which is not closed afterwards.

    Raises:
        OSError: there is none, or this is not Linux.
    """
    if descriptor < 0 or not sys.platform.startswith("linux"):
        raise OSError(f"{descriptor} is not a connection whose state Linux can report")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
