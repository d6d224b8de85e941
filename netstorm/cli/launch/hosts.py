"""A job on several hosts, through ssh.

Nothing is installed or left on the hosts, and only the name of the interpreter passes through a shell.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.cli.launch.hostfile import Placement
from netstorm.cli.launch.job import Job, Process, start_message
from netstorm.cli.launch.members import SCHEDULER, Member
from netstorm.cli.launch.variables.node import RESERVED, node_variables
from netstorm.cli.launch.variables.pytorch import FROM_ANOTHER_JOB, Master, given_or, places, port_beside
from netstorm.errors import UsageError
from netstorm.settings import FOREIGN_VARIABLES, child_environment, declarations

__all__ = ["OPTIONS", "passed_on", "ssh_job"]

OPTIONS: Final = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""No terminal; no questions, which nobody could answer; a host that vanishes is noticed within 15 s."""

_LOCAL_ONLY: Final = {*RESERVED, *FROM_ANOTHER_JOB, "DMLC_NODE_HOST"}
"""Variables that are wrong on every other machine, or in every other job."""


def passed_on(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for other hosts: settings in `environment`, and those given explicitly."""
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
    key: str | None = None,
) -> Job:
    """Return a job of a scheduler and nodes on other hosts.

    Args:
        placements: of all ranks, in any order.
        command: of each node.
        folder: working directory on the hosts.
        variables: as `passed_on` returns them.
        scheduler_host: as ssh expects it; None: the first node's.
        port: the scheduler's.
        python: the hosts' interpreter that has NetStorm.
        ssh: the first words of the ssh command.
        with_scheduler: whether to start the scheduler.
        key: contents of the job's key file; None: it has none.

    Raises:
        UsageError: nodes could not reach the scheduler, or a variable has a wrong value.
    """
    size = len(placements)
    host = scheduler_host or placements[0].host
    known = [placement.address for placement in placements if placement.host == host and placement.address]
    address = known[0] if known else _name(host)
    _check_reachable(host, placements)
    nodes_on = Counter(placement.host for placement in placements)
    remote = _Remote(tuple(ssh), python, variables, nodes_on, key)
    nodes = []
    for placement, own in _variables(placements, variables, address, port):
        if placement.address is not None:
            own["DMLC_NODE_HOST"] = placement.address
        nodes.append(remote.process(Member(placement.rank), placement.host, command, folder, own))
    own = {"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": port}
    words = [python, "-m", "netstorm", "scheduler", "--launched"]
    scheduler = remote.process(SCHEDULER, host, words, None, {**own, "DMLC_NUM_WORKER": size})
    return Job(
        size=size,
        scheduler=scheduler if with_scheduler else None,
        ready_file=None,
        nodes=lambda _: nodes,
        scheduler_at=(lambda _: scheduler) if with_scheduler else None,
        hosts={SCHEDULER: host} | {Member(placement.rank): placement.host for placement in placements},
        is_remote=True,
    )


@dataclass(frozen=True, slots=True)
class _Remote:
    """How processes are started on other hosts."""

    ssh: tuple[str, ...]
    python: str
    variables: Mapping[str, str]
    nodes_on: Mapping[str, int]
    """Number of nodes, by host."""
    key: str | None
    """Contents of the job's key file, for the supervisor's standard input alone."""

    def process(
        self, member: Member, host: str, words: Sequence[str], folder: str | None, own: Mapping[str, object]
    ) -> Process:
        """Return a process that runs `words` on a host, with `own` variables besides the common ones."""
        merged = {**self.variables, **{name: str(value) for name, value in own.items()}}
        child_environment({}, **merged)  # checks the values here, or every host would report the same error
        remote = shlex.join([self.python, "-m", "netstorm.cli.launch.remote"])
        return Process(
            member=member,
            supervisor=(*self.ssh, *OPTIONS, host, remote),
            environment=child_environment(),
            start_message=start_message(
                command=list(words),
                folder=folder,
                variables=merged,
                nodes_here=max(1, self.nodes_on.get(host, 0)),
                key=self.key,
                reads=member == SCHEDULER,
            ),
        )


def _check_reachable(host: str, placements: Sequence[Placement]) -> None:
    """Check that the scheduler's host does not mean another machine on the nodes' hosts."""
    elsewhere = sorted({placement.host for placement in placements if not _is_loopback(placement.host)})
    if _is_loopback(host) and elsewhere:
        raise UsageError(
            f"the scheduler's host {host!r} is another machine for {elsewhere[0]!r}: give its name or address"
        )


def _variables(
    placements: Sequence[Placement], common: Mapping[str, str], scheduler: str, port: int
) -> Iterator[tuple[Placement, dict[str, str | int]]]:
    """Yield the placement and the variables of each rank, in order."""
    by_rank = sorted(placements, key=lambda placement: placement.rank)
    master = _master(by_rank, common, port)
    for placement, place in zip(by_rank, places([_name(one.host) for one in by_rank]), strict=True):
        own = node_variables(
            rank=placement.rank,
            size=len(by_rank),
            host=scheduler,
            port=port,
            site=placement.site,
            place=place,
            master=master,
        )
        yield placement, own


def _master(by_rank: Sequence[Placement], variables: Mapping[str, str], scheduler_port: int) -> Master | None:
    """Return where PyTorch's rank 0 listens; None: its host's name means another machine on other hosts."""
    first = by_rank[0]
    elsewhere = any(not _is_loopback(placement.host) for placement in by_rank)
    address = first.address or _name(first.host)
    if _is_loopback(address) and elsewhere and "MASTER_ADDR" not in variables:
        return None
    return given_or(variables, Master(address=address, port=port_beside(scheduler_port, fresh_host=False)))


def _name(host: str) -> str:
    """Return a host without the user's name."""
    return host.rpartition("@")[2]


def _is_loopback(host: str) -> bool:
    return is_loopback(_name(host))
