"""`netstorm checkpoint`: shows checkpoints, and converts those of the former format, read here alone."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import typer

from netstorm.checkpoint.files import ShareWriter, complete_by_step, find_checkpoint
from netstorm.checkpoint.format import (
    Description,
    Index,
    NumpyTensors,
    Size,
    checksum,
    encode_tensors,
    numbered_file,
    step_of_folder,
    take_apart,
    unflatten,
)
from netstorm.cli.support import exit_on_usage_error
from netstorm.errors import CheckpointError, UsageError

__all__ = ["checkpoint"]

checkpoint: Final = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Show the checkpoints in a folder, or convert those of a former format.",
)

_PATIENCE_S: Final = 60.0


@checkpoint.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a job's checkpoints.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything but the tensors' values, as JSON.")
    ] = False,
) -> None:
    """Show the checkpoints in a folder: steps, who wrote them, and how large they are.

    \b
      netstorm checkpoint show /shared/run7
      netstorm checkpoint show --json /shared/run7

    With --json they are a list, with the type and the file of each tensor, and all that is not a tensor. Only
    the indices are read, so nothing is said of the other files' checksums.

    The exit code is 2 if there is no checkpoint, or an index is damaged.
    """
    with exit_on_usage_error():
        steps = complete_by_step(folder)
        if not steps:
            raise UsageError(f"{folder} has no checkpoints")
        complete = {step: _shown(folder, step) for step in sorted(steps) if steps[step]}
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode([*complete.values()])).decode())
        return
    for step in sorted(steps):
        if step not in complete:
            typer.echo(f"step {step}: only written in part")
            continue
        one = complete[step]
        when = datetime.fromtimestamp(one.written_at).astimezone().isoformat(" ", "seconds")
        typer.echo(
            f"step {step}: {one.framework}, job {one.job}, {one.ranks} ranks, {len(one.tensors)} tensors, "
            f"{one.bytes:,} bytes, {when}"
        )


class _Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a checkpoint."""

    step: int
    framework: str
    job: str
    ranks: int
    written_at: float
    bytes: int
    tensors: dict[str, tuple[str, str]]
    """Type and file of each."""
    values: object
    """The state, with names instead of tensors."""


def _shown(folder: Path, step: int) -> _Shown:
    stored = find_checkpoint(folder, step)
    assert stored is not None
    index = stored.index
    types = index.state.tensors
    return _Shown(
        step=step,
        framework=index.framework,
        job=index.job,
        ranks=index.world_size,
        written_at=index.written_at,
        bytes=index.metadata.total_size,
        tensors={name: (kind_and_type, index.weight_map[name]) for name, kind_and_type in types.items()},
        values=unflatten(index.state.values, [f"tensor {name}" for name in types]),
    )


@checkpoint.command()
def convert(
    old: Annotated[
        Path, typer.Argument(metavar="OLD", help="Folder of a job's checkpoints that NetStorm 0.2 wrote.")
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder to make; it must be new, or empty.")],
) -> None:
    """Convert all complete checkpoints that NetStorm wrote until 0.2; the old ones stay as they are.

    \b
      netstorm checkpoint convert /shared/run7 /shared/run7-new

    Every byte is checked. It needs twice a checkpoint's size of memory. Give the job the new folder then.

    The exit code is 2 if OLD has no such checkpoint, or one is damaged: remove its folder to do without it.
    """
    with exit_on_usage_error():
        if new.exists() and (not new.is_dir() or any(new.iterdir())):
            raise UsageError(f"{new} is there already: give the name of a new folder")
        folders = [
            entry
            for entry in (sorted(old.iterdir()) if old.is_dir() else ())
            if step_of_folder(entry.name) is not None and (entry / _MANIFEST).exists()
        ]
        if not folders:
            raise UsageError(f"{old} has no complete checkpoint of the format that NetStorm wrote until 0.2")
        for folder in folders:
            typer.echo(f"{folder} -> {_convert(folder, new)}")


# ------------------------------------------------------------------------------------------ the former format

_MANIFEST: Final = "manifest.json"
_FORMAT: Final = "netstorm-checkpoint-1"
_END: Final = re.compile(rb'(.*),\n "crc32c": "([0-9a-f]{8})"\n}\n', re.DOTALL)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    bytes: int
    crc32c: str


class _OldTensor(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    """First byte, among those of all shards."""
    bytes: int


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    framework: str
    job: str
    step: int
    world_size: int
    written_at: float
    rounds: dict[str, int]
    values: _File
    shards: tuple[_File, ...]
    own: tuple[_File, ...]
    tensors: tuple[_OldTensor, ...]


class _Own(msgspec.Struct, frozen=True):
    tree: bytes
    tensors: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    """Kind, type, shape and bytes of each."""


class _Kept(NamedTuple):
    """A tensor of a checkpoint, of any framework."""

    description: Description
    data: memoryview


class _KeptTensors(NumpyTensors):
    """Makes bytes of such tensors."""

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, _Kept)

    def describe(self, tensor: object, name: str) -> Description:
        assert isinstance(tensor, _Kept), name
        return tensor.description

    def data(self, tensor: object) -> memoryview:
        assert isinstance(tensor, _Kept)
        return tensor.data

    def restore(self, description: Description, data: memoryview) -> object:
        return _Kept(description, data)


def _convert(old: Path, new: Path) -> Path:
    """Convert one checkpoint, to a single file with all tensors, and return its folder.

    Raises:
        CheckpointError: names a file that is damaged, or cannot be written.
    """
    manifest = _read_manifest(old / _MANIFEST)
    data = memoryview(b"".join(_read(old, shard) for shard in manifest.shards))
    kept = [
        _kept(one.kind, one.dtype, one.shape, data[one.offset : one.offset + one.bytes])
        for one in manifest.tensors
    ]
    adapter = _KeptTensors()
    tree, tensors, described = take_apart(unflatten(_read(old, manifest.values), kept), adapter)
    total, own_trees = sum(one.bytes for one in described.values()), []
    for rank, file in enumerate(manifest.own):
        try:
            own = msgspec.msgpack.decode(_read(old, file), type=_Own)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{old / file.file} makes no sense: {error}") from None
        own_kept = [_kept(kind, dtype, shape, memoryview(data)) for kind, dtype, shape, data in own.tensors]
        own_tree, more, of_more = take_apart(
            unflatten(own.tree, own_kept), adapter, prefix=f"own.{rank}.", taken=tensors
        )
        own_trees.append(own_tree)
        tensors, described = tensors | more, described | of_more
    token = f"{secrets.randbits(48):012x}"
    index = Index(
        metadata=Size(total),
        weight_map=dict.fromkeys(described, numbered_file("model.safetensors", 0, 1, token)),
        framework=manifest.framework,
        job=manifest.job,
        step=manifest.step,
        token=token,
        world_size=manifest.world_size,
        written_at=manifest.written_at,
        rounds=manifest.rounds,
        files=(),
        state=tree,
        own=tuple(own_trees),
    )
    share = encode_tensors(described, lambda name: adapter.data(tensors[name]))
    writer = ShareWriter(
        base=new, index=index, ranks=(0,), place=0, share=share, own=None, keep=None, timeout_s=_PATIENCE_S,
        is_leaving=lambda: False,
    )  # fmt: skip
    return writer.run()


def _kept(kind: str, dtype: str, shape: Sequence[int], data: memoryview) -> _Kept:
    return _Kept(Description(kind, dtype, tuple(shape), len(data)), data)


def _read_manifest(path: Path) -> _Manifest:
    text = path.read_bytes()
    match = _END.fullmatch(text)
    if match is None or int(match[2], 16) != checksum(match[1]):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    try:
        manifest = msgspec.json.decode(text, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from None
    if manifest.format != _FORMAT:
        raise CheckpointError(f"{path} has the format {manifest.format!r}: expected {_FORMAT!r}")
    return manifest


def _read(folder: Path, file: _File) -> bytes:
    path = folder / Path(file.file).name
    if not path.exists():
        raise CheckpointError(f"{path} is missing, though the manifest names it")
    data = path.read_bytes()
    if len(data) != file.bytes or int(file.crc32c, 16) != checksum(data):
        raise CheckpointError(
            f"{path} is damaged: it has {len(data)} bytes and the checksum {checksum(data):08x}, and should "
            f"have {file.bytes} and {file.crc32c}"
        )
    return data
