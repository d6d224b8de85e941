"""The form of dense values. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.kvstore.values.chunk_sum import ChunkSum
from netstorm.kvstore.values.form import Array
from netstorm.protocol.collectives import Element
from netstorm.protocol.frames import Buffer

__all__ = ["Dense"]


class Dense:
    """The form of values that all travel, as they are in memory. See `Form`."""

    __slots__ = ("_dtype", "_element", "_item_bytes")

    codec: Final = 0

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self._dtype: Final = dtype
        self._item_bytes: Final = dtype.itemsize
        self._element: Final = Element[dtype.name.upper()]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the values."""
        return self._dtype

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._element)

    def own(self, source: Array, start: int, end: int) -> Array:
        """Return a view of the user's source."""
        return source[start:end]

    def write(
        self, destination: Array, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Copy a result to the user's destination."""
        destination[start:end] = 0 if payload is None else np.frombuffer(payload, self._dtype)

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` values; None: nothing."""
        size = memoryview(payload).nbytes
        right = elements * self._item_bytes
        return None if size == right else f"has {size} bytes, not {right}"
