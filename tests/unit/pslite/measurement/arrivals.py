"""Chunks that arrive over a link whose rate and latency are known."""

from __future__ import annotations

CHUNK = 256 * 1024 * 8.0


def arrivals(sent, rate, latency, bits=CHUNK, clock=0.0):
    """Return (sent, arrived) of chunks over a first-in-first-out link; the receiver's clock is fast."""
    free = 0.0
    found = []
    for time in sent:
        free = max(free, time) + bits / rate
        found.append((time, free + latency + clock))
    return found


def sure(estimate):
    assert estimate is not None
    return estimate
