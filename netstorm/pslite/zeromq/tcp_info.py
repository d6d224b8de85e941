"""What Linux says of a TCP connection, as far as `Progress` needs it: `struct tcp_info` of linux/tcp.h, and
`struct tcp_bbr_info` of linux/inet_diag.h. And what can be asked of it: that BBR starts anew.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Final

from netstorm.pslite.measurement.tcp_progress import Progress

__all__ = ["progress_of", "restart_bbr"]

_BYTES: Final = 196
"""Up to `tcpi_delivered`, which Linux has since 4.18; older ones say less."""

_SEGMENT, _ROUND_TRIP, _WINDOW, _SENT_AGAIN = 16, 68, 80, 100
_WAITING, _SHORTEST, _BUSY, _STARVED, _DELIVERED = 144, 148, 168, 176, 192
"""Where in it: tcpi_snd_mss, tcpi_rtt, tcpi_snd_cwnd, tcpi_total_retrans, tcpi_notsent_bytes, tcpi_min_rtt,
tcpi_busy_time, tcpi_rwnd_limited and tcpi_delivered. Times are in us."""

_CONTROL: Final = 26
"""TCP_CC_INFO: what the congestion control says; of those that say something only BBR says so many bytes."""
_BBR_BYTES: Final = 20
_BANDWIDTH: Final = struct.Struct("=II")
"""Its first fields: bbr_bw_lo and bbr_bw_hi, in bytes a second."""

_BBR: Final = b"bbr"
_OTHER: Final = b"reno"
"""Every kernel has it, and lets everybody use it."""
_NAME_BYTES: Final = 16

_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")


def progress_of(descriptor: int) -> Progress | None:
    """Return how far a connection has come; None where nobody can tell (not Linux, or it is closed).

    The descriptor may be somebody else's, who closes it at any time: it is only read from, so that a number
    that has become another connection's does no harm (`Watch` sees that its counts go back).
    """
    try:
        with _somebody_elses(descriptor) as connection:
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
    return Progress(
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


def restart_bbr(descriptor: int) -> bool:
    """Have BBR forget what it takes the link for, and find out anew; return whether it does.

    A connection whose congestion control is set to another and back has it in its first state; nothing under
    way is lost, and no more than on a new connection is sent at a time that the link does not carry.

    The descriptor may be somebody else's, as for `progress_of`: another connection would start anew, too.
    """
    option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
    try:
        with _somebody_elses(descriptor) as connection, socket.socket() as other:
            other.setsockopt(*option, _BBR)  # fails where the way back would
            if connection.getsockopt(*option, _NAME_BYTES).rstrip(b"\0") != _BBR:
                return False
            connection.setsockopt(*option, _OTHER)
            connection.setsockopt(*option, _BBR)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _somebody_elses(descriptor: int) -> Iterator[socket.socket]:
    """Give the socket of a descriptor that is not ours to close.

    Raises:
        OSError: there is none, or this is not Linux.
    """
    if descriptor < 0 or not sys.platform.startswith("linux"):
        raise OSError(f"{descriptor} is no connection that Linux could tell anything of")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
