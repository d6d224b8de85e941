"""What rank 0 shows of the training."""

from __future__ import annotations

import time

__all__ = ["Report"]


class Report:
    """Writes loss and speed now and then. Other ranks than 0 write nothing."""

    def __init__(self, *, rank: int, steps: int, every: int, tokens_per_step: int) -> None:
        """Begin.

        Args:
            rank: this one.
            steps: of the whole training.
            every: how many steps a line is about.
            tokens_per_step: of all ranks together.
        """
        self._rank = rank
        self._steps = steps
        self._every = every
        self._tokens = tokens_per_step
        self._losses: list[float] = []
        self._began = time.monotonic()

    def step(self, number: int, loss: float) -> None:
        """Note the loss of a step, counted from 1."""
        self._losses.append(loss)
        if number % self._every and number != self._steps:
            return
        if self._rank == 0:
            speed = len(self._losses) * self._tokens / max(time.monotonic() - self._began, 1e-9)
            mean = sum(self._losses) / len(self._losses)
            print(f"step {number}/{self._steps}  loss {mean:.4f}  {speed:.0f} tokens/s", flush=True)
        self._losses.clear()
        self._began = time.monotonic()
