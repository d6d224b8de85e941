"""What rank 0 shows of the training: a bar on a terminal, a line for each epoch elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import rich.progress

from digits.results import EpochResult

__all__ = ["Progress", "progress_of"]


class Progress:
    """Shows nothing: the ranks from 1, whose lines would repeat those of rank 0. Times each epoch for all."""

    def __init__(self, *, epochs: int, steps: int, samples_per_step: int) -> None:
        self.epochs = epochs
        self.steps = steps
        self.results: list[EpochResult] = []
        self._samples_per_step = samples_per_step
        self._step = 0
        self._loss = float("nan")
        self._started = time.monotonic()
        self._seconds = 0.0

    def step(self, loss: float) -> None:
        """Note one more step; `loss` is the epoch's mean so far. The epoch's clock stops at its last step."""
        self._loss = loss
        if self._step == 0:
            self.show(f"epoch {len(self.results) + 1}/{self.epochs}", 0)
        self._step += 1
        self._seconds = time.monotonic() - self._started
        self.show(f"epoch {len(self.results) + 1}/{self.epochs}  loss {loss:.4f}", 1)

    def finish_epoch(self, accuracy: float | None) -> None:
        """End an epoch, and start the next one's clock. `accuracy` is None where it was not measured."""
        result = EpochResult(
            epoch=len(self.results) + 1,
            loss=self._loss,
            accuracy=accuracy,
            samples_per_s=self.steps * self._samples_per_step / max(self._seconds, 1e-9),
            seconds=self._seconds,
        )
        self.results.append(result)
        reached = "" if accuracy is None else f"  accuracy {accuracy:.4f}"
        speed = f"{result.samples_per_s:.0f} samples/s"
        self.write(f"epoch {result.epoch}/{self.epochs}  loss {result.loss:.4f}{reached}  {speed}")
        self._step = 0
        self._started = time.monotonic()

    def show(self, text: str, steps: int) -> None:
        """Show where training is, `steps` further than before."""

    def write(self, line: str) -> None:
        """Write a line that stays."""

    def open(self) -> None:
        """Start the first epoch's clock."""
        self._started = time.monotonic()

    def __enter__(self) -> Progress:  # noqa: PYI034 - Self is from Python 3.11
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""


class _Lines(Progress):
    def write(self, line: str) -> None:
        print(line, flush=True)


class _Bar(Progress):
    def __init__(self, *, epochs: int, steps: int, samples_per_step: int) -> None:
        super().__init__(epochs=epochs, steps=steps, samples_per_step=samples_per_step)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            transient=True,
        )
        self._task = self._bar.add_task("", total=epochs * steps)

    def open(self) -> None:
        self._bar.start()
        super().open()

    def show(self, text: str, steps: int) -> None:
        self._bar.update(self._task, description=text, advance=steps)

    def write(self, line: str) -> None:
        self._bar.console.print(line, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def progress_of(*, rank: int, epochs: int, steps: int, samples_per_step: int) -> Progress:
    """Return what fits this rank and where its output goes. `samples_per_step` counts those of all ranks."""
    kind = Progress
    if rank == 0:
        kind = _Bar if sys.stdout.isatty() else _Lines
    return kind(epochs=epochs, steps=steps, samples_per_step=samples_per_step)
