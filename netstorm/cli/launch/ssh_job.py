"""A job on several hosts, through ssh: nothing is installed or left there, and nothing passes through a shell
but the name of the interpreter.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from netstorm.cli.launch.hostfile import Placement
from netstorm.cli.launch.job import RESERVED, Job, Process, node_variables, order_text
from netstorm.cli.launch.members import SCHEDULER, Member
from netstorm.errors import UsageError
from netstorm.settings import FOREIGN_VARIABLES, child_environment, declarations

__all__ = ["OPTIONS", "passed_on", "ssh_job"]

OPTIONS: Final = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""No terminal there; no questions, which nobody could answer; a host that has vanished is noticed in 15 s."""

_LOCAL_ONLY: Final = {*RESERVED, "DMLC_NODE_HOST"}
"""Settings of this machine's environment that would be wrong on every other."""


def passed_on(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hosts get: our settings that are set here, and what was given explicitly."""
    ours = [declaration.variable for declaration in declarations().values()]
    wanted = {*ours, *FOREIGN_VARIABLES} - _LOCAL_ONLY
    return {name: environment[name] for name in wanted if environment.get(name)} | dict(given)


def ssh_job(
    *,
    placements: Sequence[Placement],
    command: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    scheduler_host: str | None,
    port: int,
    python: str,
    ssh: Sequence[str],
    with_scheduler: bool,
) -> Job:
    """Return a job of a scheduler and nodes on other hosts.

    Args:
        placements: of all ranks, in any order.
        command: of each node.
        folder: working directory there.
        variables: as `passed_on` returns them.
        scheduler_host: as ssh takes it; None: the first node's.
        port: the scheduler's.
        python: interpreter there, which has NetStorm.
        ssh: the words that ssh begins with.
        with_scheduler: whether to start it.

    Raises:
        UsageError: nodes could not reach the scheduler, or a variable has a wrong value.
    """
    size = len(placements)
    host = scheduler_host or placements[0].host
    known = [each.address for each in placements if each.host == host and each.address is not None]
    address = known[0] if known else host.rpartition("@")[2]
    elsewhere = sorted({each.host for each in placements if not _is_loopback(each.host)})
    if _is_loopback(host) and elsewhere:
        raise UsageError(
            f"the scheduler's host {host!r} is another machine for {elsewhere[0]!r}: give its name or address"
        )
    crowd = Counter(each.host for each in placements)

    def process(
        member: Member, where: str, words: Sequence[str], there: str | None, own: Mapping[str, object]
    ) -> Process:
        merged = {**variables, **{name: str(value) for name, value in own.items()}}
        child_environment({}, **merged)  # for its checks: the same error from every host is no help
        return Process(
            member=member,
            keeper=(*ssh, *OPTIONS, where, shlex.join([python, "-m", "netstorm.cli.launch.remote"])),
            environment=child_environment(),
            order=order_text(
                command=list(words), folder=there, variables=merged, nodes_here=max(1, crowd[where])
            ),
        )

    nodes = []
    for each in sorted(placements, key=lambda each: each.rank):
        own = node_variables(rank=each.rank, size=size, host=address, port=port, site=each.site)
        if each.address is not None:
            own["DMLC_NODE_HOST"] = each.address
        nodes.append(process(Member(each.rank), each.host, command, folder, own))
    own = {"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": port}
    words = [python, "-m", "netstorm", "scheduler", "--print-outcome"]
    scheduler = process(SCHEDULER, host, words, None, {**own, "DMLC_NUM_WORKER": size})
    return Job(
        size=size,
        scheduler=scheduler if with_scheduler else None,
        ready_file=None,
        nodes=lambda _: nodes,
        hosts={SCHEDULER: host} | {Member(each.rank): each.host for each in placements},
    )


def _is_loopback(host: str) -> bool:
    name = host.rpartition("@")[2]
    return name == "localhost" or name.startswith("127.")
