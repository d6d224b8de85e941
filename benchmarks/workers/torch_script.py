"""A PyTorch script for `busy.py`: asynchronous all-reduces, and a main thread that is busy meanwhile."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from harness.serving import Answer
from workers.laps import run_beside

__all__ = ["TorchScript"]


class TorchScript:
    """Gradients in several tensors, summed over all ranks."""

    def __init__(self, *, size: int, keys: int) -> None:
        dist.init_process_group("netstorm")
        self.rank = dist.get_rank()
        self._gradients = [torch.ones(max(1, size // 4 // keys)) for _ in range(keys)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def round(self, beside: str) -> Answer:
        """Return start and end of one step, and how many laps of `beside` the main thread did meanwhile."""
        start = time.monotonic()
        works = [dist.all_reduce(gradient, async_op=True) for gradient in self._gradients]

        def wait() -> None:
            for work in works:
                work.wait()

        finish, laps = run_beside(beside, wait)
        for gradient in self._gradients:
            gradient.fill_(1.0)
        return {"start": start, "finish": finish, "laps": laps}

    def close(self) -> None:
        """Leave the job."""
        dist.destroy_process_group()
