"""A state as one buffer: a tree of plain values, and behind it the bytes of its arrays.

Reading it runs no code: the tree is that of checkpoints (`netstorm.checkpoint.format`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from netstorm.checkpoint.format import flatten, unflatten
from netstorm.errors import CheckpointError
from netstorm.protocol.frames import Buffer

__all__ = ["Array", "decode", "encode"]

Array = npt.NDArray[np.generic]

_ALIGNED: Final = 64
"""Arrays begin at multiples of so many bytes."""
_LENGTH_BYTES: Final = 8


class _Head(msgspec.Struct, frozen=True, array_like=True):
    tree: bytes
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    """Type and shape of each."""


def encode(state: object) -> Buffer:
    """Return a tree of plain values and NumPy's arrays as bytes.

    Raises:
        UsageError: names a member that is neither.
    """
    values, tensors = flatten(state, lambda value: isinstance(value, np.ndarray))
    arrays = deque(_in_order(array) for array in tensors.values())
    head = msgspec.msgpack.encode(
        _Head(values, tuple((array.dtype.name, array.shape) for array in arrays))
    )
    size = _aligned(_LENGTH_BYTES + len(head)) + sum(_aligned(array.nbytes) for array in arrays)
    content = np.zeros(size, np.uint8)
    content[:_LENGTH_BYTES] = np.frombuffer(len(head).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    content[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = np.frombuffer(head, np.uint8)
    begin = _aligned(_LENGTH_BYTES + len(head))
    while arrays:  # each is freed once it has been copied
        array = arrays.popleft()
        content[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        begin += _aligned(array.nbytes)
    return content.data


def decode(content: Buffer) -> object:
    """Return the tree; its arrays are views of `content`.

    Raises:
        CheckpointError: the bytes are no such state.
    """
    whole = np.frombuffer(content, np.uint8)
    length = int.from_bytes(whole[:_LENGTH_BYTES].tobytes(), "little")
    try:
        head = msgspec.msgpack.decode(whole[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes(), type=_Head)
        begin, arrays = _aligned(_LENGTH_BYTES + length), []
        for name, shape in head.arrays:
            dtype = np.dtype(name)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            arrays.append(whole[begin : begin + size].view(dtype).reshape(shape))
            begin += _aligned(size)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise CheckpointError(f"the job's state makes no sense: {error}") from None
    return unflatten(head.tree, arrays)


def _in_order(array: object) -> Array:
    assert isinstance(array, np.ndarray)
    return np.ascontiguousarray(array).reshape(array.shape)  # a scalar stays one


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
