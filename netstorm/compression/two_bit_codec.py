"""MXNet's gradient compression of type 2bit as a codec. Pure."""

from __future__ import annotations

import math
from typing import ClassVar, Final

import numpy as np

from netstorm.compression.codec import Floats, Part, Place, Rounds, State, Transfer
from netstorm.compression.two_bit import quantised
from netstorm.errors import UsageError
from netstorm.protocol.codecs import QUANTISED

__all__ = ["TwoBit"]


class TwoBit:
    """Of each value only whether it has reached +t, or -t, with error feedback. See `two_bit`."""

    name: ClassVar[str] = "2bit"

    def __init__(self, threshold: float | str = 0.5) -> None:
        """Describe the values.

        Args:
            threshold: t.

        Raises:
            UsageError: it is not a float32 greater than 0.
        """
        try:
            with np.errstate(all="ignore"):
                self.threshold: Final = np.float32(str(threshold))
        except ValueError:
            self.threshold = np.float32("nan")  # type: ignore[misc] # refused below
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise UsageError(
                f"gradient compression with threshold {threshold!r}: it must be a float32 greater than 0"
            )
        self.fingerprint: Final = f"2bit threshold={self.threshold!s}"

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of all rounds."""
        return QUANTISED

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return no further keys."""
        return ()

    def rounds(self, gradient: Floats, state: State, place: Place) -> Rounds:
        """Sum in one round."""
        residual = state.get("residual")
        if residual is None:
            residual = state["residual"] = np.zeros_like(gradient)
        yield Transfer(0, QUANTISED, quantised(gradient, residual, self.threshold), gradient)
        with np.errstate(all="ignore"):
            np.multiply(gradient, self.threshold, out=gradient)
