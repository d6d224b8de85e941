"""Names of the folders and files of checkpoints, and which of them may go. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = [
    "MANIFEST",
    "failed_file",
    "folder_of_step",
    "own_file",
    "part_file",
    "shard_file",
    "step_of_folder",
    "superfluous",
    "values_file",
]

MANIFEST: Final = "manifest.json"

_FOLDER: Final = re.compile(r"step-(\d{6,18})")


def folder_of_step(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:06}"


def step_of_folder(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None: it is something else."""
    found = _FOLDER.fullmatch(name)
    if found is None or folder_of_step(int(found[1])) != name:
        return None
    return int(found[1])


def shard_file(rank: int, ranks: int, token: str) -> str:
    """Return the name of the file with a rank's share of the tensors."""
    return f"shard-{_place(rank, ranks)}-{token}.bin"


def own_file(rank: int, ranks: int, token: str) -> str:
    """Return the name of the file with what a rank keeps for itself."""
    return f"own-{_place(rank, ranks)}-{token}.msgpack"


def values_file(token: str) -> str:
    """Return the name of the file with all that is not a tensor."""
    return f"values-{token}.msgpack"


def part_file(rank: int, ranks: int, token: str) -> str:
    """Return the name of the file by which a rank says that its share is there."""
    return f"part-{_place(rank, ranks)}-{token}.json"


def failed_file(rank: int, ranks: int, token: str) -> str:
    """Return the name of the file by which a rank says why its share will not come."""
    return f"failed-{_place(rank, ranks)}-{token}.txt"


def superfluous(complete: Mapping[int, bool], keep: int | None) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first: never the newest complete one.

    Args:
        complete: by step, whether its checkpoint is complete.
        keep: number of complete ones to keep, at least 1; None: all.
    """
    kept = sorted((step for step, is_complete in complete.items() if is_complete), reverse=True)
    if not kept:
        return []
    oldest = kept[-1] if keep is None else kept[: max(1, keep)][-1]
    return sorted(_older(complete, oldest, newest=kept[0]))


def _older(complete: Mapping[int, bool], oldest: int, *, newest: int) -> Iterable[int]:
    for step, is_complete in complete.items():
        # A half-written one before the newest complete one will never be completed.
        if step < oldest or (not is_complete and step < newest):
            yield step


def _place(rank: int, ranks: int) -> str:
    return f"{rank:05}-of-{ranks:05}"
