"""One worker process of `blocking.py`: times calls on a store, and rounds beside a busy main thread.

Commands: calls (times every call of some steps of training), round (times one step; `beside` says what the
main thread does meanwhile), laps (counts what it gets done while nothing is under way), give_way (all ranks
but 0 leave the cores to rank 0, and their main threads wait in rounds).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import netstorm.frontends.mxnet  # noqa: F401 - registers dist_sync_netstorm
from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx
from workers.laps import LAPS, run_beside

_LOWEST_PRIORITY = 19


class Script:
    """What a training script has: weights in a store with an optimizer, and gradients to push."""

    def __init__(self, store: str, *, size: int, keys: int, optimizer: str) -> None:
        self.store: Any = mx.kv.create(store)
        self.gives_way = False
        shape = (max(1, size // 4 // keys),)
        self.weights = [mx.nd.ones(shape) for _ in range(keys)]
        self.gradients = [mx.nd.ones(shape) for _ in range(keys)]
        if optimizer != "none":
            self.store.set_optimizer(mx.optimizer.create(optimizer))
        for key, weight in enumerate(self.weights):
            self.store.init(key, weight)
        mx.nd.waitall()

    def calls(self, operation: str, steps: int) -> Answer:
        """Return wall and processor seconds of each call; the step's end is waited for, outside of them."""
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(steps):
            for key, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
                # A pull that nothing was pushed for is answered from what is there: push first, untimed.
                if operation == "pull":
                    self.store.push(key, gradient, priority=-key)
                work, began = time.thread_time(), time.perf_counter()
                if operation == "push":
                    self.store.push(key, gradient, priority=-key)
                elif operation == "pull":
                    self.store.pull(key, out=weight, priority=-key)
                else:
                    self.store.pushpull(key, gradient, out=weight, priority=-key)
                wall.append(time.perf_counter() - began)
                cpu.append(time.thread_time() - work)
            mx.nd.waitall()
            if (
                operation == "push"
            ):  # MXNet's server answers a push once the round is complete; a pull waits for it
                for key, weight in enumerate(self.weights):
                    self.store.pull(key, out=weight, priority=-key)
                mx.nd.waitall()
        return {"wall_s": wall, "cpu_s": cpu}

    def round(self, beside: str) -> Answer:
        """Return start and end of one step, and how many laps of `beside` the main thread did meanwhile."""
        start = time.monotonic()
        for key, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
            self.store.pushpull(key, gradient, out=weight, priority=-key)

        def wait() -> None:
            for weight in self.weights:
                weight.wait_to_read()

        finish, laps = run_beside("nothing" if self.gives_way else beside, wait)
        return {"start": start, "finish": finish, "laps": laps}

    @property
    def rank(self) -> int:
        """This rank."""
        rank: int = self.store.rank
        return rank

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.store._barrier()  # noqa: SLF001 -- MXNet's name

    def close(self) -> None:
        """Do nothing: the store leaves the job when the process ends."""

    def laps(self, beside: str, seconds: float) -> Answer:
        """Return how many laps a second the main thread does while nothing is under way."""
        laps = 0
        lap = LAPS[beside]
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            lap()
            laps += 1
        return {"laps_per_s": laps / (time.monotonic() - start)}


def give_way() -> None:
    """Let every other process go first: all threads of this one get the lowest priority.

    Where the kernel groups processes by session (autogroup, sched(7)), priorities count within a group, and
    the group has one of its own.
    """
    for thread in Path("/proc/self/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), _LOWEST_PRIORITY)
    with contextlib.suppress(OSError):  # no such groups here
        Path("/proc/self/autogroup").write_text(str(_LOWEST_PRIORITY))


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job with the script that the command line describes."""
    store, size, keys, optimizer = sys.argv[1:]
    script = Script(store, size=int(size), keys=int(keys), optimizer=optimizer)

    def do(command: Answer) -> Answer:
        if command["do"] == "calls":
            return script.calls(command["operation"], command["steps"])
        if command["do"] == "give_way":
            script.gives_way = script.store.rank != 0
            if script.gives_way:
                give_way()
            return {"measured": not script.gives_way}
        if command["do"] == "laps":
            return script.laps(command["beside"], command["seconds"])
        return script.round(command["beside"])

    return {"rank": script.store.rank}, do


if __name__ == "__main__":
    serve(join)
