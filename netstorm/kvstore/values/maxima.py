"""The form of rounds whose result is the largest value of any rank. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.kvstore.values.chunk_sum import ChunkSum
from netstorm.kvstore.values.dense import Dense
from netstorm.protocol.codecs import MAXIMA
from netstorm.protocol.collectives import Element, Reduction

__all__ = ["Maxima"]


class Maxima(Dense):
    """The form of values of which the largest counts. See `Form`. NaN is larger than any number."""

    __slots__ = ("_of",)

    codec: int = MAXIMA  # type: ignore[misc] # another form's number

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        super().__init__(dtype)
        self._of: Final = Element[dtype.name.upper()]

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._of, Reduction.MAXIMUM)
