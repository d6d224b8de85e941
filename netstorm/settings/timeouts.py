"""How long anybody waits, and how much is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from netstorm.settings.kinds import amount, one_of, seconds, setting, whole

__all__ = ["TimeoutSettings"]


@dataclass(frozen=True, kw_only=True)
class TimeoutSettings:
    """How long anybody waits, and how much is under way."""

    join_timeout_s: float = setting(
        "NETSTORM_JOIN_TIMEOUT",
        seconds(),
        300.0,
        "s",
        "longest wait for the scheduler and for all nodes at the start",
    )
    wait_timeout_s: float = setting(
        "NETSTORM_WAIT_TIMEOUT",
        seconds(),
        3600.0,
        "s",
        "longest wait for another rank that is alive, but does not push what this one waits for",
    )
    staleness: int = setting(
        "NETSTORM_STALENESS",
        whole(-1),
        -1,
        "clocks",
        "how far a rank of an asynchronous store may be ahead of the slowest; -1: as far as it likes; "
        "0: not at all, so that it trains as the synchronous one does",
    )
    link_timeout_s: float = setting(
        "NETSTORM_LINK_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "longest time to re-establish a broken connection, after which the link counts as failed",
    )
    link_retry_s: float = setting(
        "NETSTORM_LINK_RETRY",
        seconds(),
        30.0,
        "s",
        "pause between two trials of a link that has failed: it is used again once it works",
    )
    uneven: Literal["error", "join"] = setting(
        "NETSTORM_UNEVEN",
        one_of("error", "join"),
        "error",
        "",
        "what a round is that a rank never pushes because its script has ended; error: the end of the job; "
        "join: that rank contributes zeros, and holds up no barrier, until all have ended",
    )
    scheduler_timeout_s: float = setting(
        "NETSTORM_SCHEDULER_TIMEOUT",
        seconds(),
        300.0,
        "s",
        "longest time that nodes wait for a scheduler with NETSTORM_STATE_DIR to be started again",
    )
    window_bytes: int = setting(
        "NETSTORM_WINDOW",
        amount(0),
        0,
        "bytes",
        "most unacknowledged data on a link; 0: adapt to its bandwidth-delay product",
    )
    max_message_bytes: int = setting(
        "NETSTORM_MAX_MESSAGE",
        amount(65_536),
        64 * 2**20,
        "bytes",
        "largest message that is accepted; a peer that sends a larger one is disconnected",
    )
    switch_interval_s: float = setting(
        "NETSTORM_SWITCH_INTERVAL",
        seconds(most=1.0),
        0.0001,
        "s",
        "the interpreter's thread switch interval while a store is open; at Python's 5ms a busy training "
        "loop slowed the transport from 1635 to 92 MB/s",
    )
