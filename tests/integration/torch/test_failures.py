"""PyTorch ranks that die, raise, are interrupted or end early: all others hear of it and end, and so does the
scheduler that rank 0 has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from netstorm.pslite.keys import JobKey
from tests.integration.forking import ROOT
from tests.integration.jobs import Job
from tests.integration.torch.ranks import Ranks
from tests.integration.torch.test_async_calls import answer

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import failing

SHORT = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "3"}
DEADLINE_S = 30


def scheduler_of(ranks: Ranks) -> psutil.Process:
    """Return the scheduler that rank 0 has started."""
    (found,) = (child for child in psutil.Process(ranks.pids[0]).children() if "scheduler" in child.cmdline())
    return found


def assert_ends(process: psutil.Process) -> None:
    """Assert that a process ends by itself. If its parent is dead, nobody here may wait for it."""
    deadline = time.monotonic() + DEADLINE_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} does not end"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named_to_all_others_and_the_scheduler_ends(ranks, victim):
    ranks.start(failing.sum_until_it_fails, 3, **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    scheduler = scheduler_of(ranks)
    ranks.send(victim, signal.SIGKILL)
    began = time.monotonic()
    for rank in {0, 1, 2} - {victim}:
        ended = ranks.end(rank)
        assert ended.code == 1, ended.text
        assert answer(ranks, rank).startswith("NodeLost: "), ended.text
        assert f"rank {victim}" in answer(ranks, rank)
    assert time.monotonic() - began < DEADLINE_S
    assert_ends(scheduler)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "ValueError: the data set is gone"),
        ("leaves", "has finished without it"),
        ("ends", "rank 1"),
    ],
)
def test_a_rank_that_raises_or_ends_before_the_others_is_named_to_them(ranks, how, said):
    ranks.start(failing.sum_until_it_fails, 3, ends=1, how=how, **SHORT)
    for rank in (0, 2):
        ended = ranks.end(rank)
        assert ended.code == 1, ended.text
        assert said in answer(ranks, rank)
        assert "rank 1" in answer(ranks, rank)
    assert ranks.end(1).code == (1 if how == "raises" else ranks.end(1).code)


def test_ctrl_c_at_one_rank_ends_all(ranks):
    ranks.start(failing.sum_until_it_fails, 3, **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    ranks.send(1, signal.SIGINT)
    assert ranks.end(1).code != 0
    for rank in (0, 2):
        ended = ranks.end(rank)
        assert ended.code == 1, ended.text
        assert "rank 1" in answer(ranks, rank)
        assert "interrupted by Ctrl-C (SIGINT)" in answer(ranks, rank)


def test_ctrl_c_at_all_ranks_ends_them_and_the_scheduler(ranks):
    ranks.start(failing.one_sum, 3, **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    scheduler = scheduler_of(ranks)
    for rank in range(3):
        ranks.send(rank, signal.SIGINT)
    assert all(ranks.end(rank).code != 0 for rank in range(3))
    assert_ends(scheduler)


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("before", signal.SIGTERM),
        ("composed", signal.SIGTERM),
        ("after", signal.SIGINT),
    ],
)
def test_ranks_agree_on_a_signal_that_one_of_them_handles_and_end_well_together(ranks, when, number):
    ranks.start(failing.leave_together, 2, when=when, number=int(number), **SHORT)
    for rank in range(2):
        ranks.wait_until_said(rank, "running")
    ranks.send(1, number)
    (left, none), (also, one) = ranks.answers()
    assert left == also
    assert (none, one) == (0, 1)


def test_nodes_of_mxnet_and_of_pytorch_in_one_job_are_refused_by_name(ranks, tmp_path: Path):
    (tmp_path / "job").mkdir()
    with Job(tmp_path / "job", 2) as job:
        host, port = job.address.split(":")
        ranks.start(failing.mixed, 2, odd=1, DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port, DMLC_NUM_WORKER=2)
        deadline = time.monotonic() + DEADLINE_S
        refused = [tmp_path / f"answer{rank}" for rank in range(2)]  # whichever comes second; the first waits
        while not any(path.exists() and path.read_text() for path in refused):
            assert time.monotonic() < deadline, ranks.said(0) + ranks.said(1)
            time.sleep(0.05)
    found = "".join(path.read_text() for path in refused if path.exists())
    assert "MXNet" in found
    assert "PyTorch" in found


def test_what_rank_0_writes_into_the_store_without_the_jobs_key_is_refused(ranks, tmp_path: Path):
    JobKey.create(tmp_path / "job.key")
    ranks.start(failing.begin_with_a_key, 2, key=str(tmp_path / "job.key"))
    ranks.end(1)  # rank 0 would wait for another one
    assert answer(ranks, 1).startswith("NotAuthorised: 'netstorm/0/1/offer/0' in PyTorch's store is '")
    assert "give all ranks the same file" in answer(ranks, 1)


TRAIN = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("netstorm")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
path = sys.argv[1]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
first = 0
if os.path.exists(path):
    kept = torch.load(path)
    first = kept["step"] + 1
    model.module.load_state_dict(kept["model"])
os.write(1, f"rank {rank} attempt {attempt} begins at step {first}\\n".encode())  # ranks share a pipe
for step in range(first, 10):
    model(torch.full((2, 4), 1.0 + rank)).sum().backward()
    if rank == 0:
        torch.save({"step": step, "model": model.module.state_dict()}, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
    if rank == 1 and attempt == 0 and step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"rank {rank} has done step {step}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_was_killed_and_it_goes_on_from_its_checkpoint(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--max-restarts", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "train.py", "checkpoint"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            **SHORT,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    begun = sorted(line for line in ended.stdout.splitlines() if "attempt" in line)
    assert begun == sorted(
        f"rank {rank} attempt {attempt} begins at step {5 * attempt}"
        for rank in range(3)
        for attempt in range(2)
    )
    assert sum("has done step 9" in line for line in ended.stdout.splitlines()) == 3
