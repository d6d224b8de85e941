"""Settings of what can be observed of a job: clocks, metrics, logs and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from netstorm.settings.kinds import host, one_of, setting, whole, words

__all__ = ["ClockSource", "LogLevel", "ObservabilitySettings"]

ClockSource: TypeAlias = Literal["scheduler", "trees"]

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings:
    """What can be observed of a job: clocks, metrics, logs and traces."""

    sntp_port: int = setting(
        "NETSTORM_SNTP_PORT",
        whole(0, 65535),
        0,
        "",
        "UDP port of the scheduler's time server (SNTP); 0: the number of its TCP port",
    )
    clock_source: ClockSource = setting(
        "NETSTORM_CLOCK",
        one_of("scheduler", "trees"),
        "scheduler",
        "",
        "time source of a node; scheduler: the scheduler; trees, as in the paper: roots ask the scheduler, "
        "other nodes ask their parent in the tree, at the UDP port with the number of its TCP port",
    )
    http_port: int = setting(
        "NETSTORM_HTTP_PORT",
        whole(-1, 65535),
        -1,
        "",
        "TCP port of the scheduler's HTTP server for `netstorm top`, browsers and Prometheus; -1: the port "
        "after its own; 0: no server; if the port is taken, any free port",
    )
    http_bind: str = setting(
        "NETSTORM_HTTP_BIND",
        host(or_any=True),
        "127.0.0.1",
        "",
        "address of NETSTORM_HTTP_PORT and NETSTORM_METRICS_PORT; *: all interfaces; others than loopback "
        "need NETSTORM_WEB_TOKEN_FILE",
    )
    web_token_file: str = setting(
        "NETSTORM_WEB_TOKEN_FILE",
        words(r"[^\0]*", "the path of a file"),
        "",
        "",
        "file with the token that every request for a web page must bear; only its owner may read it; "
        "`netstorm top` sends it; empty: no token",
    )
    web_cert: str = setting(
        "NETSTORM_WEB_CERT",
        words(r"[^\0]*", "the path of a file"),
        "",
        "",
        "file (PEM) with the certificate of the web pages and those that lead to its issuer: they are "
        "served over HTTPS; empty: over HTTP",
    )
    web_key: str = setting(
        "NETSTORM_WEB_KEY",
        words(r"[^\0]*", "the path of a file"),
        "",
        "",
        "file (PEM) with the private key of NETSTORM_WEB_CERT; empty: it is in the certificate's file",
    )
    metrics_port: int = setting(
        "NETSTORM_METRICS_PORT",
        whole(0, 65535),
        0,
        "",
        "TCP port at which a node exports its own metrics to Prometheus; 0: none; further nodes on one "
        "machine take the next free ports",
    )
    log_level: LogLevel = setting(
        "NETSTORM_LOG",
        one_of("debug", "info", "warning", "error"),
        "warning",
        "",
        "lowest severity that is logged",
    )
    trace_file: str = setting(
        "NETSTORM_TRACE",
        words(r"[^\0]*", "the path of a file"),
        "",
        "",
        "file for a node's trace of each chunk on each link, written when its job ends, for ui.perfetto.dev; "
        "the rank goes before the suffix: trace.json becomes trace.3.json; empty: no trace, no cost",
    )
    compare_rounds: int = setting(
        "NETSTORM_COMPARE",
        whole(0),
        100,
        "rounds",
        "rounds between two comparisons of the ranks' values of each key, which find update rules that do "
        "not give the same result on all ranks; 0: never",
    )
    seed: int = setting(
        "NETSTORM_SEED",
        whole(0, 2**63 - 1),
        0,
        "",
        "seed of all random choices; the same seed on all nodes gives the same run",
    )
