"""Jobs on several hosts, through ssh or Slurm, and the host files that say which node runs where. A new
option of a host belongs here.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from netstorm.addresses import is_loopback, without_brackets
from netstorm.cli.launch.job import LaunchedJob, Process, start_message
from netstorm.cli.launch.shutdown import SCHEDULER, Member
from netstorm.cli.launch.variables import (
    FROM_ANOTHER_JOB,
    RESERVED,
    Master,
    given_or,
    variables_of_nodes,
)
from netstorm.errors import UsageError
from netstorm.launchers import port_beside
from netstorm.settings import FOREIGN_VARIABLES, child_environment, declarations
from netstorm.topology.files import MAX_NODES

__all__ = [
    "OPTIONS",
    "Placement",
    "as_ssh_takes_it",
    "check_host",
    "passed_on",
    "place",
    "read_hostfile",
    "remote_job",
    "through_ssh",
]


# A job on several hosts, through ssh or another program that connects standard input and output.
#
# Nothing is installed or left on the hosts, and only the name of the interpreter passes through a shell.

OPTIONS: Final = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""No terminal; no questions, which nobody could answer; a host that vanishes is noticed within 15 s."""

_LOCAL_ONLY: Final = {*RESERVED, *FROM_ANOTHER_JOB, "DMLC_NODE_HOST"}
"""Variables that are wrong on every other machine, or in every other job."""


def passed_on(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for other hosts: settings in `environment`, and those given explicitly."""
    ours = [declaration.variable for declaration in declarations().values()]
    wanted = {*ours, *FOREIGN_VARIABLES} - _LOCAL_ONLY
    return {name: environment[name] for name in wanted if environment.get(name)} | dict(given)


def through_ssh(ssh: Sequence[str], host: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `words` on a host; `ssh` are its first words."""
    return (*ssh, *OPTIONS, host, shlex.join(words))


def remote_job(
    *,
    placements: Sequence[Placement],
    command: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    scheduler_host: str | None,
    port: int,
    python: str,
    connect: Callable[[str, Sequence[str]], tuple[str, ...]],
    with_scheduler: bool,
    key: str | None = None,
    is_ssh: bool = True,
) -> LaunchedJob:
    """Return a job of a scheduler and nodes on other hosts.

    Args:
        placements: of all ranks, in any order.
        command: of each node.
        folder: working directory on the hosts.
        variables: as `passed_on` returns them.
        scheduler_host: as ssh expects it; None: the first node's.
        port: the scheduler's.
        python: the hosts' interpreter that has NetStorm.
        connect: returns the command that runs some words on a host.
        with_scheduler: whether to start the scheduler.
        key: contents of the job's key file; None: it has none.
        is_ssh: whether `connect` is ssh, which has an exit code of its own, and may leave processes behind.

    Raises:
        UsageError: nodes could not reach the scheduler, or a variable has a wrong value.
    """
    size = len(placements)
    host = scheduler_host or placements[0].host
    known = [placement.address for placement in placements if placement.host == host and placement.address]
    address = known[0] if known else _without_user(host)
    _check_reachable(host, placements)
    nodes_on = Counter(placement.host for placement in placements)
    remote = _Remote(connect, python, variables, nodes_on, key)
    nodes = []
    by_rank = sorted(placements, key=lambda placement: placement.rank)
    of_ranks = variables_of_nodes(
        [_without_user(placement.host) for placement in by_rank],
        [placement.site for placement in by_rank],
        scheduler=address,
        port=port,
        master=_master(by_rank, variables, port),
    )
    for placement, own in zip(by_rank, of_ranks, strict=True):
        if placement.address is not None:
            own["DMLC_NODE_HOST"] = placement.address
        nodes.append(remote.process(Member(placement.rank), placement.host, command, folder, own))
    schedulers = {"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": port}
    words = [python, "-m", "netstorm", "scheduler", "--launched"]
    scheduler = remote.process(SCHEDULER, host, words, None, {**schedulers, "DMLC_NUM_WORKER": size})
    return LaunchedJob(
        size=size,
        scheduler=scheduler if with_scheduler else None,
        ready_file=None,
        nodes=lambda _: nodes,
        scheduler_at=(lambda _: scheduler) if with_scheduler else None,
        hosts={SCHEDULER: host} | {Member(placement.rank): placement.host for placement in placements},
        is_remote=is_ssh,
        beside_scheduler=lambda words: connect(host, [python, "-m", "netstorm", *words]),
    )


@dataclass(frozen=True, slots=True)
class _Remote:
    """How processes are started on other hosts."""

    connect: Callable[[str, Sequence[str]], tuple[str, ...]]
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
        remote = [self.python, "-m", "netstorm.cli.launch.remote"]
        return Process(
            member=member,
            supervisor=self.connect(host, remote),
            environment=child_environment(None, **dict.fromkeys(_LOCAL_ONLY)),  # srun hands it on
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


def _master(by_rank: Sequence[Placement], variables: Mapping[str, str], scheduler_port: int) -> Master | None:
    """Return where PyTorch's rank 0 listens; None: its host's name means another machine on other hosts."""
    first = by_rank[0]
    elsewhere = any(not _is_loopback(placement.host) for placement in by_rank)
    address = first.address or _without_user(first.host)
    if _is_loopback(address) and elsewhere and "MASTER_ADDR" not in variables:
        return None
    return given_or(variables, Master(address=address, port=port_beside(scheduler_port)))


def _without_user(host: str) -> str:
    """Return a host without the user's name."""
    return host.rpartition("@")[2]


def _is_loopback(host: str) -> bool:
    return is_loopback(_without_user(host))


# Host files: which node runs on which host. A new option of a host belongs here.
#
# # host      options, in any order
# alice@tokyo-1   site=tokyo
# tokyo-2         site=tokyo slots=2
# paris-1         site=paris rank=0 address=203.0.113.7
# 2001:db8::5     site=oslo


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one node runs."""

    rank: int
    host: str
    """As ssh expects it: a name, an address or an alias, perhaps with `user@`."""
    site: str | None = None
    address: str | None = None
    """Address that the node advertises, and the scheduler if it is on this host; None: the one they find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    host: str
    slots: int = 1
    site: str | None = None
    rank: int | None = None
    address: str | None = None


_HOST: Final = re.compile(r"([^\s@=-][^\s@=]*@)?[^\s@=-][^\s@=]*")
"""No leading dash: ssh would read it as an option."""


def read_hostfile(path: Path) -> tuple[Placement, ...]:
    """Return the placement of every rank, in the order of the file.

    Raises:
        UsageError: begins with file and line, and says what is allowed there.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{path}: cannot read the host file: {error.strerror}") from None
    except UnicodeError as error:
        raise UsageError(f"{path}: cannot read the host file: {error}") from None
    return place(text, str(path))


def check_host(host: str, place: str) -> None:
    """Check that ssh can read this as a host.

    Raises:
        UsageError: begins with `place`.
    """
    if not _HOST.fullmatch(host):
        raise UsageError(
            f"{place}: {host!r} is no host: expected a name or address, perhaps with USER@ before it"
        )


def as_ssh_takes_it(host: str) -> str:
    """Return a host whose IPv6 address has no brackets."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{without_brackets(name)}"


def place(text: str, name: str) -> tuple[Placement, ...]:
    """Return the placement of every rank, in the order of the file, from its text.

    A line with `slots=N` stands for N nodes, whose ranks are consecutive if it has `rank=R`. Nodes without a
    rank get the remaining ranks, in the order of the file.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: begins with `name` and line, and says what is allowed there.
    """
    lines = []
    for number, written in enumerate(text.splitlines(), start=1):
        words = written.partition("#")[0].split()
        if words:
            lines.append(_read_line(words, number, name))
    total = sum(line.slots for line in lines)
    if total > MAX_NODES:
        raise UsageError(f"{name}: {total} nodes: expected at most {MAX_NODES}; check slots=")
    if not total:
        raise UsageError(f"{name}: no hosts in it; expected one a line: HOST [slots=N] [site=NAME] [rank=R]")
    owner: dict[int, _Line] = {}
    for line in lines:
        for rank in _ranks_of(line):
            if rank >= total:
                raise UsageError(
                    f"{name}, line {line.number}: rank={rank}: expected a rank from 0 to {total - 1}, since "
                    f"the file has {total} nodes"
                )
            if rank in owner:
                raise UsageError(
                    f"{name}, line {line.number}: rank {rank} is taken by line {owner[rank].number} "
                    f"({owner[rank].host}); give each rank to one node"
                )
            owner[rank] = line
    free = iter([rank for rank in range(total) if rank not in owner])
    return tuple(
        Placement(rank=rank, host=line.host, site=line.site, address=line.address)
        for line in lines
        for rank in _ranks_of(line) or [next(free) for _ in range(line.slots)]
    )


def _ranks_of(line: _Line) -> Sequence[int]:
    return range(line.rank, line.rank + line.slots) if line.rank is not None else ()


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ValueError(f"expected a whole number, at least {least}")
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ValueError("expected a name")
    return text


def _address(text: str) -> str:
    return without_brackets(_name(text))


_OPTIONS: Final[dict[str, Callable[[_Line, str], _Line]]] = {
    "slots": lambda line, text: replace(line, slots=_whole(text, 1)),
    "rank": lambda line, text: replace(line, rank=_whole(text, 0)),
    "site": lambda line, text: replace(line, site=_name(text)),
    "address": lambda line, text: replace(line, address=_address(text)),
}
"""How each option of a host changes its line; a `ValueError` if its value is not allowed."""


def _read_line(words: list[str], number: int, name: str) -> _Line:
    place = f"{name}, line {number}"
    host, *options = words
    check_host(host, place)
    line = _Line(number=number, host=as_ssh_takes_it(host))
    seen = set()
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in _OPTIONS:
            known = ", ".join(f"{option}=" for option in _OPTIONS)
            raise UsageError(f"{place}: {option!r}: expected one of {known}; one host a line")
        if key in seen:
            raise UsageError(f"{place}: {key}= is there twice")
        try:
            line = _OPTIONS[key](line, value)
        except ValueError as error:
            raise UsageError(f"{place}: {option!r}: {error}") from None
        seen.add(key)
    return line
