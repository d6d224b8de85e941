"""What an example found, and the files that it writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digits.errors import ExampleError
from digits.options import TrainingOptions

__all__ = ["EpochResult", "digest", "rank_path", "save_json", "save_weights"]

Weights = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One epoch on one rank."""

    epoch: int
    """From 1."""
    loss: float
    """Mean over this rank's training samples."""
    accuracy: float | None
    """On all test samples; rank 0 measures it, the weights being the same on all ranks."""
    samples_per_s: float
    """Trained by all ranks together, without the time of the test."""
    seconds: float


def digest(weights: Weights) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = np.ascontiguousarray(weights[name])
        total.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        total.update(value.tobytes())
    return total.hexdigest()


def rank_path(pattern: str | None, rank: int) -> Path | None:
    """Return the file that `rank` writes, or None if it writes none."""
    if pattern is None:
        return None
    if "{rank}" in pattern:
        return Path(pattern.replace("{rank}", str(rank)))
    return Path(pattern) if rank == 0 else None


def save_weights(path: Path, weights: Weights) -> None:
    """Write an npz file of the trained weights; running means are each rank's own, and not in it."""
    with _replacing(path) as part, part.open("wb") as file:
        np.savez(file, **weights)


def save_json(
    path: Path,
    *,
    example: str,
    options: TrainingOptions,
    rank: int,
    ranks: int,
    epochs: list[EpochResult],
    weights_digest: str | None,
) -> None:
    """Write results so far; called after each epoch, so that another program can follow."""
    content = {
        "example": example,
        "options": asdict(options),
        "rank": rank,
        "ranks": ranks,
        "epochs": [asdict(epoch) for epoch in epochs],
        "digest": weights_digest,
    }
    with _replacing(path) as part:
        part.write_text(json.dumps(content, indent=2, default=str) + "\n")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that takes its place at the end, so that nobody reads half of it.

    Raises:
        ExampleError: the folder does not exist or may not be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise ExampleError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
