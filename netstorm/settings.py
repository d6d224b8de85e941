"""Every setting, declared once, and the only place that reads the environment.

`Settings.from_environment()` reads the variables; its arguments win over them; a wrong value is a
`SettingsError` that names the variable, the value and what is allowed. The table in docs/settings.md is
generated from the declarations.

Names that users of MXNet's ps-lite know are kept (`DMLC_*`, `PS_*`), and so are those of the NetStorm paper
(arXiv 2404.11352); all others begin with `NETSTORM_`.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

from netstorm.errors import SettingsError, UsageError
from netstorm.setting_kinds import (
    Declaration,
    amount,
    host,
    one_of,
    ratio,
    seconds,
    setting,
    switch,
    whole,
    words,
)

__all__ = [
    "FOREIGN_VARIABLES",
    "AuxRule",
    "LogLevel",
    "Role",
    "Settings",
    "Source",
    "TopologyName",
    "child_environment",
    "declarations",
    "foreign_variable",
    "unknown_variables",
]

Source: TypeAlias = Literal["default", "environment", "argument"]
Role: TypeAlias = Literal["worker", "scheduler", "server"]
AuxRule: TypeAlias = Literal["arrival", "queue"]

TopologyName: TypeAlias = Literal[
    "star",
    "sharded",
    "balanced",
    "mst",
    "ring",
    "ring-best",
    "hierarchical",
    "fapt",
    "packing",
    "auto",
    "custom",
]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_logger = logging.getLogger(__name__)


_LATER: Final = "accepted and checked; takes effect when measuring the network arrives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one process. Values are checked however it is made.

    Raises:
        SettingsError: names every wrong value, where it came from and what is allowed.
    """

    # Rendezvous: names as in MXNet's ps-lite.
    role: Role = setting(
        "DMLC_ROLE",
        one_of("worker", "scheduler", "server"),
        "worker",
        "",
        "what this process is; a general node is a worker; a server, as old launch scripts start them, has "
        "nothing to do and ends at once",
    )
    scheduler_host: str = setting(
        "DMLC_PS_ROOT_URI", host(), "127.0.0.1", "", "name or address at which nodes reach the scheduler"
    )
    scheduler_port: int = setting("DMLC_PS_ROOT_PORT", whole(1, 65535), 9091, "", "the scheduler's TCP port")
    num_workers: int = setting("DMLC_NUM_WORKER", whole(1), 1, "nodes", "how many general nodes the job has")
    num_servers: int = setting(
        "DMLC_NUM_SERVER", whole(0), 0, "", "ignored: there are no servers, every general node aggregates"
    )
    node_host: str = setting(
        "DMLC_NODE_HOST",
        host(or_empty=True),
        "",
        "",
        "name or address that this node advertises to the others; empty: that of the interface which reaches "
        "the scheduler",
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
        "1: log connections and membership; 2: also every message, without its values",
    )
    heartbeat_interval_s: float = setting(
        "PS_HEARTBEAT_INTERVAL", seconds(), 1.0, "s", "time between two heartbeats of a node to the scheduler"
    )
    heartbeat_timeout_s: float = setting(
        "PS_HEARTBEAT_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "silence after which a node, or the scheduler, counts as lost",
    )

    # The paper's (arXiv 2404.11352), with its names.
    awareness: bool = setting(
        "ENABLE_AWARENESS",
        switch(),
        True,
        "",
        "measure the network from the traffic and re-form the policy as it changes; 0: the first one stays; "
        "not set: it also stays where NETSTORM_NETWORK gives rates, which are believed",
    )
    aux_path: bool = setting(
        "ENABLE_AUX_PATH", switch(), True, "", "use auxiliary paths, where rates of links are known"
    )
    update_rate: float = setting(
        "UPDATE_RATE",
        ratio(),
        0.1,
        "ratio",
        "smallest change of a link, as a part of its rate, for which a new policy is formed; a smaller one "
        "gains less than predictions err; at 0 any that is more than the error of measuring will do",
    )
    update_time_s: float = setting(
        "UPDATE_TIME",
        seconds(),
        5.0,
        "s",
        "time between two looks at whether a new policy is needed; if a link fails there is one at once",
    )
    chunk_size: int = setting(
        "CHUNK_SIZE",
        whole(1),
        32_768,
        "elements",
        "largest chunk, the same on all nodes; the paper's 1000000 costs 1.6 s a hop on a 20 Mbit/s link, "
        "65536 costs 4 to 19 % on a WAN of nine nodes",
    )
    largest_chunk: int = setting(
        "NETSTORM_LARGEST_CHUNK",
        whole(0),
        0,
        "elements",
        "to what chunks grow in a key that would have over 256; 0: twice CHUNK_SIZE. If all nodes are on one "
        "machine, and there is no NETSTORM_NETWORK: in a key that would have over 32, 32 times CHUNK_SIZE",
    )
    num_roots: int = setting(
        "NUM_ROOT_SERVERS", whole(0), 0, "nodes", "how many nodes are roots of a tree; 0: all of them"
    )
    primary_busy_bound: int = setting(
        "PRIMARY_BUSY_BOUND",
        whole(1),
        2,
        "chunks",
        "chunks on a link beyond which its auxiliary paths are used, by the rule `queue`",
    )
    auxiliary_queue_length: int = setting(
        "AUXILIARY_QUEUE_LENGTH",
        whole(0),
        1,
        "chunks",
        "most chunks on an auxiliary path, by the rule `queue`",
    )
    aux_rule: AuxRule = setting(
        "NETSTORM_AUX_RULE",
        one_of(*get_args(AuxRule)),
        "arrival",
        "",
        "when a chunk takes an auxiliary path; arrival: if it is expected to arrive clearly earlier; queue: "
        "the paper's, if more than PRIMARY_BUSY_BOUND chunks are on the link and fewer than "
        "AUXILIARY_QUEUE_LENGTH on the path",
    )
    explore_share: float = setting(
        "NETSTORM_EXPLORE_SHARE",
        ratio(),
        0.02,
        "ratio",
        "part of the chunks that take a path over links that have not been measured, if a policy has some",
    )
    probe_chunk_size: int = setting(
        "PROBE_CHUNK_SIZE",
        whole(0),
        0,
        "elements",
        "smallest chunk that measures a link (of float32: other types count by their bytes); 0: a quarter of "
        "CHUNK_SIZE",
    )
    probe_chunk_num: int = setting(
        "PROBE_CHUNK_NUM", whole(1), 4, "chunks", "how many chunks make one measurement of a link"
    )

    # NetStorm's own.
    estimator: Literal["busy", "paper"] = setting(
        "NETSTORM_ESTIMATOR",
        one_of("busy", "paper"),
        "busy",
        "",
        "how a link's rate is estimated: busy, bits of busy periods over their durations, which hardly needs "
        "clocks; paper, the mean of size / (arrival - sent_at), which needs them synchronised",
    )
    rank: int = setting(
        "NETSTORM_RANK", whole(-1), -1, "", "the rank to ask the scheduler for, from 0; -1: any that is free"
    )
    site: str = setting(
        "NETSTORM_SITE",
        words(r"[^\s,;/]{0,64}", "a name of at most 64 letters, without spaces, or empty"),
        "",
        "",
        "the data centre that this node is in; nodes of one site share a local network",
    )
    job: str = setting(
        "NETSTORM_JOB",
        words(r"[A-Za-z0-9._-]{1,64}", "a name of 1 to 64 letters, digits, dots, dashes or underscores"),
        "default",
        "",
        "name of the job; processes of another job are turned away",
    )
    bind_host: str = setting(
        "NETSTORM_BIND",
        host(or_empty=True, or_any=True),
        "",
        "",
        "address to listen on, * for every interface; empty: the advertised address only",
    )
    port: int = setting(
        "NETSTORM_PORT", whole(0, 65535), 0, "", "TCP port that this node listens on; 0: any that is free"
    )
    advertised_port: int = setting(
        "NETSTORM_ADVERTISED_PORT",
        whole(0, 65535),
        0,
        "",
        "port that this node tells the others, for where ports are mapped; 0: the one it listens on",
    )
    network_file: str = setting(
        "NETSTORM_NETWORK",
        words(r"[^\0]*", "the path of a network file"),
        "",
        "",
        "file that describes the network, read by the scheduler; empty: all links are assumed equal",
    )
    topology: TopologyName = setting(
        "NETSTORM_TOPOLOGY",
        one_of(*get_args(TopologyName)),
        "auto",
        "",
        "how trees are formed; star: all nodes to one hub; sharded: each node is the hub of an equal share; "
        "balanced: a binary tree in order of rank; mst: the fastest links; ring: in order of rank; "
        "ring-best: in the order that suits the links; hierarchical: nodes to their site's leader, leaders "
        "among themselves; fapt: a fastest aggregation path tree for each root; packing: many "
        "trees that together use all of the network; auto: what is predicted to be fastest, and fapt "
        "while nothing is known of the links; custom: those in "
        "NETSTORM_TOPOLOGY_FILE",
    )
    topology_file: str = setting(
        "NETSTORM_TOPOLOGY_FILE",
        words(r"[^\0]*", "the path of a topology file"),
        "",
        "",
        "file that holds the trees of NETSTORM_TOPOLOGY=custom, read by the scheduler",
    )
    model: str = setting(
        "NETSTORM_MODEL",
        words(r"[^\0]+", "alexnet, resnet50, a size such as 244MB, or the path of a .json file"),
        "100MB",
        "",
        "what is summed in an iteration, as far as it is known before the job: trees are formed for it",
    )
    hub: int = setting("NETSTORM_HUB", whole(-1), -1, "", "rank of a star's hub; -1: the best placed one")
    freeze_roots: bool = setting(
        "NETSTORM_FREEZE_ROOTS",
        switch(),
        False,
        "",
        "keep the roots and their shares as in the first policy, as the paper must; for "
        "NETSTORM_TOPOLOGY=fapt",
    )
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
    link_timeout_s: float = setting(
        "NETSTORM_LINK_TIMEOUT",
        seconds(),
        10.0,
        "s",
        "longest time to re-establish a broken connection, after which the neighbour counts as lost",
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
    sntp_port: int = setting(
        "NETSTORM_SNTP_PORT",
        whole(0, 65535),
        0,
        "",
        "UDP port at which the scheduler tells the time; 0: the number of its TCP port",
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

    sources: Mapping[str, Source] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """Where each value came from, by attribute; one that is missing came from whoever made this object."""

    def __post_init__(self) -> None:
        problems = [
            _wrong(name, declaration, getattr(self, name), self.source(name))
            for name, declaration in declarations().items()
            if not declaration.kind.fits(getattr(self, name))
        ]
        _raise(problems or _contradictions(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
        """Read the settings of this process. Unknown variables `NETSTORM_*` are logged.

        Args:
            environ: variables; this process's if None. An empty one counts as not set: scripts export those.
            overrides: values by attribute, typed or as text; they win over variables. None is not given.

        Raises:
            SettingsError: names every wrong value, where it came from and what is allowed.
        """
        environ = os.environ if environ is None else environ
        known = declarations()
        problems = [_unknown("argument", name, known) for name in overrides if name not in known]
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for name, declaration in known.items():
            given, sources[name] = _given(name, declaration, environ, overrides)
            try:
                values[name] = declaration.kind.read(given)
            except ValueError:
                problems.append(_wrong(name, declaration, given, sources[name]))
        _raise(problems)
        for problem in unknown_variables(environ):
            _logger.warning("%s", problem)
        return cls(**values, sources=sources)

    def changed(self, **overrides: object) -> Settings:
        """Return a copy with other values, typed or as text, which count as arguments."""
        copy = Settings.from_environment(self.as_variables(), **overrides)
        kept = {name: self.source(name) for name in declarations() if overrides.get(name) is None}
        return dataclasses.replace(copy, sources={**copy.sources, **kept})

    def source(self, name: str) -> Source:
        """Return where the value of an attribute came from."""
        untouched = getattr(self, name) == declarations()[name].default
        return self.sources.get(name, "default" if untouched else "argument")

    def as_variables(self) -> dict[str, str]:
        """Return the variables that give another process these settings. Defaults are left out."""
        return {
            declaration.variable: declaration.kind.write(getattr(self, name))
            for name, declaration in declarations().items()
            if getattr(self, name) != declaration.default
        }


_DECLARATIONS: Final[Mapping[str, Declaration]] = MappingProxyType(
    {field.name: field.metadata["declaration"] for field in dataclasses.fields(Settings) if field.metadata}
)


def declarations() -> Mapping[str, Declaration]:
    """Return the declaration of each setting, by attribute, in the order in which users should meet them."""
    return _DECLARATIONS


def unknown_variables(environ: Iterable[str] | None = None) -> list[str]:
    """Return a sentence about each variable `NETSTORM_*` that is no setting: probably a misspelled one."""
    known = [declaration.variable for declaration in declarations().values()]
    names = os.environ if environ is None else environ
    return [
        _unknown("variable", name, known)
        for name in names
        if name.startswith("NETSTORM_") and name not in known
    ]


# Variables of other programs whose values matter here, each with the reason.
FOREIGN_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MXNET_ENGINE_TYPE": "under NaiveEngine MXNet's operations block, so they cannot overlap",
        "OMP_NUM_THREADS": "several nodes on one machine share its cores; a user's own choice is kept",
    }
)


def foreign_variable(name: str) -> str | None:
    """Return a variable of another program, or None if it is not set.

    Raises:
        UsageError: `name` is not in `FOREIGN_VARIABLES`.
    """
    if name not in FOREIGN_VARIABLES:
        raise UsageError(
            f"{name} is not in FOREIGN_VARIABLES: declare it there, with the reason for reading it"
        )
    return os.environ.get(name)


def child_environment(base: Mapping[str, str] | None = None, **variables: object) -> dict[str, str]:
    """Return the environment of a child process: some variables changed.

    Args:
        base: variables to start from; this process's if None.
        variables: new values; None removes a variable, True and False become 1 and 0.

    Raises:
        SettingsError: a value that the child would refuse, or a variable `NETSTORM_*` that is no setting.
    """
    environment = dict(os.environ if base is None else base)
    by_variable = {declaration.variable: (name, declaration) for name, declaration in declarations().items()}
    problems = unknown_variables(variables)
    for variable, value in variables.items():
        if value is None:
            environment.pop(variable, None)
            continue
        environment[variable] = str(int(value)) if isinstance(value, bool) else str(value)
        if variable in by_variable and environment[variable]:
            name, declaration = by_variable[variable]
            try:
                declaration.kind.read(environment[variable])
            except ValueError:
                problems.append(_wrong(name, declaration, value, "environment"))
    _raise(problems)
    return environment


def _given(
    name: str, declaration: Declaration, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> tuple[object, Source]:
    if overrides.get(name) is not None:
        return overrides[name], "argument"
    text = environ.get(declaration.variable, "").strip()
    return (text, "environment") if text else (declaration.default, "default")


def _wrong(name: str, declaration: Declaration, value: object, source: Source) -> str:
    variable = declaration.variable
    place = (
        f"{variable}={value!r}"
        if source == "environment"
        else f"{name}={value!r} (an argument, for {variable})"
    )
    about = declaration.meaning.split(";")[0]
    return f"{place}: expected {declaration.kind.allowed} ({about})"


_WIDEST_ELEMENT: Final = 8
"""Bytes of a float64 or int64, the widest types of a key."""


def _contradictions(s: Settings) -> list[str]:
    """Return what is wrong about settings that are each allowed."""
    found = []
    nodes = f"DMLC_NUM_WORKER={s.num_workers}"
    if s.heartbeat_timeout_s < 2 * s.heartbeat_interval_s:
        found.append(
            f"PS_HEARTBEAT_TIMEOUT={s.heartbeat_timeout_s}: expected at least twice "
            f"PS_HEARTBEAT_INTERVAL={s.heartbeat_interval_s}, or one late heartbeat ends the job"
        )
    for variable, rank in (("NETSTORM_RANK", s.rank), ("NETSTORM_HUB", s.hub)):
        if rank >= s.num_workers:
            found.append(f"{variable}={rank}: expected a rank from 0 to {s.num_workers - 1}, since {nodes}")
    if s.num_roots > s.num_workers:
        found.append(f"NUM_ROOT_SERVERS={s.num_roots}: expected at most one root a node, since {nodes}")
    if s.freeze_roots and s.topology != "fapt":
        found.append(
            f"NETSTORM_FREEZE_ROOTS=1 with NETSTORM_TOPOLOGY={s.topology}: expected fapt, the paper's "
            "topology, whose roots have a meaning of their own"
        )
    if s.probe_chunk_size > s.chunk_size:
        found.append(
            f"PROBE_CHUNK_SIZE={s.probe_chunk_size}: expected at most CHUNK_SIZE={s.chunk_size}, "
            "or no chunk ever measures a link"
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
    return found


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    # The prefix that all have in common would make any two names look alike.
    by_rest = {other.removeprefix("NETSTORM_"): other for other in known}
    close = difflib.get_close_matches(name.removeprefix("NETSTORM_"), by_rest, n=1)
    hint = f"did you mean {by_rest[close[0]]}?" if close else "`netstorm env` lists all settings"
    return f"{name}: there is no setting of that name ({what}); {hint}"


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise SettingsError(problems[0])
    if problems:
        raise SettingsError(
            f"{len(problems)} settings are wrong:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
