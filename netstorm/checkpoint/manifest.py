"""A checkpoint's manifest: what it holds, in which files, and their checksums. Pure.

A checkpoint is complete if, and only if, it has a manifest: it is written last. It is JSON, so that one can
look at it. It ends with a checksum of itself, and has those of all other files.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from netstorm.checkpoint.checksums import checksum
from netstorm.errors import CheckpointError

__all__ = ["FORMAT", "File", "Manifest", "Shard", "TensorEntry", "decode_manifest", "encode_manifest"]

FORMAT: Final = "netstorm-checkpoint-1"
_END: Final = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\n')
_END_LENGTH: Final = len(b',\n "crc32c": "01234567"\n}\n')


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the checkpoint."""

    file: str
    """Its name in the checkpoint's folder."""
    bytes: int
    crc32c: str


class Shard(File, frozen=True, kw_only=True):
    """A file with one rank's share of the tensors' bytes."""

    rank: int
    begin: int
    """First of these bytes, among those of all tensors."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor."""

    name: str
    """Its place in the state, such as "model.0.weight"."""
    dtype: str
    shape: tuple[int, ...]
    kind: str
    """Whose tensor it is: "torch" or "numpy"."""
    offset: int
    """First byte, among those of all tensors."""
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds."""

    format: str
    framework: str
    """Of the program that wrote it: "MXNet" or "PyTorch"."""
    job: str
    """Name of the job that wrote it, `NETSTORM_JOB`."""
    step: int
    token: str
    """Of the call that wrote it: tells its files from those of another attempt."""
    world_size: int
    """How many ranks wrote it."""
    written_at: float
    """Seconds since 1970."""
    total: int
    """Bytes of all tensors, and between them."""
    rounds: dict[str, int]
    """The number of the last round of each key; PyTorch has no keys."""
    values: File
    """All that is not a tensor."""
    shards: tuple[Shard, ...]
    """In order; together they are all bytes of the tensors."""
    own: tuple[File, ...]
    """What each rank keeps for itself, by rank; empty: nothing."""
    tensors: tuple[TensorEntry, ...]

    def files(self) -> tuple[File, ...]:
        """Return all files but the manifest."""
        return (self.values, *self.shards, *self.own)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as the text of its file."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    head = text.removesuffix(b"\n}")
    return head + f',\n "crc32c": "{checksum(head)}"\n}}\n'.encode()


def decode_manifest(text: bytes, path: str) -> Manifest:
    """Return the manifest in a file.

    Args:
        text: of the file.
        path: for messages.

    Raises:
        CheckpointError: it is damaged, or of another version of the format.
    """
    head, end = text[:-_END_LENGTH], _END.fullmatch(text[-_END_LENGTH:])
    if end is None or end[1].decode() != checksum(head):
        raise CheckpointError(
            f"{path} is damaged, or no manifest of a checkpoint: its checksum is wrong ({len(text)} bytes); "
            "restore it from a copy, or remove its folder to use the checkpoint before it"
        )
    try:
        form = msgspec.json.decode(text, type=_Format).format
        if form != FORMAT:
            raise CheckpointError(
                f"{path} has the format {form!r}, and this version of NetStorm reads {FORMAT!r}: read it "
                "with the version that wrote it"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from None
    _check(manifest, path)
    return manifest


class _Format(msgspec.Struct, frozen=True):
    format: str


def _check(manifest: Manifest, path: str) -> None:
    """Check what readers rely on."""
    names = [file.file for file in manifest.files()]
    wrong = next((name for name in names if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)), None)
    end = 0
    for shard in manifest.shards:
        if shard.begin != end or shard.bytes < 0:
            wrong = wrong or shard.file
        end += shard.bytes
    for tensor in manifest.tensors:
        if not 0 <= tensor.offset <= tensor.offset + tensor.bytes <= manifest.total:
            wrong = wrong or tensor.name
    if wrong is not None or end != manifest.total:
        raise CheckpointError(f"{path} contradicts itself at {wrong or 'the number of bytes'}: do not use it")
