"""One node of `netstorm bench churn` whose sums torchft makes, on its own Gloo: a replica group of its own.

It takes the commands and says the lines of `workers.churn`. A step that does not commit is made again.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import signal
from datetime import timedelta
from typing import Any, Final

import numpy as np

from harness.churn_work import Work, WrongSum, say
from harness.lifeline import commands_from_stdin

_TIMEOUT: Final = timedelta(seconds=60)


def main() -> int:
    """Run, and return the exit code."""
    faulthandler.register(signal.SIGUSR1)
    commands = commands_from_stdin()
    torch, distributed, torchft, work_of = (
        importlib.import_module(name)
        for name in ("torch", "torch.distributed", "torchft", "torch.distributed.distributed_c10d")
    )
    work = Work(int(os.environ["RANK"]))
    store: Any = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        work.step = int(state["step"])
        for name in work.state:
            work.state[name][:] = state[name].numpy()

    manager: Any = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {
            "step": work.step,
            **{name: torch.from_numpy(state.copy()) for name, state in work.state.items()},
        },
        min_replica_size=int(os.environ["BENCHMARK_LEAST"]),
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["BENCHMARK_LIGHTHOUSE"],
        replica_id=f"rank_{work.rank}",
        hostname="127.0.0.1",
        init_sync=False,  # all begin with zeros
    )
    say(event="joined", rank=work.rank)
    try:
        while not _take_step(work, manager, torch, work_of.ReduceOp.SUM, commands):
            pass
    except (RuntimeError, WrongSum) as error:
        say(event="error", text=f"{type(error).__name__}: {error}")
        return 1
    say(event="ended")
    manager.shutdown(wait=False)
    return 0


def _take_step(
    work: Work, manager: Any, torch: Any, total: Any, commands: queue.SimpleQueue[str | None]
) -> bool:
    while not commands.empty():
        work.ends = work.ends or commands.get() in ("end", None)
    manager.start_quorum()
    tensors = {name: torch.from_numpy(work.contribution(name)) for name in work.sizes}
    for pending in [manager.allreduce(tensor, reduce_op=total) for tensor in tensors.values()]:
        pending.wait()
    if not manager.should_commit():  # who had no state has loaded that of another one here
        return False
    results = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
    ranks = sum(1 << rank for rank in work.ranks_in(results))
    return work.complete(results, ranks)


if __name__ == "__main__":
    # Manager and process group leave threads that do not end.
    code = main()
    os._exit(code)
