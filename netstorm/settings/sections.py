"""The fields of `Settings`, by section, and which values exclude each other. A new setting belongs here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from netstorm.addresses import bracketed, split_host_port
from netstorm.settings.declare import (
    amount,
    host,
    host_ports,
    one_of,
    ratio,
    seconds,
    setting,
    switch,
    whole,
    words,
)

__all__ = [
    "JOB_WIDE",
    "AuxRule",
    "AuxSearch",
    "ClockSource",
    "LogLevel",
    "Role",
    "Sections",
    "SecurityMode",
    "TopologyName",
    "completed",
    "conflicts",
    "preset_values",
    "with_num_nodes",
    "with_standbys",
]


# Settings of the rendezvous: who takes part in a job, and where. Names as in MXNet's ps-lite.

Role: TypeAlias = Literal["worker", "scheduler", "server"]

_HOSTS: Final = "DMLC_PS_ROOT_URI"
_PORT: Final = "DMLC_PS_ROOT_PORT"
_STANDBYS: Final = "NETSTORM_STANDBYS"
_WORKERS: Final = "DMLC_NUM_WORKER"
_DEFAULT_PORT: Final = "9091"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
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


def with_num_nodes(environ: Mapping[str, str], preset: str) -> Mapping[str, str]:
    """Return variables in which the paper's `NUM_NODES` is DMLC_NUM_WORKER, if a preset is set and that is
    not: others call a number of hosts so.
    """
    if not preset or environ.get(_WORKERS) or not environ.get("NUM_NODES"):
        return environ
    return {**environ, _WORKERS: environ["NUM_NODES"]}


def _host_and_port(entry: str, port: str) -> tuple[str, str]:
    """Return host, in brackets if it needs them, and port, both as they are written: settings check them."""
    try:
        host, _ = split_host_port(entry, 1)
    except ValueError:
        return entry, port
    host = bracketed(host)
    return host, entry.removeprefix(f"{host}:") if entry.startswith(f"{host}:") else port


# Settings of one node: its rank, its site, and where it listens.


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class NodeSettings:
    """One node: its rank, its site, and where it listens."""

    rank: int = setting(
        "NETSTORM_RANK",
        whole(-1),
        -1,
        "",
        "rank that this node asks for, from 0; -1: any free rank",
    )
    site: str = setting(
        "NETSTORM_SITE",
        words(r"[^\s,;/]{0,64}", "a name of at most 64 letters, without spaces, or empty"),
        "",
        "",
        "data centre of this node; nodes of one site share a local network",
    )
    job: str = setting(
        "NETSTORM_JOB",
        words(r"[A-Za-z0-9._-]{1,64}", "a name of 1 to 64 letters, digits, dots, dashes or underscores"),
        "default",
        "",
        "name of the job; a scheduler that serves one job refuses nodes of another",
    )
    bind_host: str = setting(
        "NETSTORM_BIND",
        host(or_empty=True, or_any=True),
        "",
        "",
        "address to listen on, which is also advertised, if DMLC_NODE_HOST and DMLC_INTERFACE are empty; *: "
        "all addresses, of IPv4 and IPv6; empty: the advertised address only",
    )
    port: int = setting(
        "NETSTORM_PORT",
        whole(0, 65535),
        0,
        "",
        "TCP port that the first node of a machine listens on, and node n at n above it, where LOCAL_RANK is "
        "n (`netstorm launch` and torchrun set it); 0: any free port",
    )
    advertised_port: int = setting(
        "NETSTORM_ADVERTISED_PORT",
        whole(0, 65535),
        0,
        "",
        "TCP port that the first node of a machine advertises to other nodes, for hosts behind a port "
        "mapping, and node n at n above it; 0: the port it listens on",
    )
    restart: int = setting(
        "NETSTORM_RESTART",
        whole(0),
        0,
        "",
        "how often `netstorm launch --restarts` has started this node, or the whole job, again; set by the "
        "launcher, for scripts",
    )
    torch_backends: str = setting(
        "NETSTORM_TORCH_BACKENDS",
        words(r"(?:(?:gloo|mpi|nccl)(?:,(?:gloo|mpi|nccl))*)?", "a list such as gloo,mpi, or empty"),
        "",
        "",
        "PyTorch's own backends, of gloo, mpi and nccl, whose names mean netstorm in scripts that stay "
        "unedited; empty: none, but all three under python -m netstorm.run",
    )
    size_lower_bound: int = setting(
        "MXNET_KVSTORE_SIZE_LOWER_BOUND",
        whole(1),
        200_000,
        "elements",
        "the smallest tensor that gradient compression of type bsc or mpq sends sparsely; GeoMX's name",
    )
    gradient_codec: str = setting(
        "NETSTORM_GRADIENT_CODEC",
        words(r"[a-z0-9]*|\{.*\}", 'the name of a codec such as int8, JSON such as {"*": "int8"}, or empty'),
        "",
        "",
        "codec of the gradients of PyTorch's DistributedDataParallel over NetStorm groups, in scripts that "
        'stay unedited: a name, or JSON as {"type": "topk", "ratio": 0.01} or {"*.bias": "none", "*": '
        '"int8"}; empty: none',
    )


# Settings of planning: what policies are formed from, and how.

TopologyName: TypeAlias = Literal[
    "star",
    "sharded",
    "balanced",
    "k-ary",
    "cheapest",
    "mst",
    "ring",
    "ring-best",
    "hierarchical",
    "fapt",
    "packing",
    "auto",
    "custom",
]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PlanningSettings:
    """What policies are formed from, and how."""

    network_file: str = setting(
        "NETSTORM_NETWORK",
        words(r"[^\0]*", "the path of a network file"),
        "",
        "",
        "network file, read by the scheduler; empty: all links are assumed equal",
    )
    state_dir: str = setting(
        "NETSTORM_STATE_DIR",
        words(r"[^\0]*", "the path of a folder"),
        "",
        "",
        "folder for the scheduler's log of each job, from which it can be restarted after a crash; empty: no "
        "log",
    )
    find_routes: bool = setting(
        "NETSTORM_FIND_ROUTES",
        switch(),
        True,
        "",
        "without NETSTORM_NETWORK: leave out pairs of nodes whose latencies show that they are routed past "
        "other nodes, and share those nodes' links",
    )
    topology: TopologyName = setting(
        "NETSTORM_TOPOLOGY",
        one_of(*get_args(TopologyName)),
        "auto",
        "",
        "scheme that forms the trees; star: all nodes below one hub; sharded: each node is the hub of an "
        "equal share; balanced: a tree of NETSTORM_TREE_DEGREE in order of rank; k-ary: such a tree for each "
        "root, as in MLNET; mst: a minimum spanning tree of the fastest links; ring: in order of rank; "
        "ring-best: in the order that suits the links; hierarchical: nodes below their site's leader, "
        "leaders among themselves; fapt: a fastest aggregation path tree for each root; packing: many trees "
        "that together use the whole network; auto: the scheme that is predicted to be fastest, or fapt "
        "while no link is known; custom: the trees in NETSTORM_TOPOLOGY_FILE",
    )
    topology_file: str = setting(
        "NETSTORM_TOPOLOGY_FILE",
        words(r"[^\0]*", "the path of a topology file"),
        "",
        "",
        "file with the trees of NETSTORM_TOPOLOGY=custom, read by the scheduler",
    )
    model: str = setting(
        "NETSTORM_MODEL",
        words(r"[^\0]+", "alexnet, resnet50, a size such as 244MB, or the path of a .json file"),
        "100MB",
        "",
        "tensors of one iteration, for which trees are formed before the job's own are known",
    )
    hub: int = setting("NETSTORM_HUB", whole(-1), -1, "", "rank of a star's hub; -1: the best placed node")
    tree_degree: int = setting(
        "NETSTORM_TREE_DEGREE",
        whole(1),
        2,
        "nodes",
        "most children of a node in the trees of NETSTORM_TOPOLOGY=balanced and k-ary, where the links allow "
        "it; in MLNET's figures BINARY is 2 and RACK is 7",
    )
    freeze_roots: bool = setting(
        "NETSTORM_FREEZE_ROOTS",
        switch(),
        False,
        "",
        "keep the roots and shares of the first policy in all later ones, as in the paper; for "
        "NETSTORM_TOPOLOGY=fapt, packing, auto and star",
    )
    reproducible: bool = setting(
        "NETSTORM_REPRODUCIBLE",
        switch(),
        False,
        "",
        "the same job gives the same bits in each run: values are added in a fixed order, in the trees of "
        "the first policy; PyTorch's use_deterministic_algorithms(True) sets it for a job that was not "
        "given it",
    )


# Settings of the NetStorm paper (arXiv 2404.11352), with its names, and closely related ones.

AuxRule: TypeAlias = Literal["arrival", "queue"]

AuxSearch: TypeAlias = Literal["spare", "paper"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PaperSettings:
    """Settings of the NetStorm paper (arXiv 2404.11352), with its names, and closely related ones."""

    preset: str = setting(
        "NETSTORM_PRESET",
        words("(paper)?", "paper, or empty"),
        "",
        "",
        "values for settings that are not given; paper: NetStorm as arXiv 2404.11352 describes it, with its "
        "Table II; NUM_NODES is then another name of DMLC_NUM_WORKER; empty: the defaults",
    )
    awareness: bool = setting(
        "ENABLE_AWARENESS",
        switch(),
        True,
        "",
        "measure the network from the traffic, and form a new policy when it changes; 0: keep the first "
        "policy; not set: 1, but 0 if NETSTORM_NETWORK gives rates",
    )
    aux_path: bool = setting(
        "ENABLE_AUX_PATH",
        switch(),
        True,
        "",
        "use auxiliary paths where the rates of links are known; with packing, which auto takes, they "
        "measure links that no tree uses, and relieve nearly none",
    )
    update_rate: float = setting(
        "UPDATE_RATE",
        ratio(),
        0.1,
        "ratio",
        "smallest change of a link's rate, relative to the rate, for which a new policy is formed; 0, as in "
        "the paper: one is formed every UPDATE_TIME and taken, whatever has changed",
    )
    update_time_s: float = setting(
        "UPDATE_TIME",
        seconds(),
        5.0,
        "s",
        "time between two checks whether a new policy is needed; a failed link is handled at once",
    )
    chunk_size: int = setting(
        "CHUNK_SIZE",
        whole(1),
        32_768,
        "elements",
        "largest chunk, the same on all nodes; larger chunks take longer on each hop: the paper's "
        "1000000 takes 1.6 s on a 20 Mbit/s link. Not set: a half or a quarter of the default if a chunk "
        "takes more than 20 ms on the typical link of NETSTORM_NETWORK",
    )
    largest_chunk: int = setting(
        "NETSTORM_LARGEST_CHUNK",
        whole(0),
        0,
        "elements",
        "largest chunk in a key of more than 256 chunks; 0: twice CHUNK_SIZE. Without NETSTORM_NETWORK and "
        "with all nodes on one machine: 16 times CHUNK_SIZE, in a key of more than 4 chunks",
    )
    num_roots: int = setting(
        "NUM_ROOT_SERVERS", whole(0), 0, "nodes", "number of nodes that are roots of a tree; 0: all nodes"
    )
    primary_busy_bound: int = setting(
        "PRIMARY_BUSY_BOUND",
        whole(1),
        2,
        "chunks",
        "with the rule `queue`: chunks queued on a link above which its auxiliary paths are used",
    )
    auxiliary_queue_length: int = setting(
        "AUXILIARY_QUEUE_LENGTH",
        whole(0),
        1,
        "chunks",
        "with the rule `queue`: largest number of chunks on an auxiliary path",
    )
    aux_rule: AuxRule = setting(
        "NETSTORM_AUX_RULE",
        one_of(*get_args(AuxRule)),
        "arrival",
        "",
        "rule by which a chunk takes an auxiliary path; arrival: if it should arrive clearly earlier; "
        "queue, the paper's: if more than PRIMARY_BUSY_BOUND chunks are on the link and fewer than "
        "AUXILIARY_QUEUE_LENGTH on the path",
    )
    aux_search: AuxSearch = setting(
        "NETSTORM_AUX_SEARCH",
        one_of(*get_args(AuxSearch)),
        "spare",
        "",
        "where auxiliary paths lead; spare: around the busiest hops, over what the trees leave unused, and "
        "over links to measure; paper: around every hop, the paths of the paper's Algorithm 3; the same on "
        "all nodes",
    )
    explore_share: float = setting(
        "NETSTORM_EXPLORE_SHARE",
        ratio(),
        0.01,
        "ratio",
        "fraction of the chunks that are sent over links that no tree uses, in order to measure them; five "
        "times as many until each such path was used once",
    )
    probe_chunk_size: int = setting(
        "PROBE_CHUNK_SIZE",
        amount(0),
        0,
        "bytes",
        "smallest chunk that counts as a measurement of a link, in bytes: in elements, the paper's 2 million "
        "would be twice its largest chunk; 0: a quarter of CHUNK_SIZE",
    )
    probe_chunk_num: int = setting(
        "PROBE_CHUNK_NUM", whole(1), 4, "chunks", "number of chunks in one measurement of a link"
    )
    estimator: Literal["tcp", "busy", "paper"] = setting(
        "NETSTORM_ESTIMATOR",
        one_of("tcp", "busy", "paper"),
        "tcp",
        "",
        "bandwidth estimator; tcp: bytes that the kernel delivered while data was queued, else busy; busy: "
        "bits of busy periods over their durations, which hardly depends on clocks; paper: mean of "
        "size / (arrival - sent_at), which needs synchronised clocks",
    )


# Settings of time-outs, retries and limits, and of how far ranks may be apart.


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
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
    mixed_sync: bool = setting(
        "NETSTORM_MIXED_SYNC",
        switch(),
        False,
        "",
        "under python -m netstorm.run, MXNet's asynchronous stores keep a site's ranks in step, and only its "
        "sums are asynchronous (GeoMX's MixedSync); the same at all nodes",
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
        "go first on every link, and the largest DMLC_K of them always count; sums go as datagrams between "
        "machines (NETSTORM_DATAGRAMS) if the package cryptography is there",
    )
    dgt_important: float = setting(
        "DMLC_K",
        ratio(),
        0.8,
        "ratio",
        "with ENABLE_DGT: share of the chunks that always count, those with the largest values; GeoMX's name",
    )
    dgt_adaptive: bool = setting(
        "ADAPTIVE_K_FLAG",
        switch(),
        False,
        "",
        "with ENABLE_DGT: DMLC_K falls with the mean absolute value of results, from that of the first ones "
        "on, down to DMLC_K_MIN; GeoMX's name",
    )
    dgt_least_important: float = setting(
        "DMLC_K_MIN", ratio(), 0.2, "ratio", "with ADAPTIVE_K_FLAG: what DMLC_K falls to; GeoMX's name"
    )
    dgt_newest: float = setting(
        "DGT_CONTRIBUTION_ALPHA",
        ratio(),
        0.3,
        "ratio",
        "with ENABLE_DGT: weight of the newest values in the means that chunks are ranked by; GeoMX's name",
    )
    dgt_block: int = setting(
        "DGT_BLOCK_SIZE",
        amount(1),
        4096,
        "bytes",
        "values whose packets are marked alike, as important or not; at least a packet's; GeoMX's name",
    )
    dgt_info: bool = setting(
        "DGT_INFO",
        switch(),
        False,
        "",
        "log every ten seconds what this node's datagrams do; GeoMX's name",
    )
    datagrams: bool = setting(
        "NETSTORM_DATAGRAMS",
        switch(),
        False,
        "",
        "sums that may be late (NETSTORM_LOSS_BOUND, ENABLE_DGT) go as encrypted UDP packets that need no "
        "order; everything else, and sums where no packet arrives, over TCP",
    )
    datagram_channels: int = setting(
        "DMLC_UDP_CHANNEL_NUM",
        whole(1, 16),
        3,
        "sockets",
        "for datagrams: networks that balance by ports give each a path of its own; GeoMX's name",
    )
    datagram_port: int = setting(
        "NETSTORM_DATAGRAM_PORT",
        whole(0, 65_535),
        0,
        "",
        "first of the UDP ports for datagrams, one for each of DMLC_UDP_CHANNEL_NUM; 0: any that are free",
    )
    link_timeout_s: float = setting(
        "NETSTORM_LINK_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "time to re-establish a broken connection, after which the link counts as failed (a new one may take "
        "eight of its round trips, and twice this, at most); a connection over which nothing is acknowledged "
        "for half of that is broken",
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
        "of one machine that are connected within it; always: all",
    )
    congestion: Literal["auto", "system"] = setting(
        "NETSTORM_CONGESTION",
        one_of("auto", "system"),
        "auto",
        "",
        "TCP's congestion control on connections to other machines; auto: bbr, if the kernel lets this "
        "process choose it; system: the system's",
    )
    streams: int = setting(
        "NETSTORM_STREAMS",
        whole(1, 8),
        4,
        "",
        "most TCP streams of a connection to another machine: it has one, and these once it has lost packets "
        "under another congestion control than bbr",
    )
    shared_memory: bool = setting(
        "NETSTORM_SHARED_MEMORY",
        switch(),
        True,
        "",
        "payloads between processes of one user and machine lie in memory that they share, and messages go "
        "through pipes, instead of the connection; not with NETSTORM_CHECKSUMS=always",
    )
    switch_interval_s: float = setting(
        "NETSTORM_SWITCH_INTERVAL",
        seconds(most=1.0),
        0.0001,
        "s",
        "the interpreter's thread switch interval while a store is open; with Python's 5ms a busy training "
        "loop slows the transport from 1635 to 92 MB/s",
    )


# Settings for several jobs on one scheduler: how many, and their shares of the network.

JOB_WIDE: Final = (
    "chunk_size",
    "largest_chunk",
    "num_roots",
    "preset",
    "topology",
    "hub",
    "tree_degree",
    "uneven",
    "elastic",
    "standbys",
    "staleness",
    "loss_bound",
    "deadline_s",
    "dgt",
    "dgt_important",
    "dgt_adaptive",
    "dgt_least_important",
    "dgt_newest",
    "reproducible",
    "job_weight",
)
"""Settings of the whole job, by attribute. The scheduler's value counts; a node that was given another one is
refused. A scheduler of several jobs takes a value that it was not given from each job's first node.
"""

_LARGEST_DSCP: Final = 63
"""Six bits (RFC 2474)."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class JobsSettings:
    """Several jobs on one scheduler: how many, and their shares of the network."""

    jobs: int = setting(
        "NETSTORM_JOBS",
        whole(0),
        1,
        "jobs",
        "number of jobs that the scheduler serves before it ends, at the same time or in turn; NETSTORM_JOB "
        "names the job of a node; 0: no limit, the scheduler runs until it is stopped",
    )
    most_jobs: int = setting(
        "NETSTORM_MOST_JOBS",
        whole(1),
        16,
        "jobs",
        "largest number of jobs that a scheduler serves at the same time; further jobs are refused",
    )
    job_weight: int = setting(
        "NETSTORM_JOB_WEIGHT",
        whole(1, 1000),
        1,
        "",
        "weight of this node's job among the jobs of its scheduler: its trees are planned with this share of "
        "each link in NETSTORM_NETWORK; it affects planning only, no traffic is throttled",
    )
    job_priority: int = setting(
        "NETSTORM_JOB_PRIORITY",
        whole(0, 1000),
        0,
        "",
        "priority of this node's job among the jobs that send from its host, give it to all nodes of each: "
        "while a job with a larger number sends to the same other host, values wait, but for up to a tenth "
        "of the link's rate; 0: the job waits for none, and none waits for it",
    )
    dscp: int = setting(
        "NETSTORM_DSCP",
        whole(0, _LARGEST_DSCP),
        0,
        "",
        "DSCP mark (differentiated services code point) on the packets that this node exchanges with other "
        "nodes, for networks with traffic classes; 0: no mark",
    )


# Settings of who may take part in a job. Keys are never values of settings: these name files.

SecurityMode: TypeAlias = Literal["auto", "off"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SecuritySettings:
    """Who may take part in a job. Keys are never values of settings: these name files."""

    security: SecurityMode = setting(
        "NETSTORM_SECURITY",
        one_of("auto", "off"),
        "auto",
        "",
        "auto: connections are encrypted and authenticated if NETSTORM_KEY_FILE is set, and without it a "
        "process listens on loopback only; off: connections are plain TCP, open to whoever reaches the port, "
        "for networks that are private to the job, such as a VPN",
    )
    key_file: str = setting(
        "NETSTORM_KEY_FILE",
        words(r"[^\0]*", "the path of a file that `netstorm keys new` has made, or empty"),
        "",
        "",
        "file with the job's key, the same for its scheduler and all its nodes; whoever holds it can join "
        "the job, read its gradients and change them; empty: no key",
    )
    node_key_file: str = setting(
        "NETSTORM_NODE_KEY",
        words(r"[^\0]*", "the path of a file that `netstorm keys new --node` has made, or empty"),
        "",
        "",
        "file with this node's own key, for jobs with NETSTORM_ALLOW; empty: it has the job's key alone",
    )
    scheduler_key_file: str = setting(
        "NETSTORM_SCHEDULER_KEY",
        words(r"[^\0]*", "the path of a file that `netstorm keys new --scheduler` has made, or empty"),
        "",
        "",
        "file with the key of a job's schedulers, which no node needs: in a job with a key, nodes follow "
        "another scheduler (NETSTORM_STANDBYS, NETSTORM_RECOVERABLE) only if it has the first one's key; "
        "empty: they follow the first one alone, also if it is started again with its log",
    )
    allow_file: str = setting(
        "NETSTORM_ALLOW",
        words(r"[^\0]*", "the path of a file, or empty"),
        "",
        "",
        "file with the nodes that this process admits: a name and a public key a line; it is read again "
        "whenever it changes, and a node whose key was removed is out at once; empty: whoever holds the "
        "job's key is admitted",
    )


# Settings of what can be observed of a job: clocks, metrics, logs and traces.

ClockSource: TypeAlias = Literal["scheduler", "trees"]

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
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


# The fields of `Settings`, by section. Only `Settings` gets dataclass methods: to make those of every section
# would cost each start of a process 15 ms.


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Sections(
    ObservabilitySettings,
    TimeoutSettings,
    PlanningSettings,
    JobsSettings,
    SecuritySettings,
    NodeSettings,
    PaperSettings,
    RendezvousSettings,
):
    """The fields of all sections. `Settings` adds how they are read and checked."""


# NETSTORM_PRESET=paper: NetStorm as arXiv 2404.11352 describes it, §IV-VI, §VIII-B and Table II. What is not
# here is the paper's at its default: NUM_ROOT_SERVERS=0 are as many roots as nodes, 9 of 9 in Table II.

ELEMENT: Final = 4
"""Bytes of a float32, in which the paper counts parameters."""

_PAPER: Final[Mapping[str, str]] = {
    "topology": "fapt",
    "freeze_roots": "1",
    "find_routes": "0",
    "chunk_size": "1000000",
    "primary_busy_bound": "2",
    "auxiliary_queue_length": "1",
    "probe_chunk_size": "2000000",
    "probe_chunk_num": "4",
    "update_time_s": "5",
    "update_rate": "0",
    "awareness": "1",
    "aux_path": "1",
    "aux_rule": "queue",
    "aux_search": "paper",
    "estimator": "paper",
    "clock_source": "trees",
    "largest_chunk": "1000000",
}
"""By attribute. PROBE_CHUNK_SIZE counts bytes: 2 million elements would be twice the largest chunk, so that
nothing would be measured; and §IX-E recommends up to 4 million, which are the bytes of a whole chunk."""


def preset_values(name: str) -> Mapping[str, str]:
    """Return the values of a preset, by attribute; none if there is no such preset."""
    return _PAPER if name == "paper" else {}


def completed(values: dict[str, Any], from_preset: Container[str]) -> None:
    """Fit the values that come from a preset to those that a user has given: chunks keep one size, half of
    one measures a link, and trees that cannot be formed around given roots have others.
    """
    chunk_size, topology = values.get("chunk_size"), values.get("topology")
    if "largest_chunk" in from_preset:
        values["largest_chunk"] = chunk_size
    if "probe_chunk_size" in from_preset and isinstance(chunk_size, int):
        values["probe_chunk_size"] = ELEMENT * chunk_size // 2
    if "freeze_roots" in from_preset and topology not in _FREEZABLE:
        values["freeze_roots"] = False


# Settings that are each allowed, but not together. A new check between two settings belongs here.

_FREEZABLE: Final = ("fapt", "packing", "auto", "star")
"""As `topology.schemes.frozen`: each of these can form other trees for the same roots and shares."""

_WIDEST_ELEMENT: Final = 8
"""Bytes of a float64 or int64, the widest types of a key."""


def conflicts(s: Sections) -> list[str]:
    """Return one sentence for each conflict: the value, what was expected, and why."""
    found = []
    nodes = f"DMLC_NUM_WORKER={s.num_workers}"
    if s.heartbeat_timeout_s < 2 * s.heartbeat_interval_s:
        found.append(
            f"PS_HEARTBEAT_TIMEOUT={s.heartbeat_timeout_s}: expected at least twice "
            f"PS_HEARTBEAT_INTERVAL={s.heartbeat_interval_s}, or one late heartbeat ends the job"
        )
    if s.elastic_range is not None and not 1 <= s.elastic_range[0] <= s.num_workers <= s.elastic_range[1]:
        found.append(
            f"NETSTORM_ELASTIC={s.elastic}: expected MIN:MAX with 1 <= MIN <= MAX and the nodes that the job "
            f"begins with between them, but {nodes}"
        )
    if s.standbys and s.elastic_range is None:
        found.append(
            f"NETSTORM_STANDBYS={s.standbys}: expected none without NETSTORM_ELASTIC, since a standby "
            "takes over only jobs whose members may change"
        )
    found += _recovery_conflicts(s) + _reproducible_conflicts(s)
    for variable, rank in (("NETSTORM_RANK", s.rank), ("NETSTORM_HUB", s.hub)):
        if rank >= s.places:
            since = f"NETSTORM_ELASTIC={s.elastic}" if s.elastic else nodes
            found.append(f"{variable}={rank}: expected a rank from 0 to {s.places - 1}, since {since}")
    if s.num_roots > s.places:
        found.append(f"NUM_ROOT_SERVERS={s.num_roots}: expected at most one root a node, since {nodes}")
    if s.freeze_roots and s.topology not in _FREEZABLE:
        found.append(
            f"NETSTORM_FREEZE_ROOTS=1 with NETSTORM_TOPOLOGY={s.topology}: expected "
            f"{', '.join(_FREEZABLE)}, for which other trees can be formed around the same roots"
        )
    if s.probe_chunk_size > ELEMENT * s.chunk_size:
        found.append(
            f"PROBE_CHUNK_SIZE={s.probe_chunk_size}: expected at most {ELEMENT * s.chunk_size} bytes, those "
            f"of CHUNK_SIZE={s.chunk_size} elements of float32, or no chunk ever measures a link"
        )
    if 0 < s.largest_chunk < s.chunk_size:
        found.append(
            f"NETSTORM_LARGEST_CHUNK={s.largest_chunk}: expected at least CHUNK_SIZE={s.chunk_size}, or 0"
        )
    if s.max_message_bytes < s.largest_chunk * _WIDEST_ELEMENT:
        found.append(
            f"NETSTORM_MAX_MESSAGE={s.max_message_bytes}: expected at least "
            f"{s.largest_chunk * _WIDEST_ELEMENT} bytes, one chunk of NETSTORM_LARGEST_CHUNK="
            f"{s.largest_chunk} elements of {_WIDEST_ELEMENT} bytes"
        )
    if s.max_message_bytes < s.chunk_size * _WIDEST_ELEMENT:
        found.append(
            f"NETSTORM_MAX_MESSAGE={s.max_message_bytes}: expected at least {s.chunk_size * _WIDEST_ELEMENT} "
            f"bytes, one chunk of CHUNK_SIZE={s.chunk_size} elements of {_WIDEST_ELEMENT} bytes"
        )
    if s.datagrams and not s.loss_bound and not s.dgt:
        found.append(
            "NETSTORM_DATAGRAMS=1: expected NETSTORM_LOSS_BOUND or ENABLE_DGT, too, since only sums that may "
            "be late go as datagrams"
        )
    return found + _key_conflicts(s)


def _key_conflicts(s: Sections) -> list[str]:
    """Return which key files contradict the others, or that there is to be no security."""
    others = (
        ("NETSTORM_NODE_KEY", s.node_key_file),
        ("NETSTORM_SCHEDULER_KEY", s.scheduler_key_file),
        ("NETSTORM_ALLOW", s.allow_file),
    )
    if s.security == "off":
        return [
            f"{variable}={path} with NETSTORM_SECURITY=off: expected one of them, since connections are "
            "either protected by a key, or plain and open to whoever reaches the port: unset the other one"
            for variable, path in (("NETSTORM_KEY_FILE", s.key_file), *others)
            if path
        ]
    return [
        f"{variable}={path}: expected NETSTORM_KEY_FILE beside it, the job's key, with which the scheduler "
        "and the nodes prove that they are of this job"
        for variable, path in others
        if path and not s.key_file
    ]


def _recovery_conflicts(s: Sections) -> list[str]:
    """Return what a scheduler that takes a job over cannot be, too."""
    others = (("NETSTORM_STANDBY=1 (--standby)", s.standby), ("NETSTORM_STATE_DIR (--state)", s.state_dir))
    return [
        f"NETSTORM_RECOVER_PEERS={s.recover_peers} (--recover) with {other}: expected one of them, since a "
        "scheduler takes a job over from its nodes, waits until it is needed, or has the job's log"
        for other, value in others
        if s.recover_peers and value
    ]


def _reproducible_conflicts(s: Sections) -> list[str]:
    """Return what would make the results of a reproducible job depend on the time."""
    others = (
        (f"NETSTORM_ELASTIC={s.elastic}", s.elastic, "who is in a sum depends on when ranks leave and join"),
        (
            f"NETSTORM_LOSS_BOUND={s.loss_bound:g}",
            s.loss_bound,
            "which gradients are late depends on the time",
        ),
        (f"ENABLE_DGT={int(s.dgt)}", s.dgt, "which gradients are late depends on the time"),
    )
    return [
        f"NETSTORM_REPRODUCIBLE=1 with {other}: expected one of them, since {why}; PyTorch's "
        "use_deterministic_algorithms(True) sets the former, unless NETSTORM_REPRODUCIBLE=0"
        for other, value, why in others
        if s.reproducible and value
    ]
