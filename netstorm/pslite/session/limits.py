"""Time-outs of sessions, and bounds on memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in s, sizes in bytes."""

    link_timeout_s: float = 10.0
    """A session that has no connection for this long is lost."""
    busy_timeout_s: float = 3600.0
    """How long a peer may be busy: it answers nothing, but the kernel of its machine acknowledges."""
    window_bytes: int = 0
    """Most unacknowledged bytes of a session; 0: adapt to the bandwidth-delay product."""
    shallow_windows: bool = False
    """Little may be in flight, since what is cannot be taken back."""
    query_after_s: float = 2.0
    """A query is sent after this time, or four round trips, without an acknowledgement."""
    slowest_link: float = 125_000.0
    """bytes/s of the slowest link to expect (1 Mbit/s). The answer to a query may take as long as such a link
    needs for the bytes in flight."""
    handshake_s: float = 5.0
    """How long a Hello waits for its answer before it is sent again over another connection; doubled with
    each failure, up to half of `link_timeout_s`."""
    first_retry_s: float = 0.05
    """Wait before the second attempt to connect; doubled with each attempt, so that processes do not all
    connect at once after a switch was restarted."""
    longest_retry_s: float = 1.0
    goodbye_s: float = 1.0
    """How long an ending session waits for the other side's Goodbye."""
    pending_hellos: int = 1024
    """Most processes that wait to be admitted."""
    sessions: int = 16_384
    """Most sessions that other processes may open."""
