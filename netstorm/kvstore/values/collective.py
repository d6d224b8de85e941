"""The form of collective rounds: any reduction of any type, in segments that ranks may lack. Pure.

No payload means no contribution: a rank that only receives sends headers alone.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from netstorm.kvstore.values.chunk_sum import ChunkSum
from netstorm.kvstore.values.elements import NARROW, STORED, narrowed, widened
from netstorm.kvstore.values.form import Array
from netstorm.protocol.collectives import Element, Reduction, Signature
from netstorm.protocol.frames import Buffer

__all__ = ["Collective", "Segments"]

Segments: TypeAlias = tuple[Array | None, ...]
"""A flat array for each segment, of the type in which elements are stored (`elements.STORED`); None: this
rank contributes nothing to that segment, or does not want its result.
"""


class Collective:
    """The form of one collective round. See `Form`.

    An operation's source and destination are `Segments`. Elements are counted in bytes.
    """

    __slots__ = ("_dtype", "codec", "signature")

    def __init__(self, signature: Signature) -> None:
        """Describe the values.

        Args:
            signature: on which ranks agree.
        """
        self.signature: Final = signature
        self.codec: Final = signature.codec()
        self._dtype: Final = STORED[signature.element]

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self.signature.element, self.signature.reduction)

    def own(self, source: Segments, start: int, end: int) -> Array | None:
        """Return a view of this rank's values, if it has that segment."""
        return self._view(source, start, end)

    def write(
        self, destination: Segments, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Copy a result to the user's destination; an average is one over those who contributed.

        Where nobody has contributed, as in the place of a rank that has left the job, there are zeros.
        """
        target = self._view(destination, start, end)
        if target is None:
            return
        if payload is None:
            target[:] = 0
            return
        values = np.frombuffer(payload, self._dtype)
        if self.signature.reduction is Reduction.AVERAGE:
            _write_average(target, values, self.signature.element, contributors.bit_count())
        else:
            target[:] = values

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload for `elements` bytes; None: nothing."""
        size = memoryview(payload).nbytes
        return None if size == elements else f"has {size} bytes, not {elements}"

    def _view(self, segments: Segments, start: int, end: int) -> Array | None:
        """Return the values of bytes `start` to `end`, which are in one segment."""
        segment, first = divmod(start, self.signature.segment_bytes)
        values = segments[segment]
        if values is None:
            return None
        item = self._dtype.itemsize
        return values[first // item : (first + end - start) // item]


def _write_average(target: Array, values: Array, element: Element, ranks: int) -> None:
    """Write sums divided by the number of ranks; whole numbers are rounded towards zero, as PyTorch
    rounds.
    """
    if element in NARROW:
        target[:] = narrowed(np.true_divide(widened(values, element), np.float32(ranks)), element)
    elif np.issubdtype(values.dtype, np.floating):
        with np.errstate(all="ignore"):
            np.true_divide(values, values.dtype.type(ranks), out=target)
    else:
        quotients, rests = np.divmod(values, values.dtype.type(ranks))
        target[:] = quotients + np.logical_and(rests != 0, np.less(values, 0)).astype(values.dtype)
