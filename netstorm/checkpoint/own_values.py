"""What one rank keeps for itself, such as the state of its random numbers: a tree and its tensors. Pure."""

from __future__ import annotations

import msgspec

from netstorm.checkpoint.tensors import Description, TensorBytes
from netstorm.checkpoint.values import flatten, unflatten
from netstorm.errors import CheckpointError

__all__ = ["decode_own", "encode_own"]


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Own(msgspec.Struct, frozen=True):
    tree: bytes
    tensors: tuple[_Tensor, ...]


def encode_own(value: object, tensors: TensorBytes) -> bytes:
    """Return a rank's own values as the bytes of a file.

    Raises:
        UsageError: names what a checkpoint cannot hold.
    """
    flat = flatten(value, tensors.is_tensor)
    found = []
    for tensor, name in zip(flat.tensors, flat.names, strict=True):
        kind, dtype, shape, size = tensors.describe(tensor, name)
        data = bytearray(size)
        tensors.copy(tensor, 0, size, memoryview(data))
        found.append(_Tensor(kind, dtype, shape, bytes(data)))
    return msgspec.msgpack.encode(_Own(flat.tree, tuple(found)))


def decode_own(data: bytes, tensors: TensorBytes) -> object:
    """Return what `encode_own` was given.

    Raises:
        CheckpointError: the bytes make no sense.
    """
    try:
        own = msgspec.msgpack.decode(data, type=_Own)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"a rank's own values in the checkpoint make no sense: {error}") from None
    restored = [
        tensors.restore(
            Description(one.kind, one.dtype, one.shape, len(one.data)), memoryview(bytearray(one.data))
        )
        for one in own.tensors
    ]
    return unflatten(own.tree, restored)
