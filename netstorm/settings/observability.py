"""What people and programs see of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from netstorm.settings.kinds import host, one_of, setting, whole, words

__all__ = ["ClockSource", "LogLevel", "ObservabilitySettings"]

ClockSource: TypeAlias = Literal["scheduler", "trees"]

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings:
    """What people and programs see of a job."""

    sntp_port: int = setting(
        "NETSTORM_SNTP_PORT",
        whole(0, 65535),
        0,
        "",
        "UDP port at which the scheduler tells the time; 0: the number of its TCP port",
    )
    clock_source: ClockSource = setting(
        "NETSTORM_CLOCK",
        one_of("scheduler", "trees"),
        "scheduler",
        "",
        "whom a node asks for the time: scheduler; trees, as in the paper: roots ask the scheduler, and all "
        "others their parent, at the UDP port that has the number of its TCP port",
    )
    http_port: int = setting(
        "NETSTORM_HTTP_PORT",
        whole(-1, 65535),
        -1,
        "",
        "TCP port at which the scheduler shows the job to `netstorm top`, browsers and Prometheus, without "
        "authentication; -1: the one after its own; 0: none; if it is taken, any that is free",
    )
    http_bind: str = setting(
        "NETSTORM_HTTP_BIND",
        host(or_any=True),
        "127.0.0.1",
        "",
        "address at which NETSTORM_HTTP_PORT and NETSTORM_METRICS_PORT listen, * for every interface",
    )
    metrics_port: int = setting(
        "NETSTORM_METRICS_PORT",
        whole(0, 65535),
        0,
        "",
        "TCP port at which a node shows its own metrics to Prometheus; 0: none; nodes of one machine take "
        "the next ones that are free",
    )
    log_level: LogLevel = setting(
        "NETSTORM_LOG",
        one_of("debug", "info", "warning", "error"),
        "warning",
        "",
        "least severe messages that are logged",
    )
    trace_file: str = setting(
        "NETSTORM_TRACE",
        words(r"[^\0]*", "the path of a file"),
        "",
        "",
        "where a node writes the timeline of each chunk on each link when its job ends, for ui.perfetto.dev; "
        "its rank stands before the suffix: trace.json becomes trace.3.json; empty: nowhere, at no cost",
    )
    compare_rounds: int = setting(
        "NETSTORM_COMPARE",
        whole(0),
        100,
        "rounds",
        "how often what the ranks hold of each key is compared, since an update rule may not do the same "
        "everywhere; 0: never",
    )
    seed: int = setting(
        "NETSTORM_SEED",
        whole(0, 2**63 - 1),
        0,
        "",
        "seed of everything random; the same on all nodes gives the same run",
    )
