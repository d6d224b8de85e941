"""Settings of time-outs, retries and limits, and of how far ranks may be apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from netstorm.settings.kinds import amount, one_of, ratio, seconds, setting, switch, whole

__all__ = ["TimeoutSettings"]


@dataclass(frozen=True, kw_only=True)
class TimeoutSettings:
    """Time-outs, retries and limits, and how far ranks may be apart. Some names are GeoMX's."""

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
        "longest wait for a rank that is alive, but does not push what this rank waits for, or whose Python "
        "does not run",
    )
    wait_for_nodes_s: float = setting(
        "NETSTORM_WAIT_FOR_NODES",
        seconds(),
        600.0,
        "s",
        "longest wait of an elastic job that has fewer than MIN nodes for others to come; and of a node that "
        "has joined later for anything of the job's state",
    )
    use_hfa: bool = setting(
        "MXNET_KVSTORE_USE_HFA",
        switch(),
        False,
        "",
        "MXNet's synchronous stores update each rank's own values, and average them within sites and less "
        "often across sites (hierarchical frequency aggregation); the same at all nodes",
    )
    hfa_k1: int = setting(
        "MXNET_KVSTORE_HFA_K1",
        whole(1),
        20,
        "steps",
        "with hierarchical frequency aggregation: local steps between two averages of a site",
    )
    hfa_k2: int = setting(
        "MXNET_KVSTORE_HFA_K2",
        whole(1),
        10,
        "averages",
        "with hierarchical frequency aggregation: averages of a site between two averages of all ranks",
    )
    staleness: int = setting(
        "NETSTORM_STALENESS",
        whole(-1),
        -1,
        "clocks",
        "clocks that a rank of an asynchronous store may be ahead of the slowest; -1: no limit; 0: none, "
        "which trains as a synchronous store does",
    )
    loss_bound: float = setting(
        "NETSTORM_LOSS_BOUND",
        ratio(below_one=True),
        0.0,
        "ratio",
        "largest share of a step's gradients, by absolute values, that may come too late to count; they are "
        "added to their rank's next gradients. 0: all count, but 1 - DMLC_K may be late if ENABLE_DGT is set",
    )
    deadline_s: float = setting(
        "NETSTORM_DEADLINE",
        seconds(),
        1.0,
        "s",
        "with NETSTORM_LOSS_BOUND: how long a round waits for all gradients, from its first one on; about "
        "1.3 times what a step's communication usually takes",
    )
    dgt: int = setting(
        "ENABLE_DGT",
        whole(0, 3),
        0,
        "",
        "differential gradient transmission, GeoMX's name; 0: off; any other value: chunks with large values "
        "go first on every link, and the largest DMLC_K of them always count",
    )
    dgt_important: float = setting(
        "DMLC_K",
        ratio(),
        0.8,
        "ratio",
        "with ENABLE_DGT: share of the chunks that always count, those with the largest values; GeoMX's name",
    )
    link_timeout_s: float = setting(
        "NETSTORM_LINK_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "time to re-establish a broken connection, after which the link counts as failed; a connection over "
        "which nothing is acknowledged for half of that is broken",
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
    checksums: Literal["auto", "always"] = setting(
        "NETSTORM_CHECKSUMS",
        one_of("auto", "always"),
        "auto",
        "",
        "which payloads have a CRC-32C that the receiver checks; auto: all but those between two processes "
        "of one machine that are connected by its loopback; always: all",
    )
    switch_interval_s: float = setting(
        "NETSTORM_SWITCH_INTERVAL",
        seconds(most=1.0),
        0.0001,
        "s",
        "the interpreter's thread switch interval while a store is open; with Python's 5ms a busy training "
        "loop slows the transport from 1635 to 92 MB/s",
    )
