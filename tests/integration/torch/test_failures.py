"""PyTorch ranks that die, raise, are interrupted or end early: all others hear of it and end, and so does the
scheduler that rank 0 has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from netstorm.errors import NetStormError
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.pslite.keys import JobKey
from netstorm.settings import Settings
from tests.integration.forking import ROOT
from tests.integration.jobs import Job
from tests.integration.torch.begin import begin, error_of
from tests.integration.torch.ranks import Ranks

SHORT = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "3"}
DEADLINE_S = 30


def scheduler_of(ranks: Ranks) -> psutil.Process:
    """Return the scheduler that rank 0 has started."""
    (found,) = psutil.Process(ranks.pids[0]).children()
    return found


def assert_ends(process: psutil.Process) -> None:
    """Assert that a process ends by itself. If its parent is dead, nobody here may wait for it."""
    deadline = time.monotonic() + DEADLINE_S
    with suppress(psutil.NoSuchProcess):  # it may end between two questions, too
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} does not end"
            time.sleep(0.05)


def sum_until_it_fails(ends: int = -1, how: str = "") -> str:
    """Sum over and over; return the error. Rank `ends` leaves the loop after a few rounds."""
    rank, _ = begin()
    tensor = torch.ones(1000)
    for step in range(1_000_000):
        try:
            dist.all_reduce(tensor.fill_(1))
        except NetStormError as error:
            print("failed:", error, flush=True)
            return f"{type(error).__name__}: {error}"
        if step == 3:
            print("running", flush=True)
        if step == 10 and rank == ends:
            if how == "raises":
                raise ValueError("the data set is gone")
            if how == "leaves":
                dist.destroy_process_group()
            return ""
    return ""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named_to_all_others_and_the_scheduler_ends(ranks, victim):
    ranks.start(sum_until_it_fails, 3, **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    scheduler = scheduler_of(ranks)
    ranks.send(victim, signal.SIGKILL)
    began = time.monotonic()
    for rank in {0, 1, 2} - {victim}:
        ended = ranks.end(rank)
        assert ended.code == 1, ended.text
        assert ranks.answer(rank).startswith("NodeLost: "), ended.text
        assert f"rank {victim}" in ranks.answer(rank)
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
    ranks.start(sum_until_it_fails, 3, ends=1, how=how, **SHORT)
    for rank in (0, 2):
        ended = ranks.end(rank)
        assert ended.code == 1, ended.text
        assert said in ranks.answer(rank)
        assert "rank 1" in ranks.answer(rank)
    assert ranks.end(1).code == (1 if how == "raises" else ranks.end(1).code)


def test_ctrl_c_at_one_rank_ends_all(ranks):
    ranks.start(sum_until_it_fails, 3, **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    ranks.send(1, signal.SIGINT)
    assert ranks.end(1).code != 0
    for rank in (0, 2):
        ended = ranks.end(rank)
        assert ended.code == 1, ended.text
        assert "rank 1" in ranks.answer(rank)
        assert "interrupted by Ctrl-C (SIGINT)" in ranks.answer(rank)


def one_sum() -> None:
    """Make a sum and wait to be killed."""
    begin()
    dist.all_reduce(torch.ones(2))
    print("running", flush=True)
    time.sleep(80)


def test_ctrl_c_at_all_ranks_ends_them_and_the_scheduler(ranks):
    ranks.start(one_sum, 3, **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    scheduler = scheduler_of(ranks)
    for rank in range(3):
        ranks.send(rank, signal.SIGINT)
    assert all(ranks.end(rank).code != 0 for rank in range(3))
    assert_ends(scheduler)


SIGNALS = (
    ("before", signal.SIGTERM),
    ("after", signal.SIGTERM),
    ("after", signal.SIGUSR1),
    ("after", signal.SIGINT),
    ("composed", signal.SIGTERM),
)
"""When the script installs its handler, beside the beginning of the group, or around NetStorm's own."""


def leave_together(schedulers: list[str]) -> None:
    """In a job for each kind, sum a flag that a signal sets at rank 1; all leave at the same step."""
    for (when, number), scheduler in zip(SIGNALS, schedulers, strict=True):
        os.environ["DMLC_PS_ROOT_URI"], os.environ["DMLC_PS_ROOT_PORT"] = scheduler.split(":")
        flag: list[int] = []

        def handle(got: int, _: FrameType | None, flag: list[int] = flag) -> None:
            flag.append(got)

        if when == "before":
            signal.signal(number, handle)
        rank, _ = begin(store=f" of {scheduler}")
        former: Any = signal.getsignal(number)

        def composed(got: int, frame: FrameType | None, flag: list[int] = flag, former: Any = former) -> None:
            flag.append(got)
            former(got, frame)

        if when != "before":
            signal.signal(number, composed if when == "composed" else handle)
        print(f"running {scheduler}", flush=True)
        asked = torch.zeros(1)
        while not asked.item():
            dist.all_reduce(asked.fill_(len(flag)), op=dist.ReduceOp.MAX)
        if rank == 0:
            time.sleep(0.3)  # saves
        assert flag == [number] * rank
        dist.barrier()
        dist.destroy_process_group()
        signal.signal(number, former)


def test_ranks_agree_on_a_signal_that_one_of_them_handles_and_end_well_together(ranks, tmp_path):
    with ExitStack() as stack:
        schedulers = []
        for place in range(len(SIGNALS)):
            (tmp_path / str(place)).mkdir()
            schedulers.append(stack.enter_context(Job(tmp_path / str(place), 2)).address)
        ranks.start(leave_together, 2, schedulers=schedulers, DMLC_NUM_WORKER=2)
        for (_, number), scheduler in zip(SIGNALS, schedulers, strict=True):
            ranks.wait_until_said(1, f"running {scheduler}")
            ranks.send(1, number)
        ranks.answers()


def mixed(odd: int) -> str:
    """Join a job; rank `odd` is a node of MXNet's. Return the error."""
    rank = int(os.environ["RANK"])
    if rank == odd:
        settings = Settings.from_environment().changed(rank=rank)
        return error_of(runtime_of_this_process, settings, framework="MXNet")
    # A store of its own: no other rank of PyTorch will come.
    return error_of(dist.init_process_group, "netstorm", store=HashStore(), rank=rank, world_size=2)


def test_nodes_of_mxnet_and_of_pytorch_in_one_job_are_refused_by_name(ranks, tmp_path: Path):
    (tmp_path / "job").mkdir()
    with Job(tmp_path / "job", 2) as job:
        host, port = job.address.split(":")
        ranks.start(mixed, 2, odd=1, DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port, DMLC_NUM_WORKER=2)
        deadline = time.monotonic() + DEADLINE_S
        refused = [tmp_path / f"answer{rank}" for rank in range(2)]  # whichever comes second; the first waits
        while not any(path.exists() and path.read_text() for path in refused):
            assert time.monotonic() < deadline, ranks.said(0) + ranks.said(1)
            time.sleep(0.05)
    found = "".join(path.read_text() for path in refused if path.exists())
    assert "MXNet" in found
    assert "PyTorch" in found


def begin_with_a_key(key: str) -> str:
    """Join a job; only rank 1 has a key. Return the error."""
    if os.environ["RANK"] == "1":
        os.environ["NETSTORM_KEY_FILE"] = key
    return error_of(begin)


def test_what_rank_0_writes_into_the_store_without_the_jobs_key_is_refused(ranks, tmp_path: Path):
    JobKey.create(tmp_path / "job.key")
    ranks.start(begin_with_a_key, 2, key=str(tmp_path / "job.key"))
    ranks.end(1)  # rank 0 would wait for another one
    assert ranks.answer(1).startswith("NotAuthorised: 'netstorm/0/1/offer/0' in PyTorch's store is '")
    assert "give all ranks the same file" in ranks.answer(1)


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
        timeout=280,
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
