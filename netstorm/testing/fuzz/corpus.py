"""A corpus in a folder: one file an input, named by its content, in a folder for each target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["input_name", "load_corpus", "save_corpus"]


def input_name(data: bytes) -> str:
    """Return the name of an input's file: the same input has the same name everywhere."""
    return hashlib.sha256(data).hexdigest()[:16]


def load_corpus(folder: Path, target: str) -> list[bytes]:
    """Return the inputs of a target, in the order of their names; none if there is no such folder."""
    files = sorted((folder / target).glob("*")) if (folder / target).is_dir() else []
    return [path.read_bytes() for path in files if path.is_file()]


def save_corpus(folder: Path, target: str, inputs: Iterable[bytes]) -> None:
    """Write inputs that are not there yet."""
    place = folder / target
    place.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        path = place / input_name(data)
        if not path.exists():
            path.write_bytes(data)
