"""What is read from files and variables: networks, topologies, hosts, settings, models, traces, logs."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final

import google_crc32c

from decoders.wire import PACK_ERRORS, pack, unpack
from netstorm.cli.launch.hosts import place
from netstorm.errors import NetworkFileError, SettingsError, TopologyFileError, UsageError
from netstorm.lab.testing.decoders import (
    POLICIES,
    FuzzTarget,
    mutate_bytes,
    mutate_value,
    of_words,
    structured,
)
from netstorm.observe.trace import join_traces
from netstorm.protocol.messages import KeySpec, Member
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.replay_log import ReplayedJob
from netstorm.settings.values import Settings, declarations
from netstorm.topology.files import dump_network, parse_network, parse_topology, tensors_of

__all__ = ["TARGETS", "as_file", "logs", "mutate_log"]

_NETWORK: Final = b"""\
nodes: {0: {site: seattle, egress: 600Mbit, ingress: 600Mbit}, 1: {site: denver}, 2: {}}
links:
  - {between: [0, 1], rate: 100Mbit, latency: 15ms, loss: 0.02%}
  - {from: 1, to: 2, rate: 1Gbit}
  - {from: 2, to: 1, rate: 1.5e3kbit, latency: 100us}
routing: underlay
changes:
  - {at: 180s, between: [0, 1], rate: 40Mbit}
"""
_TOPOLOGY: Final = b"""\
trees:
  - {root: 0, parent: {1: 0, 2: 1, 3: 2}, share: 2.5}
  - root: 1
    reduce: {0: 1, 2: 1, 3: 2}
    broadcast: {0: 1, 2: 1, 3: 2}
"""
_CHAIN: Final = parse_network(
    "nodes: {0: {}, 1: {}, 2: {}, 3: {}}\\nlinks: [{between: [0, 1], rate: 1Mbit}, "
    "{between: [1, 2], rate: 1Mbit}, {between: [2, 3], rate: 1Mbit}]".replace("\\n", "\n")
)
_HOSTS: Final = b"""\
# host      options
alice@tokyo-1   site=tokyo
tokyo-2         site=tokyo slots=2
paris-1         site=paris rank=0 address=203.0.113.7
"""
_YAML_WORDS: Final = (
    *(
        b"nodes links routing changes site egress ingress between from to rate latency loss at overlay "
        b"underlay 100Mbit 15ms 0.02% null ~ trees root parent reduce broadcast share &a *a "
        b"!!python/object:os.system \\UFFFFFFFF # @ ` ' \""
    ).split(),
    *(b": ", b", ", b"\n", b"\n  - ", b"<<: *a", b"? ", b"|\n", b">\n", b"---\n", b"...\n", b"%YAML 1.1\n"),
)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _decode_network(data: bytes) -> Hashable:
    network = parse_network(_text(data))
    if parse_network(dump_network(network)) != network:
        raise AssertionError("the network is another one after it was written")
    return network.size, network.routing, len(network.links), len(network.changes)


def _decode_topology(data: bytes) -> Hashable:
    return len(parse_topology(_text(data), _CHAIN).trees)


def _decode_hosts(data: bytes) -> Hashable:
    return min(8, len(place(_text(data), "hosts")))


# --------------------------------------------------------------------------------------------------- settings


def _decode_settings(data: bytes) -> Hashable:
    pairs = (line.partition("=") for line in _text(data).split("\n"))
    environment = {name: value for name, _, value in pairs}
    settings = Settings.from_environment(environment)
    if settings.changed() != settings:
        raise AssertionError("the settings are others after they were written as variables")
    return len(settings.as_variables())


def _variables() -> list[bytes]:
    shown = {
        declaration.variable: declaration.kind.write(declaration.default)
        for declaration in declarations().values()
    }
    lines = [f"{name}={value}" for name, value in shown.items()]
    return ["\n".join(lines[start : start + 4]).encode() for start in range(0, len(lines), 4)]


def _setting_words() -> tuple[bytes, ...]:
    names = tuple(declaration.variable.encode() for declaration in declarations().values())
    return (
        *names,
        b"=",
        b"\n",
        b"64MB",
        b"5s",
        b"250ms",
        b"10%",
        b"on",
        b"off",
        b"true",
        b"nan",
        b"inf",
        b"*",
    )


# ---------------------------------------------------------------------------------------------- JSON in files


def as_file(read: Callable[[Path], Hashable]) -> Callable[[bytes], Hashable]:
    """Return a decoder of a file's content: it is written to a file."""

    def decode(data: bytes) -> Hashable:
        with tempfile.NamedTemporaryFile(suffix=".json", buffering=0) as file:
            file.write(data)
            return read(Path(file.name))

    return decode


def _read_traces(path: Path) -> Hashable:
    joined = path.with_suffix(".joined")
    try:
        join_traces([path, path], joined)
    finally:
        joined.unlink(missing_ok=True)
    return "joined"


def _read_model(path: Path) -> Hashable:
    return min(8, len(tensors_of(str(path))))


def _traces() -> list[bytes]:
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {"ph": "X", "name": "reduce 1", "pid": 0, "tid": 1, "ts": 1.5, "dur": 2.0, "args": {"sent_us": 0.5}},
    ]
    source = {"rank": 0, "machine": "a", "cluster_offset_us": 1.0, "forgotten": 0}
    return [json.dumps({"displayTimeUnit": "ms", "otherData": source, "traceEvents": events}).encode()]


_MODEL: Final = b'[{"name": "fc_weight", "shape": [10, 64], "dtype": "float16"}, 2560]'

_mutate_json: Final = structured(json.loads, lambda value: json.dumps(value).encode(), (*PACK_ERRORS,))

# -------------------------------------------------------------------------------------------------- state log

_HEAD: Final = struct.Struct("<II")


def _decode_log(data: bytes) -> Hashable:
    found, size = r.read(data, "the log")
    job = ReplayedJob.replay(found, "the log")
    if not 0 <= size <= len(data):
        raise AssertionError(f"{size} of {len(data)} bytes were read")
    return len(found), None if job is None else (len(job.keys), len(job.policies))


def logs() -> list[bytes]:
    """Return logs of a scheduler."""
    members = tuple(Member(rank=rank, host="h", port=1, site="", incarnation=rank) for rank in range(4))
    began = r.Began(job="j", release="1", boot="b", chunks=(1, 2, 3), members=members, policy=POLICIES[0])
    spec = KeySpec(namespace=0, name="w", shape=(3,), dtype="float32")
    records: list[r.Record] = [
        began,
        r.KeyAdded(rank=0, spec=spec, version=1),
        r.Leased(rounds=((0, 20),)),
        r.Installed(policy=POLICIES[1], starts=((0, 21),)),
        r.BarrierArrival(rank=1, number=0),
        r.RankFinished(rank=2, last_rounds={0: 20}),
    ]
    return [r.MAGIC + r.encode(records), r.MAGIC + r.encode([began, r.JobEnded(text="over"), *records])]


def _bodies(data: bytes) -> list[bytes]:
    found = []
    at = len(r.MAGIC)
    while at + _HEAD.size <= len(data):
        size, _ = _HEAD.unpack_from(data, at)
        found.append(data[at + _HEAD.size : at + _HEAD.size + size])
        at += _HEAD.size + size
    return found


def mutate_log(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly keep the checksums right: damage that they find says nothing of what is behind them."""
    bodies = _bodies(data)
    if chance.random() < 0.15 or not bodies:
        return mutate_bytes(chance, data, other)
    at = int(chance.random() * len(bodies))
    kind = chance.random()
    try:
        if kind < 0.2:
            bodies.insert(at, chance.choice(_bodies(other) or bodies))
        elif kind < 0.3:
            del bodies[at]
        elif kind < 0.4:
            bodies[at] = mutate_bytes(chance, bodies[at], data)
        else:
            bodies[at] = pack(mutate_value(chance, unpack(bodies[at]), unpack(chance.choice(bodies))))
    except PACK_ERRORS:
        return mutate_bytes(chance, data, other)
    return r.MAGIC + b"".join(_HEAD.pack(len(body), google_crc32c.value(body)) + body for body in bodies)


def _files() -> tuple[FuzzTarget, ...]:
    def target(name: str, decode: Callable[[bytes], Hashable], seeds: list[bytes], **more: Any) -> FuzzTarget:
        return FuzzTarget(name=name, decode=decode, seeds=lambda: seeds, **more)

    yaml, hosts = (
        of_words(_YAML_WORDS),
        of_words((b"site=", b"slots=", b"rank=", b"address=", b"#", b"@", b"\n")),
    )
    return (
        target("networks", _decode_network, [_NETWORK], allowed=(NetworkFileError,), mutate=yaml),
        target(
            "topologies",
            _decode_topology,
            [_TOPOLOGY],
            allowed=(TopologyFileError,),
            mutate=yaml,
        ),
        target("hosts", _decode_hosts, [_HOSTS], allowed=(UsageError,), mutate=hosts),
        target(
            "settings",
            _decode_settings,
            _variables(),
            allowed=(SettingsError,),
            mutate=of_words(_setting_words()),
        ),
        target("models", as_file(_read_model), [_MODEL], allowed=(UsageError,), mutate=_mutate_json),
        target(
            "traces",
            as_file(_read_traces),
            _traces(),
            allowed=(UsageError,),
            mutate=_mutate_json,
        ),
        target("logs", _decode_log, logs(), allowed=(UsageError,), mutate=mutate_log),
    )


TARGETS: Final = _files()
