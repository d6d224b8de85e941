"""Writes what an example was asked to leave behind."""

from __future__ import annotations

from typing import Any

from digits.errors import ExampleError
from digits.options import TrainingOptions
from digits.results import EpochResult, digest, rank_path, save_json, save_weights

__all__ = ["Recorder"]


class Recorder:
    """Writes `--json`, `--save` and `--digest` of one rank."""

    def __init__(self, example: str, options: TrainingOptions, *, rank: int, ranks: int) -> None:
        """Raise `ExampleError` now rather than after hours, if a folder to write into is not there."""
        for option in (options.json, options.save):
            path = rank_path(option, rank)
            if path is not None and not path.parent.is_dir():
                raise ExampleError(f"{path} cannot be written: {path.parent} is not a folder")
        self._example = example
        self._options = options
        self._rank = rank
        self._ranks = ranks

    def epoch(self, epochs: list[EpochResult], weights_digest: str | None = None) -> None:
        """Write the results so far."""
        path = rank_path(self._options.json, self._rank)
        if path is not None:
            save_json(
                path,
                example=self._example,
                options=self._options,
                rank=self._rank,
                ranks=self._ranks,
                epochs=epochs,
                weights_digest=weights_digest,
            )

    def end(self, epochs: list[EpochResult], weights: dict[str, Any]) -> None:
        """Write the final weights, arrays by name, and their digest."""
        fingerprint = digest(weights)
        self.epoch(epochs, fingerprint)
        path = rank_path(self._options.save, self._rank)
        if path is not None:
            save_weights(path, weights)
        if self._options.digest:
            # In one write, newline and all: ranks may share a terminal.
            print(f"rank {self._rank}: weights sha256 {fingerprint}\n", end="", flush=True)
