"""`netstorm launch --slurm`: a job on the nodes of Slurm's allocation, in a batch script or below `salloc`.

Each rank, and the scheduler, is a job step of one task. So a rank can be started again alone, and one that is
lost takes no other with it. As through ssh, what it runs and the job's key come over standard input.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from netstorm.cli.launch.hosts import Placement
from netstorm.errors import UsageError
from netstorm.launchers import Place

__all__ = ["meeting_place", "placements_in", "slots_of", "through_srun"]

_SRUN: Final = (
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",  # or what the allocation's variable says would contradict
    "--overlap",  # the ranks of a node and the scheduler share what the job has there
    "--cpu-bind=none",
)

_TIMEOUT_S: Final = 60


def through_srun(host: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `words` on a node of the allocation."""
    return (*_SRUN, f"--nodelist={host}", *words)


def placements_in(
    environment: Mapping[str, str], hosts_of: Callable[[str], Sequence[str]] | None = None
) -> tuple[Placement, ...]:
    """Return where the ranks of an allocation run: on each node as many as it has tasks, in Slurm's order.

    Args:
        environment: with the allocation's variables.
        hosts_of: expands a list of nodes, such as node[03-05]; None: `scontrol` does.

    Raises:
        UsageError: there is no allocation, or its variables cannot be read.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UsageError(
            "--slurm: SLURM_JOB_NODELIST is not set: expected an allocation, in a script for sbatch or below "
            "salloc; without one: netstorm launch --hosts FILE"
        )
    hosts = (hosts_of or _scontrol)(nodes)
    text = environment.get("SLURM_TASKS_PER_NODE") or f"1(x{len(hosts)})"
    slots = slots_of(text)
    if len(slots) != len(hosts):
        raise UsageError(
            f"SLURM_TASKS_PER_NODE={text} with SLURM_JOB_NODELIST={nodes}: expected a number for each of "
            f"{len(hosts)} nodes"
        )
    on = [host for host, count in zip(hosts, slots, strict=True) for _ in range(count)]
    return tuple(Placement(rank=rank, host=host) for rank, host in enumerate(on))


def slots_of(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form: 2(x3),1 is 2, 2, 2, 1.

    Raises:
        UsageError: it is something else.
    """
    parts = [re.fullmatch(r"([1-9]\d{0,4})(?:\(x([1-9]\d{0,4})\))?", part) for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"SLURM_TASKS_PER_NODE={text!r}: expected numbers of tasks, such as 2(x3),1")
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def meeting_place(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return the scheduler's port and the job's name, which no other start of a job on these nodes has."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    start = ".".join(["slurm-launch", *(environment.get(name) or "0" for name in names)])
    place = Place(launcher="netstorm launch --slurm", rank=("", 0), size=("", 1), start=start)
    return place.port, place.job


def _scontrol(nodes: str) -> list[str]:
    try:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],  # noqa: S607 -- wherever this cluster has it
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--slurm: scontrol cannot say which nodes {nodes} are: {error}") from None
    if said.returncode:
        raise UsageError(f"--slurm: scontrol cannot say which nodes {nodes} are: {said.stderr.strip()}")
    return said.stdout.split()
