"""The text to learn: the source code of Python's standard library, which is on every machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

__all__ = ["CHARACTERS", "Batches", "load_text"]

CHARACTERS: Final = 128
"""ASCII; every other character is read as a question mark."""

_LONGEST: Final = 4_000_000
"""Characters that are read: enough for hours, and loaded in a moment."""


def load_text() -> torch.Tensor:
    """Return the text as numbers of characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        if len(text) >= _LONGEST:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:_LONGEST].long()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Where a rank's batches are in the text: other places at each rank and in each step."""

    text: torch.Tensor
    rank: int
    batch_size: int
    context: int
    """Characters of a sample."""
    seed: int

    def steps(self, first: int, last: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and, one character further on, what is to be predicted, for steps in a range.

        A step's batch depends on its number alone, so a job that resumes goes on as it would have.
        """
        places = torch.arange(self.context + 1)
        for step in range(first, last):
            random = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 4096 + self.rank)
            starts = torch.randint(len(self.text) - self.context, (self.batch_size, 1), generator=random)
            sample = self.text[starts + places]
            yield sample[:, :-1], sample[:, 1:]
