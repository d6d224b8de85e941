"""Settings of one node: its rank, its site, and where it listens."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.settings.kinds import host, setting, whole, words

__all__ = ["NodeSettings"]


@dataclass(frozen=True, kw_only=True)
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
        "address to listen on; *: all interfaces; empty: the advertised address only",
    )
    port: int = setting(
        "NETSTORM_PORT",
        whole(0, 65535),
        0,
        "",
        "TCP port that this node listens on; 0: any free port; under `netstorm launch` the first node of a "
        "host has this one, and further ones the next, likewise for NETSTORM_ADVERTISED_PORT",
    )
    advertised_port: int = setting(
        "NETSTORM_ADVERTISED_PORT",
        whole(0, 65535),
        0,
        "",
        "TCP port that this node advertises to other nodes, for hosts behind a port mapping; 0: the port it "
        "listens on",
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
        "unedited; empty: none, but gloo,mpi under python -m netstorm.run",
    )
    size_lower_bound: int = setting(
        "MXNET_KVSTORE_SIZE_LOWER_BOUND",
        whole(1),
        200_000,
        "elements",
        "the smallest tensor that gradient compression of type mpq sends sparsely; GeoMX's name",
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
