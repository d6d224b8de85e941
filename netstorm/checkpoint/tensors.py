"""How tensors become bytes, and bytes tensors: what a frontend tells of its framework. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol

import numpy as np

from netstorm.checkpoint.checksums import checksum_number
from netstorm.errors import CheckpointError, UsageError

__all__ = ["Description", "NumpyTensors", "TensorBytes"]


_NUMBERS: Final = "biufc"
"""NumPy's kinds of types that are numbers."""


class Description(NamedTuple):
    """What is known of a tensor besides its bytes."""

    kind: str
    """Whose it is."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class TensorBytes(Protocol):
    """The tensors of a framework as bytes, in C order and this machine's byte order (little-endian)."""

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor, also one that cannot be kept."""

    def describe(self, tensor: object, name: str) -> Description:
        """Describe a tensor.

        Raises:
            UsageError: it cannot be kept; says `name`, and what to keep instead.
        """

    def copy(self, tensor: object, begin: int, end: int, out: memoryview) -> None:
        """Copy some of its bytes to `out`, which is as long."""

    def checksum(self, tensor: object) -> int:
        """Return a checksum of its bytes."""

    def restore(self, description: Description, data: memoryview) -> object:
        """Return a tensor in the memory of `data`, which is writable and nobody else's.

        Raises:
            CheckpointError: there is no such type here.
        """


class NumpyTensors:
    """NumPy's arrays as bytes; a frontend hands them over if it finds some in a state."""

    KIND: Final = "numpy"

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is an array."""
        return isinstance(value, np.ndarray)

    def describe(self, tensor: object, name: str) -> Description:
        """Describe an array."""
        assert isinstance(tensor, np.ndarray)
        if tensor.dtype.kind not in _NUMBERS:
            raise UsageError(f"{name} is an array of {tensor.dtype}: a checkpoint holds arrays of numbers")
        return Description(self.KIND, tensor.dtype.newbyteorder("=").name, tensor.shape, tensor.nbytes)

    def copy(self, tensor: object, begin: int, end: int, out: memoryview) -> None:
        """Copy some of its bytes."""
        out[:] = _bytes(tensor)[begin:end].data

    def checksum(self, tensor: object) -> int:
        """Return the CRC-32C of its bytes."""
        return checksum_number(_bytes(tensor).data)

    def restore(self, description: Description, data: memoryview) -> object:
        """Return an array."""
        try:
            dtype = np.dtype(description.dtype)
        except (TypeError, ValueError, SyntaxError):
            dtype = np.dtype(object)
        if dtype.kind not in _NUMBERS:
            raise CheckpointError(f"the checkpoint has an array of type {description.dtype!r}")
        sides = description.shape
        if min(sides, default=0) < 0 or math.prod(sides) * dtype.itemsize != len(data):
            raise CheckpointError(f"the checkpoint has an array of {len(data)} bytes for {description}")
        return np.frombuffer(data, dtype).reshape(description.shape)


def _bytes(tensor: object) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    assert isinstance(tensor, np.ndarray)
    native = tensor.astype(tensor.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8)
