"""A whole state in one buffer, for the way from one rank to another: the encoding of checkpoints. Pure."""

from __future__ import annotations

from typing import Final
from zlib import crc32

import msgspec

from netstorm.checkpoint.checksums import Bytes, checksum_number
from netstorm.checkpoint.layout import ALIGNMENT, Layout
from netstorm.checkpoint.tensors import Description, TensorBytes
from netstorm.checkpoint.values import flatten, unflatten
from netstorm.errors import CheckpointError

__all__ = ["digest", "pack", "unpack"]

_LENGTH: Final = 8
"""Bytes of the length of what comes before the tensors."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    tree: bytes
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]


def pack(state: object, tensors: TensorBytes) -> bytearray:
    """Return a tree of plain values and tensors as bytes. Equal states have equal bytes.

    Raises:
        UsageError: names what cannot be kept, and says what to keep instead.
    """
    head, flat = _described(state, tensors)
    encoded = msgspec.msgpack.encode(head)
    begin = _aligned(_LENGTH + len(encoded))
    layout = Layout.of([one[3] for one in head.tensors], 1)
    buffer = bytearray(begin + layout.total)
    buffer[:_LENGTH] = len(encoded).to_bytes(_LENGTH, "little")
    buffer[_LENGTH : _LENGTH + len(encoded)] = encoded
    with memoryview(buffer) as view:
        for tensor, offset, size in zip(flat, layout.offsets, layout.sizes, strict=True):
            if size:
                tensors.copy(tensor, 0, size, view[begin + offset : begin + offset + size])
    return buffer


def unpack(buffer: Bytes, tensors: TensorBytes) -> object:
    """Return the state that `pack` was given. Its tensors are in the memory of `buffer`.

    Raises:
        CheckpointError: the bytes are no such state.
    """
    view = memoryview(buffer)
    length = int.from_bytes(view[:_LENGTH], "little")
    try:
        head = msgspec.msgpack.decode(view[_LENGTH : _LENGTH + length], type=_Head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{len(view)} bytes of state make no sense: {error}") from None
    layout = Layout.of([one[3] for one in head.tensors], 1)
    begin = _aligned(_LENGTH + length)
    if len(view) != begin + layout.total:
        raise CheckpointError(f"a state of {len(view)} bytes should have {begin + layout.total}")
    found = [
        tensors.restore(Description(*one), view[begin + offset : begin + offset + one[3]])
        for one, offset in zip(head.tensors, layout.offsets, strict=True)
    ]
    return unflatten(head.tree, found)


def digest(state: object, tensors: TensorBytes) -> int:
    """Return a number below 2^63 that tells states apart, without copying them: two CRCs of 32 bits.

    Raises:
        UsageError: as for `pack`.
    """
    head, flat = _described(state, tensors)
    sums = b"".join(tensors.checksum(tensor).to_bytes(4, "little") for tensor in flat)
    return checksum_number(sums) << 31 | crc32(msgspec.msgpack.encode(head)) >> 1


def _described(state: object, tensors: TensorBytes) -> tuple[_Head, tuple[object, ...]]:
    flat = flatten(state, tensors.is_tensor)
    described = [tensors.describe(one, name) for one, name in zip(flat.tensors, flat.names, strict=True)]
    return _Head(
        flat.tree, tuple((one.kind, one.dtype, one.shape, one.bytes) for one in described)
    ), flat.tensors


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
