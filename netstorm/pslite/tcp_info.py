"""What Linux says of a TCP connection, as far as `Progress` needs it: `struct tcp_info` of linux/tcp.h, and
`struct tcp_bbr_info` of linux/inet_diag.h.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

from netstorm.pslite.progress import Progress

__all__ = ["progress_of"]

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

_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")


def progress_of(descriptor: int) -> Progress | None:
    """Return how far a connection has come; None where nobody can tell (not Linux, or it is closed).

    The descriptor may be somebody else's, who closes it at any time: it is only read from, so that a number
    that has become another connection's does no harm (`Watch` sees that its counts go back).
    """
    if descriptor < 0 or not sys.platform.startswith("linux"):
        return None
    try:
        looked_at = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        raw = looked_at.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
        control = looked_at.getsockopt(socket.IPPROTO_TCP, _CONTROL, 2 * _BBR_BYTES)
    except OSError:
        return None
    finally:
        looked_at.detach()  # it is not ours to close
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
        sent_again=again,
        waiting=waiting,
        window=window,
        busy_s=busy * 1e-6,
        starved_s=starved * 1e-6,
        round_trip_s=trip * 1e-6,
        shortest_s=shortest * 1e-6,
        bandwidth=8.0 * ((high << 32) + low),
    )
