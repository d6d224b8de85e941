"""The form of float32 values that travel as float16 or bfloat16. Pure.

Within a node they are summed in float32, so each hop rounds once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.kvstore.values.chunk_sum import ChunkSum
from netstorm.kvstore.values.elements import STORED, narrowed, widened
from netstorm.kvstore.values.form import Array
from netstorm.protocol.codecs import narrow
from netstorm.protocol.collectives import Element
from netstorm.protocol.frames import Buffer

__all__ = ["Narrow"]

Floats = npt.NDArray[np.float32]


class Narrow:
    """The form of a round whose values lose bits on the wire. See `Form`.

    An operation's source and destination are flat arrays of float32.
    """

    __slots__ = ("_dtype", "_element", "codec")

    def __init__(self, element: Element) -> None:
        """Describe the values.

        Args:
            element: the type of 16 bits that travels.
        """
        self._element: Final = element
        self._dtype: Final = STORED[element]
        self.codec: Final = narrow(element)

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._element)

    def own(self, source: Floats, start: int, end: int) -> Array:
        """Return this rank's values, rounded to the nearest."""
        return narrowed(source[start:end], self._element)

    def write(
        self, destination: Floats, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Write a result as float32."""
        if payload is None:
            destination[start:end] = 0
        else:
            destination[start:end] = widened(np.frombuffer(payload, self._dtype), self._element)

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` values; None: nothing."""
        size, right = memoryview(payload).nbytes, elements * self._dtype.itemsize
        return None if size == right else f"has {size} bytes, not {right}"
