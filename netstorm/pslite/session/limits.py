"""How patient a session is, and how much it may take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in s, sizes in bytes."""

    link_timeout_s: float = 10.0
    """A connection that is not re-established within this time is lost, and so is its session."""
    window_bytes: int = 0
    """Most un-acknowledged bytes of a session; 0: adapt to the bandwidth-delay product."""
    query_after_s: float = 2.0
    """No acknowledgement for this long (or four round trips): ask."""
    slowest_link: float = 125_000.0
    """bytes/s that are taken for granted when judging how long an answer may take: a query waits behind what
    is in flight. 1 Mbit/s."""
    greeting_s: float = 5.0
    """How long a Hello waits for its answer before it is said again over another connection; doubled with
    each failure, up to half of `link_timeout_s`."""
    first_retry_s: float = 0.05
    """Wait before the second attempt to connect; doubled with each, so that a restarted switch is no
    stampede.
    """
    longest_retry_s: float = 1.0
    goodbye_s: float = 1.0
    """How long a session that ends waits for the other side's goodbye."""
    waiting_hellos: int = 1024
    """Most processes that wait for being admitted."""
    sessions: int = 16_384
    """Most sessions that others may have with this process."""
