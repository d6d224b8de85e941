"""The form of a round under gradient compression: small packed integers, whose sums are exact. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.compression import two_bit
from netstorm.compression.bit_planes import Planes
from netstorm.kvstore.values.packed import PackedSum
from netstorm.protocol.chunks import QUANTISED
from netstorm.protocol.frames import Buffer

__all__ = ["Quantised"]

Floats = npt.NDArray[np.float32]


class Quantised:
    """The form of quantised values. See `Form`.

    An operation's source is a `Signs`, its destination a flat array of float32.
    """

    __slots__ = ("_threshold",)

    codec: Final = QUANTISED

    def __init__(self, threshold: np.float32 | float = 1.0) -> None:
        """Describe the values.

        Args:
            threshold: the value of 1.
        """
        self._threshold: Final = np.float32(threshold)

    def new_sum(self) -> PackedSum:
        """Return an empty sum of one chunk."""
        return PackedSum(two_bit.MOST)

    def own(self, source: two_bit.Signs, start: int, end: int) -> Planes | None:
        """Return this rank's quantised values."""
        return source.planes(start, end)

    def write(
        self, destination: Floats, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Write the sums, as values of the gradient."""
        if payload is None:
            destination[start:end] = 0
        else:
            two_bit.as_values(payload, contributors.bit_count(), self._threshold, destination[start:end])

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload; None: nothing."""
        return two_bit.problem(payload, elements, contributors.bit_count())
