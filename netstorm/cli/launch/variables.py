"""The variables that tell a process of a job who it is: NetStorm's own, what `torch.distributed` reads
with `init_method="env://"`, the job's key, and the number of threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netstorm.errors import SettingsError, UsageError
from netstorm.pslite.keys import JobKey
from netstorm.pslite.system import usable_processors

__all__ = [
    "FROM_ANOTHER_JOB",
    "KEY_FILE",
    "RESERVED",
    "Master",
    "check_port",
    "free_port",
    "fresh_or_given",
    "given_or",
    "hold_key",
    "is_free",
    "threads_each",
    "usual_port",
    "variables_of_nodes",
]


# What `torch.distributed` reads with `init_method="env://"`: rank, size, and where rank 0 listens.
#
# Scripts of other frameworks do not read these variables.
# https://docs.pytorch.org/docs/stable/distributed.html

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
_ATTEMPTS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """Where rank 0 listens for the other ranks' PyTorch."""

    address: str
    port: int


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


def usual_port(scheduler_port: int | None) -> int:
    """Return a port for rank 0 on a host of this job alone, where the scheduler may have its own."""
    return _USUAL_PORT + (scheduler_port == _USUAL_PORT)


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


# The variables of one node: what it finds in its environment besides what all nodes have in common.

RESERVED: Final = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_WORKER",
    "NETSTORM_RANK",
    "NETSTORM_RESTART",
    *SET_FOR_EACH_RANK,
)
"""Variables that the launcher sets for each process."""


def variables_of_nodes(
    hosts: Sequence[str],
    sites: Sequence[str | None],
    *,
    scheduler: str,
    port: int | None,
    master: Master | None,
) -> list[dict[str, str | int]]:
    """Return for each rank the variables with its rank, the scheduler's address, and what PyTorch needs.

    NetStorm's rank is PyTorch's. LOCAL_RANK counts the nodes of a host; scripts choose their GPU by it.

    Args:
        hosts: of each rank.
        sites: of each rank; None: not set.
        scheduler: its host.
        port: the scheduler's; None: it is in the environment, or the default.
        master: where rank 0 listens for PyTorch; None: no address of it is known that all nodes could use.
    """
    of_all: dict[str, str | int] = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": scheduler,
        "DMLC_NUM_WORKER": len(hosts),
        "WORLD_SIZE": len(hosts),
    }
    if port is not None:
        of_all["DMLC_PS_ROOT_PORT"] = port
    if master is not None:
        of_all |= {"MASTER_ADDR": master.address, "MASTER_PORT": master.port}
    nodes_on, seen = Counter(hosts), Counter[str]()
    variables = []
    for rank, (host, site) in enumerate(zip(hosts, sites, strict=True)):
        own = of_all | {
            "NETSTORM_RANK": rank,
            "RANK": rank,
            "LOCAL_RANK": seen[host],
            "LOCAL_WORLD_SIZE": nodes_on[host],
        }
        seen[host] += 1
        if site is not None:
            own["NETSTORM_SITE"] = site
        variables.append(own)
    return variables


# The key of a launched job: fresh for each job, and handed over without a trace.
#
# It is in memory alone (memfd_create(2)), and its path, /proc/PID/fd/N, is what NETSTORM_KEY_FILE says. Only
# this user can open that, and it vanishes with the process that holds it: the launcher, or on another host
# the supervisor, which reads the key from its standard input.

KEY_FILE: Final = "NETSTORM_KEY_FILE"


def fresh_or_given(environment: Mapping[str, str], *, with_scheduler: bool) -> JobKey | None:
    """Return the key of a job that is about to be started; None: its connections are plain.

    Args:
        environment: of its processes. A key file there wins over a fresh key.
        with_scheduler: whether the scheduler is started here; one that runs already knows no fresh key.

    Raises:
        SettingsError: the key file there cannot be used.
    """
    if environment.get("NETSTORM_SECURITY", "").strip().lower() == "off":
        return None
    given = environment.get(KEY_FILE, "").strip()
    if given:
        return JobKey.load(Path(given))
    return JobKey.fresh() if with_scheduler else None


def hold_key(text: str) -> str:
    """Keep a key file's contents in memory, and return the path at which this user's processes find it.

    Raises:
        SettingsError: the system has no files in memory (it is not Linux).
    """
    try:
        descriptor = os.memfd_create("netstorm-job-key", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise SettingsError(
            f"no file in memory for the job's key: {error}; make one with `netstorm keys new`, and set "
            f"{KEY_FILE}"
        ) from None
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


# The number of threads for each of several nodes on one machine.


def threads_each(nodes: int) -> int:
    """Return this machine's cores divided by `nodes`, at least 1.

    MXNet starts a thread for each core in each process, so that N processes would compete for them. Only
    cores that this process may use count (taskset, Slurm, containers with cpusets).
    """
    return max(1, usable_processors() // nodes)
