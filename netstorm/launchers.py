"""MPI's and Slurm's launchers: which rank a process is, and where its job's scheduler is.

Open MPI (4 and 5), Slurm's `srun`, and MPICH and Intel MPI (Hydra) tell each process its rank in variables of
their own. What NetStorm's or torchrun's variables say wins. If no scheduler is named, rank 0 starts one on
its own host, at a port that follows from the launcher's name of this start. So does the name of the job, by
which a scheduler refuses the nodes of another one that has, by accident, the same port.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Final

from netstorm.errors import UsageError
from netstorm.pslite.host_addresses import is_own_address, loopback_host
from netstorm.settings import Settings, foreign_variable, set_for_children

__all__ = ["Place", "first_host", "place_of_this_process", "port_beside", "settings_below", "take_place"]

_PORTS: Final = range(20_000, 31_000)
"""Below the range from which Linux gives a port to any connection, and with room for `_BESIDE`."""

_BESIDE: Final = 1000
"""From the scheduler's port to PyTorch's, as run_node.sh has it. Not 1 or 2: schedulers on one host tend to
have neighbouring ports.
"""

_HYDRA: Final = "hydra_pmi_proxy"
"""The process that starts the ranks of MPICH and Intel MPI on a host. They have no other name of the job."""

_NAME_SCHEDULER: Final = (
    "start `netstorm scheduler` on a host that all reach, and set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT for "
    "all ranks"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a launcher says of this process."""

    launcher: str
    rank: tuple[str, int]
    """Name and value of the variable that says it."""
    size: tuple[str, int]
    local_rank: int | None = None
    local_size: int | None = None
    start: str = ""
    """Names this start of the job, the same at all ranks; empty: nothing does."""
    first_host: str = ""
    """Of rank 0, for jobs of several hosts; empty: the launcher does not say."""
    on_first_host: bool = True
    """What the launcher says of this process's host, if it is rank 0."""

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size[1]

    @property
    def job(self) -> str:
        """A name for the job."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.start)[-64:]

    @property
    def port(self) -> int:
        """The scheduler's."""
        return _PORTS[zlib.crc32(self.start.encode()) % len(_PORTS)]


def port_beside(scheduler_port: int) -> int:
    """Return a port for PyTorch's rank 0 on a host where nothing can be tried beforehand."""
    return scheduler_port + (_BESIDE if scheduler_port + _BESIDE <= 65535 else -_BESIDE)


def settings_below(place: Place) -> Settings:
    """Return this process's settings, with the launcher's number of ranks if they have none."""
    given = foreign_variable("DMLC_NUM_WORKER")
    return Settings.from_environment(num_workers=None if given else place.size[1])


def take_place(place: Place, settings: Settings) -> tuple[str, int] | None:
    """Set this process's variables as its launcher says; scripts read them.

    Returns:
        Host and port at which this process is to start the scheduler; None: another one does, or is named.

    Raises:
        UsageError: variables contradict the launcher's, or do not say where the scheduler is.
    """
    ranks = _given("NETSTORM_RANK", settings.rank if settings.rank >= 0 else None, "RANK")
    sizes = _given(
        "DMLC_NUM_WORKER",
        settings.num_workers if settings.source("num_workers") == "environment" else None,
        "WORLD_SIZE",
    )
    named = {settings.source("scheduler_host"), settings.source("scheduler_port")} != {"default"}
    if (ranks and sizes) or (place.size[1] == 1 and (ranks or sizes or named)):
        return None  # of a launcher below this one, such as torchrun, or of a job of several launchers
    for given, said in ((ranks, place.rank), (sizes, place.size)):
        if given and given[1] != said[1]:
            raise UsageError(
                f"{given[0]}={given[1]} with {said[0]}={said[1]} of {place.launcher}: expected the same; "
                f"leave {given[0]} out, or, if this is a part of a larger job, set both NETSTORM_RANK and "
                "DMLC_NUM_WORKER"
            )
    variables: dict[str, object] = {
        "NETSTORM_RANK": place.rank[1],
        "RANK": place.rank[1],
        "DMLC_NUM_WORKER": place.size[1],
        "WORLD_SIZE": place.size[1],
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
    }
    if named:
        host, port = settings.scheduler_host, settings.scheduler_port
    else:
        host, port = _scheduler_host(place), place.port
        variables |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
        if settings.source("job") == "default":
            variables["NETSTORM_JOB"] = place.job
    variables |= {
        "MASTER_ADDR": loopback_host() if place.on_one_host else place.first_host or host,
        "MASTER_PORT": port_beside(port),
    }
    kept = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    set_for_children(
        **{
            name: value
            for name, value in variables.items()
            if value is not None and not (name in kept and foreign_variable(name))
        }
    )
    return None if named or place.rank[1] else (host, port)


def place_of_this_process() -> Place | None:
    """Return what this process's launcher says; None: it was started by none that is known here.

    mpirun below Slurm starts its own processes with `srun`, and below a batch script; their ranks are not
    Slurm's. So MPI's variables win.

    Raises:
        UsageError: a launcher says only half, or no number.
    """
    for rank, size, find in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", _of_open_mpi),
        ("PMI_RANK", "PMI_SIZE", _of_pmi),
    ):
        if foreign_variable(rank):
            return find((rank, _number(rank)), (size, _number(size)))
    if foreign_variable("SLURM_STEP_ID") and foreign_variable("SLURM_PROCID"):  # a batch script has no step
        return _of_slurm()
    if foreign_variable("PMIX_RANK"):
        size = next((name for name in ("DMLC_NUM_WORKER", "WORLD_SIZE") if foreign_variable(name)), "")
        if not size:
            raise UsageError(
                f"PMIX_RANK={foreign_variable('PMIX_RANK')}, and no variable says of how many ranks: set "
                f"DMLC_NUM_WORKER; {_NAME_SCHEDULER}"
            )
        return Place(
            launcher="PMIx",
            rank=("PMIX_RANK", _number("PMIX_RANK")),
            size=(size, _number(size)),
        )
    return None


def _of_open_mpi(rank: tuple[str, int], size: tuple[str, int]) -> Place:
    # Rank 0 is on mpirun's own host, unless a host file says otherwise. Version 4 gives mpirun's addresses
    # (orte_hnp_uri), as its nodes reach it; version 5 names its host in the job's name (prterun-HOST-PID@1).
    name = foreign_variable("PMIX_NAMESPACE") or foreign_variable("OMPI_MCA_ess_base_jobid") or ""
    uri = foreign_variable("OMPI_MCA_orte_hnp_uri") or ""
    if found := re.search(r"tcp://([^,:;]+)", uri) or re.search(r"tcp6://\[([^\],]+)", uri):
        host, here = found[1], is_own_address(found[1])
    else:
        found = re.match(r"prte(?:run)?-(.+)-\d+@\d+$", name)
        host = found[1] if found else ""
        here = host.partition(".")[0] == (foreign_variable("PMIX_HOSTNAME") or "").partition(".")[0]
    return Place(
        launcher="mpirun",
        rank=rank,
        size=size,
        local_rank=_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=_number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        start=f"mpi-{name}" if name else "",
        first_host=host,
        on_first_host=here,
    )


def _of_pmi(rank: tuple[str, int], size: tuple[str, int]) -> Place:
    if foreign_variable("SLURM_STEP_ID") and foreign_variable("SLURM_PROCID") == str(rank[1]):
        return _of_slurm()  # srun --mpi=pmi2
    if not foreign_variable("MPI_LOCALNRANKS"):
        return Place(launcher="PMI", rank=rank, size=size)
    import psutil  # noqa: PLC0415 - 10 ms of a processor, which few processes need

    proxies = (parent for parent in psutil.Process().parents() if parent.name().startswith(_HYDRA))
    proxy = next(proxies, None)
    return Place(
        launcher="mpiexec",
        rank=rank,
        size=size,
        local_rank=_number("MPI_LOCALRANKID"),
        local_size=_number("MPI_LOCALNRANKS"),
        start="" if proxy is None else f"mpi-{proxy.pid}",  # used on one host only
    )


def _of_slurm() -> Place:
    size = "SLURM_STEP_NUM_TASKS" if foreign_variable("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    tasks = _number(size)
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Place(
        launcher="srun",
        rank=("SLURM_PROCID", _number("SLURM_PROCID")),
        size=(size, tasks),
        local_rank=_number("SLURM_LOCALID"),
        local_size=tasks if foreign_variable("SLURM_STEP_NUM_NODES") == "1" else None,
        start="slurm-" + ".".join(foreign_variable(name) or "0" for name in names),
        first_host=first_host(foreign_variable("SLURM_STEP_NODELIST") or ""),
        on_first_host=foreign_variable("SLURM_NODEID") in (None, "0"),
    )


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of nodes, such as `node[03-05,07],gpu1`: node03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", first[0]) if first else ""


def _scheduler_host(place: Place) -> str:
    if not place.start:
        reason = "no variable names this start of the job, which all ranks would have to agree on"
    elif place.on_one_host:
        return loopback_host()
    elif not place.first_host:
        reason = f"its {place.size[1]} ranks are on several hosts, and no variable names that of rank 0"
    elif place.rank[1] == 0 and not place.on_first_host:
        reason = f"rank 0 would have to be on host {place.first_host}, where the others look for it"
    else:
        return place.first_host
    raise UsageError(f"{place.launcher} does not say where the scheduler is: {reason}; {_NAME_SCHEDULER}")


def _given(own: str, value: int | None, foreign: str) -> tuple[str, int] | None:
    """Return name and value of a variable that says it; None: none does."""
    if value is not None:
        return own, value
    return (foreign, _number(foreign)) if foreign_variable(foreign) else None


def _number(name: str) -> int:
    text = foreign_variable(name) or ""
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{name}={text!r}: expected a whole number from this process's launcher; with NETSTORM_RANK and "
            "DMLC_NUM_WORKER set for each process it does not matter"
        )
    return int(text)
