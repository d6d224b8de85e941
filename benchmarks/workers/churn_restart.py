"""One node of `netstorm bench churn` under torchrun: Gloo, and a checkpoint every N steps, from which all
begin again when one has died.

It tells the parent by datagrams, as `workers.churn` says lines: standard output is the agent's.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness import churn_work
from harness.churn_work import Work, WrongSum

_TIMEOUT: Final = timedelta(seconds=60)


def main() -> int:
    """Run, and return the exit code."""
    faulthandler.register(signal.SIGUSR1)
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch, distributed = (importlib.import_module(name) for name in ("torch", "torch.distributed"))
    parent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def say(**values: Any) -> None:
        parent.sendto(
            json.dumps({"rank": rank, "pid": os.getpid(), **values}).encode(), str(folder / "socket")
        )

    churn_work.say = say
    distributed.init_process_group("gloo", timeout=_TIMEOUT)
    work = Work(rank)
    _load(work, folder)
    say(event="joined")
    over = False
    while not over:
        work.ends = (folder / "end").exists()
        tensors = {name: torch.from_numpy(work.contribution(name)) for name in work.sizes}
        for pending in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors.values()]:
            pending.wait()
        results = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
        try:
            found = work.ranks_in(results)
        except WrongSum as error:
            say(event="error", text=str(error))
            return 1
        if found != list(range(ranks)):
            say(event="error", text=f"step {work.step} is the sum of ranks {found}")
            return 1
        over = work.complete(results, (1 << ranks) - 1)
        if rank == 0 and work.step % every == 0:
            _save(work, folder)
    say(event="ended")
    distributed.destroy_process_group()
    return 0


def _save(work: Work, folder: Path) -> None:
    with (folder / "checkpoint.new").open("wb") as file:
        np.savez(file, step=np.array(work.step), **work.state)
    (folder / "checkpoint.new").replace(folder / "checkpoint.npz")


def _load(work: Work, folder: Path) -> None:
    if not (folder / "checkpoint.npz").exists():
        return
    with np.load(folder / "checkpoint.npz") as state:
        work.step = int(state["step"])
        for name in work.state:
            work.state[name][:] = state[name]


if __name__ == "__main__":
    sys.exit(main())
