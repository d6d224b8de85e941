"""What `torch.distributed` reads with `init_method="env://"`: rank, size, and where rank 0 listens.

Scripts of other frameworks do not read these variables. https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.errors import UsageError

__all__ = [
    "FROM_ANOTHER_JOB",
    "SET_FOR_EACH_RANK",
    "Master",
    "Place",
    "check_port",
    "free_port",
    "given_or",
    "is_free",
    "places",
    "port_beside",
    "torch_variables",
]

SET_FOR_EACH_RANK: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

FROM_ANOTHER_JOB: Final = (
    *SET_FOR_EACH_RANK,
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What torchrun sets. A launcher below torchrun starts a job of its own, whose nodes must not find them: with
TORCHELASTIC_USE_AGENT_STORE rank 0 would wait for torchrun's store instead of being one.
"""

_USUAL_PORT: Final = 29500
"""PyTorch's own default."""
_FREE_PORTS: Final = range(20_000, 32_768)
"""Below the range from which Linux gives a port to any connection, at any time."""
_BESIDE: Final = 1000
"""From the scheduler's port to PyTorch's on hosts where nothing can be tried beforehand. Not 1 or 2, because
schedulers on one host tend to have neighbouring ports.
"""
_ATTEMPTS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """Where rank 0 listens for the other ranks' PyTorch."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node is among the nodes of its host; scripts choose their GPU by it."""

    local_rank: int
    local_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """Return the place of each rank, from the host of each rank."""
    size = Counter(hosts)
    seen: Counter[str] = Counter()
    found = []
    for host in hosts:
        found.append(Place(local_rank=seen[host], local_size=size[host]))
        seen[host] += 1
    return found


def torch_variables(*, rank: int, size: int, place: Place, master: Master | None) -> dict[str, str | int]:
    """Return the variables that PyTorch reads.

    Args:
        rank: the node's.
        size: number of nodes.
        place: where the node is among those of its host.
        master: where rank 0 listens; None: no address of it is known that all nodes could use.
    """
    variables: dict[str, str | int] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
    }
    if master is not None:
        variables |= {"MASTER_ADDR": master.address, "MASTER_PORT": master.port}
    return variables


def check_port(variables: Mapping[str, str]) -> None:
    """Check the port that the user has chosen for PyTorch's rank 0, if any.

    Raises:
        UsageError: it is none.
    """
    text = variables.get("MASTER_PORT", "")
    if text and not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535):
        raise UsageError(
            f"--env MASTER_PORT={text}: expected a TCP port from 1 to 65535, free on the host of rank 0"
        )


def given_or(environment: Mapping[str, str], master: Master) -> Master:
    """Return `master`, changed by what the user has set for the job's nodes."""
    port = environment.get("MASTER_PORT", "")
    return Master(
        address=environment.get("MASTER_ADDR") or master.address,
        port=int(port) if port else master.port,
    )


def port_beside(scheduler_port: int | None, *, fresh_host: bool) -> int:
    """Return a port for rank 0 on a host where nothing can be tried beforehand.

    Args:
        scheduler_port: the scheduler's, perhaps on the same host; None: one that the system chooses.
        fresh_host: whether only this job is there; else the port differs from scheduler to scheduler.
    """
    if fresh_host:
        return _USUAL_PORT + (scheduler_port == _USUAL_PORT)
    assert scheduler_port is not None
    return scheduler_port + (_BESIDE if scheduler_port + _BESIDE <= 65535 else -_BESIDE)


def free_port() -> int:
    """Return a TCP port of this machine that is free now, a random one: launchers may run side by side.

    Raises:
        UsageError: none was found.
    """
    chosen = random.sample(_FREE_PORTS, _ATTEMPTS)
    for port in chosen:
        if is_free(port):
            return port
    raise UsageError(
        f"{_ATTEMPTS} TCP ports from {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1} were tried for PyTorch's "
        "rank 0, and all are taken: give one with --env MASTER_PORT=PORT"
    )


def is_free(port: int) -> bool:
    """Return whether a server could listen on a TCP port at all addresses, as PyTorch's does."""
    with contextlib.ExitStack() as sockets:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                one = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:  # a machine without IPv6
                continue
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind(("", port))
            except OSError as error:
                if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:  # IPv6 is off
                    continue
                return False
    return True
