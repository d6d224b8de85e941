"""Settings of the rendezvous: who takes part in a job, and where. Names as in MXNet's ps-lite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from netstorm.addresses import bracketed, split_host_port
from netstorm.settings.kinds import host, host_ports, one_of, seconds, setting, switch, whole, words

__all__ = ["RendezvousSettings", "Role", "with_standbys"]

Role: TypeAlias = Literal["worker", "scheduler", "server"]

_HOSTS: Final = "DMLC_PS_ROOT_URI"
_PORT: Final = "DMLC_PS_ROOT_PORT"
_STANDBYS: Final = "NETSTORM_STANDBYS"
_DEFAULT_PORT: Final = "9091"


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
        "DMLC_PS_ROOT_URI",
        host(),
        "127.0.0.1",
        "",
        "host name or address at which nodes reach the scheduler; several with commas: the others, such as "
        "host2 or host2:9091, are as if in NETSTORM_STANDBYS",
    )
    scheduler_port: int = setting("DMLC_PS_ROOT_PORT", whole(1, 65535), 9091, "", "the scheduler's TCP port")
    standbys: str = setting(
        "NETSTORM_STANDBYS",
        host_ports("host2:9091,[2001:db8::3]:9091"),
        "",
        "",
        "standby schedulers of an elastic job, in the order in which they take over; the same everywhere",
    )
    standby: bool = setting(
        "NETSTORM_STANDBY",
        switch(),
        False,
        "",
        "this scheduler waits until the nodes have lost the one before it, and takes their job over",
    )
    recoverable: bool = setting(
        "NETSTORM_RECOVERABLE",
        switch(),
        False,
        "",
        "nodes that lose the scheduler wait NETSTORM_SCHEDULER_TIMEOUT for another one, which `netstorm "
        "scheduler --recover` starts; an elastic job goes on only with a majority of its last view",
    )
    recover_peers: str = setting(
        "NETSTORM_RECOVER_PEERS",
        host_ports("host2:40001,[2001:db8::3]:40001"),
        "",
        "",
        "this scheduler takes over the job of the nodes at these addresses, which have lost theirs",
    )
    num_workers: int = setting("DMLC_NUM_WORKER", whole(1), 1, "nodes", "number of general nodes of the job")
    elastic: str = setting(
        "NETSTORM_ELASTIC",
        words(r"(\d{1,6}:\d{1,6})?", "MIN:MAX, two numbers of nodes such as 2:8, or nothing"),
        "",
        "",
        "MIN:MAX: nodes may die, leave, come back and join, as long as MIN are left; at most MAX join; "
        "the job begins with DMLC_NUM_WORKER; empty: the loss of a node ends the job",
    )
    rescale: bool = setting(
        "NETSTORM_RESCALE",
        switch(),
        True,
        "",
        "in an elastic job, scale each sum of floats by DMLC_NUM_WORKER over the number of its contributors, "
        "so that dividing by `kv.num_workers` gives the mean over those who contributed; 0: plain sums; "
        "MXNet's stores only, the same at all nodes",
    )
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
        "silence after which a node counts as lost if the kernel of its machine does not acknowledge either; "
        "if it does, the node is busy or stopped: then a warning names it. One whose process has ended is "
        "lost at once",
    )

    @property
    def elastic_range(self) -> tuple[int, int] | None:
        """Fewest and most nodes of an elastic job; None: the job is not elastic."""
        fewest, _, most = self.elastic.partition(":")
        return (int(fewest), int(most)) if most else None

    @property
    def standby_addresses(self) -> tuple[tuple[str, int], ...]:
        """The addresses of the standby schedulers: host and port."""
        return _addresses(self.standbys)

    @property
    def recover_addresses(self) -> tuple[tuple[str, int], ...]:
        """The addresses of the nodes whose job is taken over: host and port."""
        return _addresses(self.recover_peers)

    @property
    def places(self) -> int:
        """How many ranks there are: in an elastic job, for as many nodes as it may have."""
        most = self.elastic_range
        return self.num_workers if most is None else most[1]


def _addresses(text: str) -> tuple[tuple[str, int], ...]:
    return tuple(split_host_port(entry) for entry in text.split(",") if entry)


def with_standbys(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables in which `DMLC_PS_ROOT_URI=a,b:9092` is the host a, and b:9092 is in
    NETSTORM_STANDBYS. A host without a port has DMLC_PS_ROOT_PORT.
    """
    first, comma, others = environ.get(_HOSTS, "").partition(",")
    if not comma:
        return environ
    port = environ.get(_PORT) or _DEFAULT_PORT
    host, own = _host_and_port(first.strip(), port)
    standbys = [":".join(_host_and_port(entry.strip(), port)) for entry in others.split(",")]
    listed = environ.get(_STANDBYS, "")
    found = dict(environ)
    found[_HOSTS], found[_STANDBYS] = host, ",".join([*standbys, *([listed] if listed else [])])
    if own != port:
        found[_PORT] = own
    return found


def _host_and_port(entry: str, port: str) -> tuple[str, str]:
    """Return host, in brackets if it needs them, and port, both as they are written: settings check them."""
    try:
        host, _ = split_host_port(entry, 1)
    except ValueError:
        return entry, port
    host = bracketed(host)
    return host, entry.removeprefix(f"{host}:") if entry.startswith(f"{host}:") else port
