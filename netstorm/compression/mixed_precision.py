"""GeoMX's mixed-precision quantisation: small tensors travel as float16, large ones sparsely. Pure."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from netstorm.compression.cast import Float16
from netstorm.compression.codec import Codec, Floats, Part, Place, Rounds, State
from netstorm.compression.top_k import bi_sparse
from netstorm.errors import UsageError

__all__ = ["SIZE_LOWER_BOUND", "MixedPrecision"]

SIZE_LOWER_BOUND: Final = 200_000
"""Elements; GeoMX's default of MXNET_KVSTORE_SIZE_LOWER_BOUND."""


class MixedPrecision:
    """Two codecs, by the size of the tensor."""

    name: ClassVar[str] = "mpq"

    def __init__(self, ratio: float = 0.01, *, size_lower_bound: int = SIZE_LOWER_BOUND) -> None:
        """Describe the codecs.

        Args:
            ratio: of large tensors, share of its values that a rank sends.
            size_lower_bound: elements of the smallest tensor that travels sparsely.

        Raises:
            UsageError: a value out of its range.
        """
        if not size_lower_bound >= 1:
            raise UsageError(f"mpq with size_lower_bound={size_lower_bound!r}: expected 1 or more")
        self._bound: Final = size_lower_bound
        self._small: Final[Codec] = Float16()
        self._large: Final[Codec] = bi_sparse(ratio)
        self.fingerprint: Final = f"mpq ratio={ratio:g} size_lower_bound={size_lower_bound}"

    def form(self, shape: tuple[int, ...]) -> int | None:
        """Return the codec of all rounds."""
        return self.of(shape).form(shape)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return no further keys."""
        return self.of(shape).parts(shape)

    def rounds(self, gradient: Floats, state: State, place: Place) -> Rounds:
        """Sum in one round."""
        return self.of(place.shape).rounds(gradient, state, place)

    def of(self, shape: tuple[int, ...]) -> Codec:
        """Return the codec of tensors of a shape."""
        return self._small if np.prod(shape, dtype=np.int64) < self._bound else self._large
