"""Ranks that die, raise, are interrupted or end early, and what the others see."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from netstorm.errors import NetStormError
from tests.integration.torch.programs.begin import begin, error_of


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


def one_sum() -> None:
    """Make a sum and wait to be killed."""
    begin()
    dist.all_reduce(torch.ones(2))
    print("running", flush=True)
    time.sleep(80)


def begin_with_a_key(key: str) -> str:
    """Join a job; only rank 1 has a key. Return the error."""
    if os.environ["RANK"] == "1":
        os.environ["NETSTORM_KEY_FILE"] = key
    return error_of(begin)


def mixed(odd: int) -> Any:
    """Join a job; rank `odd` is a node of MXNet's."""
    rank = int(os.environ["RANK"])
    try:
        if rank == odd:
            from netstorm.kvstore.process.runtime import runtime_of_this_process
            from netstorm.settings import Settings

            settings = Settings.from_environment().changed(rank=rank)
            runtime_of_this_process(settings, framework="MXNet")
        else:
            # A store of its own: no other rank of PyTorch will come.
            dist.init_process_group("netstorm", store=HashStore(), rank=rank, world_size=2)
    except NetStormError as error:
        return str(error)
    return ""


def leave_together(when: str, number: int) -> list[int]:
    """Sum a flag that a signal sets; leave at the step at which some rank's is set, save, and end."""
    flag: list[int] = []

    def install() -> None:
        former = signal.getsignal(number)

        def handle(got: int, frame: FrameType | None) -> None:
            flag.append(got)
            if callable(former) and when == "composed":
                former(got, frame)

        signal.signal(number, handle)

    if when == "before":
        install()
    rank, _ = begin()
    if when != "before":
        install()
    for step in range(100_000):
        set_here = torch.tensor([float(bool(flag))])
        dist.all_reduce(set_here, op=dist.ReduceOp.MAX)
        if step == 3:
            print("running", flush=True)
        if set_here.item():
            if rank == 0:
                time.sleep(1)  # saves
            dist.barrier()
            dist.destroy_process_group()
            return [step, len(flag)]
    return []
