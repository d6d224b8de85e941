"""Settings of the rendezvous: who takes part in a job, and where. Names as in MXNet's ps-lite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from netstorm.settings.kinds import host, one_of, seconds, setting, whole, words

__all__ = ["RendezvousSettings", "Role"]

Role: TypeAlias = Literal["worker", "scheduler", "server"]


@dataclass(frozen=True, kw_only=True)
class RendezvousSettings:
    """Who takes part in a job, and where: names as in MXNet's ps-lite."""

    role: Role = setting(
        "DMLC_ROLE",
        one_of("worker", "scheduler", "server"),
        "worker",
        "",
        "role of this process; a general node is a worker; a server, as old launch scripts start it, ends "
        "at once, since there are no servers",
    )
    scheduler_host: str = setting(
        "DMLC_PS_ROOT_URI", host(), "127.0.0.1", "", "host name or address at which nodes reach the scheduler"
    )
    scheduler_port: int = setting("DMLC_PS_ROOT_PORT", whole(1, 65535), 9091, "", "the scheduler's TCP port")
    num_workers: int = setting("DMLC_NUM_WORKER", whole(1), 1, "nodes", "number of general nodes of the job")
    num_servers: int = setting(
        "DMLC_NUM_SERVER", whole(0), 0, "", "ignored: there are no servers, every general node aggregates"
    )
    node_host: str = setting(
        "DMLC_NODE_HOST",
        host(or_empty=True),
        "",
        "",
        "host name or address that this node advertises to other nodes; empty: the address of the interface "
        "that reaches the scheduler",
    )
    interface: str = setting(
        "DMLC_INTERFACE",
        words(r"[^\s/:]{0,15}", "the name of a network interface, such as eth0, or empty"),
        "",
        "",
        "network interface whose address this node advertises, if DMLC_NODE_HOST is empty",
    )
    verbose: int = setting(
        "PS_VERBOSE",
        whole(0, 2),
        0,
        "",
        "1: log connections and membership; 2: also log each message, without its values",
    )
    heartbeat_interval_s: float = setting(
        "PS_HEARTBEAT_INTERVAL",
        seconds(),
        1.0,
        "s",
        "time between two heartbeats of a node",
    )
    heartbeat_timeout_s: float = setting(
        "PS_HEARTBEAT_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "silence after which a node, or the scheduler, counts as lost",
    )
