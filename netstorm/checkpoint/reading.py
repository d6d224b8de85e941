"""Reading a checkpoint: the newest complete one, every byte checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from netstorm.checkpoint.checksums import Bytes, checksum, checksum_number
from netstorm.checkpoint.folder import complete_by_step, explained_errors
from netstorm.checkpoint.manifest import File, Manifest, decode_manifest
from netstorm.checkpoint.names import MANIFEST, folder_of_step
from netstorm.errors import CheckpointError

__all__ = ["Contents", "Found", "find_checkpoint", "latest_step", "next_step", "read_checkpoint"]

_log = logging.getLogger(__name__)

_UNUSABLE: Final = "restore it from a copy, or remove {folder} to use the checkpoint before it"


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint, whose files have yet to be read."""

    folder: Path
    text: bytes
    """Its manifest as it is in the file."""
    manifest: Manifest

    @property
    def digest(self) -> int:
        """A number that differs from that of any other checkpoint."""
        return checksum_number(self.text)


@dataclass(frozen=True, slots=True)
class Contents:
    """All bytes of a checkpoint, checked."""

    text: bytes
    manifest: Manifest
    tree: bytes
    payload: memoryview
    """Of all tensors; writable."""
    own: tuple[bytes, ...]

    def parts(self) -> list[Bytes]:
        """Return what to send to a rank that cannot read the files; `of_parts` makes contents of it."""
        return [self.text, self.tree, self.payload, *self.own]

    @classmethod
    def of_parts(cls, parts: Sequence[Bytes]) -> Contents:
        """Return the contents that another rank has read."""
        text, tree, payload, *own = parts
        manifest = decode_manifest(bytes(text), "the manifest that rank 0 has sent")
        return cls(bytes(text), manifest, bytes(tree), memoryview(payload), tuple(map(bytes, own)))

    def tensor(self, place: int) -> memoryview:
        """Return the bytes of a tensor, writable."""
        entry = self.manifest.tensors[place]
        return self.payload[entry.offset : entry.offset + entry.bytes]


def latest_step(path: str | Path) -> int | None:
    """Return the step of the newest complete checkpoint in a folder; None: there is none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return max((step for step, complete in complete_by_step(Path(path)).items() if complete), default=None)


def next_step(path: str | Path, least: int | None) -> int:
    """Return a step for a new checkpoint: after those of all others in a folder, and not before `least`.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return max(max(complete_by_step(Path(path)), default=-1) + 1, least or 0)


def find_checkpoint(base: Path, step: int | None = None) -> Found | None:
    """Return the newest complete checkpoint, or that of `step`; None: there is none at all.

    Those that are half-written are skipped, with a warning.

    Raises:
        CheckpointError: the one of `step` is missing or half-written, or the manifest is damaged.
    """
    steps = complete_by_step(base)
    if step is not None and not steps.get(step):
        have = ", ".join(str(one) for one in sorted(steps) if steps[one]) or "none"
        why = "was only written in part" if step in steps else "does not exist"
        raise CheckpointError(f"{base / folder_of_step(step)} {why}; complete ones are of steps: {have}")
    newest = step if step is not None else latest_step(base)
    for other in sorted(steps, reverse=True):
        if step is None and not steps[other] and (newest is None or other > newest):
            _log.warning(
                "%s is skipped: it was only written in part (it has no manifest)",
                base / folder_of_step(other),
            )
    if newest is None:
        return None
    folder = base / folder_of_step(newest)
    path = folder / MANIFEST
    with explained_errors(path):
        text = path.read_bytes()
    return Found(folder, text, decode_manifest(text, str(path)))


def read_checkpoint(found: Found) -> Contents:
    """Read and check all files of a checkpoint.

    Raises:
        CheckpointError: names a file that is missing or damaged.
    """
    manifest, folder = found.manifest, found.folder
    payload = np.empty(manifest.total, np.uint8).data
    for shard in manifest.shards:
        _read(folder, shard, payload[shard.begin : shard.begin + shard.bytes])
    tree = _read_bytes(folder, manifest.values)
    own = tuple(_read_bytes(folder, file) for file in manifest.own)
    return Contents(found.text, manifest, tree, payload, own)


def _read_bytes(folder: Path, file: File) -> bytes:
    data = bytearray(file.bytes)
    _read(folder, file, memoryview(data))
    return bytes(data)


def _read(folder: Path, file: File, into: memoryview) -> None:
    path = folder / file.file
    advice = _UNUSABLE.format(folder=folder)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, though the manifest names it: {advice}") from None
    if size != file.bytes:
        raise CheckpointError(f"{path} has {size} bytes, and should have {file.bytes}: {advice}")
    with explained_errors(path), path.open("rb", buffering=0) as stream:
        done = 0
        while done < file.bytes:
            count = stream.readinto(into[done:])
            if not count:
                raise CheckpointError(f"{path} ends after {done} bytes of {file.bytes}: {advice}")
            done += count
    if checksum(into) != file.crc32c:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {checksum(into)}, and should be {file.crc32c}: {advice}"
        )
