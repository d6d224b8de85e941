"""A job in an emulated WAN: each rank in its own namespace, the scheduler in one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netstorm.cli.launch.job import Job, Process
from netstorm.cli.launch.local_job import SUPERVISOR, node_process, scheduler_process
from netstorm.cli.launch.members import Member
from netstorm.cli.launch.variables.node import node_variables
from netstorm.cli.launch.variables.pytorch import Master, given_or, places, port_beside
from netstorm.errors import UsageError
from netstorm.settings import child_environment

if TYPE_CHECKING:
    from netstorm.lab.emulation.wan import Wan

__all__ = ["scheduler_rank", "wan_job"]


def scheduler_rank(text: str | None, size: int) -> int:
    """Return the rank in whose namespace the scheduler runs; 0 if `text` is None.

    Raises:
        UsageError: it is no rank.
    """
    if text is None:
        return 0
    if not text.isdecimal() or int(text) >= size:
        raise UsageError(f"--scheduler {text}: with --wan expected a rank, 0 to {size - 1}")
    return int(text)


def wan_job(
    *,
    wan: Wan,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    port: int,
    sites: Sequence[str | None],
    scheduler_at: int,
    ready_file: Path | None,
    ipv6: bool = False,
) -> Job:
    """Return a job whose processes run in the namespaces of `wan`, one node a rank. The changes in the
    network file begin when the nodes are started.

    Args:
        wan: a network that is up; the caller takes it down.
        command, folder: each node's words, and its working directory.
        environment: as `users_environment` returns it.
        port: the scheduler's; 0: any free port.
        sites, scheduler_at: the site of each rank; the rank in whose namespace the scheduler runs.
        ready_file: the scheduler writes its address to this file; None: it runs already, none is started.
        ipv6: all use the network's IPv6 addresses.

    Raises:
        SettingsError: a value that a node or the scheduler would refuse.
    """
    size = wan.network.size
    addresses = [wan.ipv6_address(rank) if ipv6 else wan.address(rank) for rank in range(size)]
    host = addresses[scheduler_at]

    def nodes(chosen_port: int | None) -> list[Process]:
        variables = _variables(addresses, environment, host, chosen_port or port or None, sites)
        return [
            node_process(command, folder, environment, own, supervisor=tuple(wan.command(rank, SUPERVISOR)))
            for rank, own in enumerate(variables)
        ]

    def started(chosen_port: int | None) -> list[Process]:
        made = nodes(chosen_port)
        wan.start_changes()
        return made

    nodes(None)  # wrong values are found before anything is started
    hosts = {Member(rank): wan.address(rank) for rank in range(size)}
    job = Job(size=size, scheduler=None, ready_file=ready_file, nodes=started, hosts=hosts)
    if ready_file is None:
        return job

    common = {"DMLC_PS_ROOT_URI": host, "DMLC_NUM_WORKER": size, "DMLC_PS_ROOT_PORT": port or None}

    def scheduler(chosen_port: int | None) -> Process:
        return scheduler_process(
            tuple(wan.command(scheduler_at, SUPERVISOR)),
            child_environment(environment, DMLC_NODE_HOST=host, **common),
            chosen_port or port,
            ready_file,
        )

    return dataclasses.replace(job, scheduler=scheduler(None), scheduler_at=scheduler)


def _variables(
    addresses: Sequence[str],
    environment: Mapping[str, str],
    scheduler: str,
    scheduler_port: int | None,
    sites: Sequence[str | None],
) -> Iterator[dict[str, str | int]]:
    """Yield the variables of each rank."""
    torch_port = port_beside(scheduler_port, fresh_host=True)  # rank 0 is alone in its namespace
    master = given_or(environment, Master(address=addresses[0], port=torch_port))
    for rank, (address, place) in enumerate(zip(addresses, places(addresses), strict=True)):
        own = node_variables(
            rank=rank,
            size=len(addresses),
            host=scheduler,
            port=scheduler_port,
            site=sites[rank],
            place=place,
            master=master,
        )
        own["DMLC_NODE_HOST"] = address
        yield own
