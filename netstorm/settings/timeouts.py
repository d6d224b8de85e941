"""Settings of time-outs, retries and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from netstorm.settings.kinds import amount, one_of, seconds, setting, whole

__all__ = ["TimeoutSettings"]


@dataclass(frozen=True, kw_only=True)
class TimeoutSettings:
    """Time-outs, retries and limits."""

    join_timeout_s: float = setting(
        "NETSTORM_JOIN_TIMEOUT",
        seconds(),
        300.0,
        "s",
        "longest wait at the start for the scheduler and for all nodes",
    )
    wait_timeout_s: float = setting(
        "NETSTORM_WAIT_TIMEOUT",
        seconds(),
        3600.0,
        "s",
        "longest wait for a rank that is alive, but does not push what this rank waits for",
    )
    staleness: int = setting(
        "NETSTORM_STALENESS",
        whole(-1),
        -1,
        "clocks",
        "clocks that a rank of an asynchronous store may be ahead of the slowest; -1: no limit; 0: none, "
        "which trains as a synchronous store does",
    )
    link_timeout_s: float = setting(
        "NETSTORM_LINK_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "time to re-establish a broken connection, after which the link counts as failed",
    )
    link_retry_s: float = setting(
        "NETSTORM_LINK_RETRY",
        seconds(),
        30.0,
        "s",
        "time between two attempts to connect over a failed link; it is used again once it works",
    )
    uneven: Literal["error", "join"] = setting(
        "NETSTORM_UNEVEN",
        one_of("error", "join"),
        "error",
        "",
        "what happens to a round that a rank does not push because its script has ended; error: the job "
        "fails; join: the rank contributes zeros, and barriers do not wait for it, until all have ended",
    )
    scheduler_timeout_s: float = setting(
        "NETSTORM_SCHEDULER_TIMEOUT",
        seconds(),
        300.0,
        "s",
        "longest time that nodes wait for a scheduler with NETSTORM_STATE_DIR to restart",
    )
    window_bytes: int = setting(
        "NETSTORM_WINDOW",
        amount(0),
        0,
        "bytes",
        "largest amount of unacknowledged data on a link; 0: adapt to its bandwidth-delay product",
    )
    max_message_bytes: int = setting(
        "NETSTORM_MAX_MESSAGE",
        amount(65_536),
        64 * 2**20,
        "bytes",
        "largest message that is accepted; a peer that sends a larger message is disconnected",
    )
    switch_interval_s: float = setting(
        "NETSTORM_SWITCH_INTERVAL",
        seconds(most=1.0),
        0.0001,
        "s",
        "the interpreter's thread switch interval while a store is open; with Python's 5ms a busy training "
        "loop slows the transport from 1635 to 92 MB/s",
    )
