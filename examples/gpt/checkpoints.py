"""Checkpoints of all ranks, from which a job goes on after it was interrupted at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["Checkpoints"]

_KEPT: Final = 2
"""Steps of which a rank keeps its file: an interruption may come when not all ranks have the last one."""


class Checkpoints:
    """A rank's files in a folder. Each rank has its own, since ranks may differ between two sums."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ending = f"-rank-{rank}.pt"

    def save(self, step: int, parts: dict[str, Any]) -> None:
        """Write what `parts` return as their state, after a step."""
        path = self._path(step)
        part = path.with_suffix(".part")
        torch.save({name: each.state_dict() for name, each in parts.items()}, part)
        part.replace(path)
        for old in self._steps()[:-_KEPT]:
            self._path(old).unlink()

    def load(self, parts: dict[str, Any]) -> int:
        """Give `parts` the newest state that all ranks have; return its step, or 0 if there is none."""
        newest = torch.tensor(max(self._steps(), default=0))
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        step = int(newest)
        if step:
            saved = torch.load(self._path(step))
            for name, each in parts.items():
                each.load_state_dict(saved[name])
        return step

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08}{self._ending}"

    def _steps(self) -> list[int]:
        names = [path.name for path in self._folder.glob(f"step-*{self._ending}")]
        return sorted(int(name.removeprefix("step-").removesuffix(self._ending)) for name in names)
