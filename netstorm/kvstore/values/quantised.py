"""The form of a round under gradient compression: small packed integers, whose sums are exact. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.compression import two_bit
from netstorm.compression.bit_planes import Planes, add, add_constant
from netstorm.protocol.chunks import QUANTISED
from netstorm.protocol.frames import Buffer

__all__ = ["Quantised", "QuantisedSum"]

Floats = npt.NDArray[np.float32]


class Quantised:
    """The form of quantised values. See `Form`.

    An operation's source is a `Signs`, its destination a flat array of float32.
    """

    __slots__ = ("_ranks", "_threshold")

    codec: Final = QUANTISED

    def __init__(self, threshold: np.float32 | float = 1.0, ranks: int = 0) -> None:
        """Describe the values.

        Args:
            threshold: the value of 1.
            ranks: how many contribute to a result; 0 if none will be written.
        """
        self._threshold: Final = np.float32(threshold)
        self._ranks: Final = ranks

    def new_sum(self) -> QuantisedSum:
        """Return an empty sum of one chunk."""
        return QuantisedSum()

    def own(self, source: two_bit.Signs, start: int, end: int) -> Planes | None:
        """Return this rank's quantised values."""
        return source.planes(start, end)

    def write(self, destination: Floats, start: int, end: int, payload: Buffer | None) -> None:
        """Write the sums, as values of the gradient."""
        if payload is None:
            destination[start:end] = 0
        else:
            two_bit.as_values(payload, self._ranks, self._threshold, destination[start:end])

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload; None: nothing."""
        return two_bit.problem(payload, elements, contributors.bit_count())


class QuantisedSum:
    """Contributions to one chunk. See `Sum`."""

    __slots__ = ("_counted", "_planes", "contributors")

    def __init__(self) -> None:
        self.contributors = 0
        self._planes: Planes | None = None
        """Sum + `_counted`, value by value. It is never changed: it may be a received payload."""
        self._counted = 0
        """How many ranks' values are in `_planes`. The other contributors have sent zeros."""

    def add_own(self, values: Planes | None, bit: int) -> None:
        """Add this rank's contribution."""
        self.contributors |= bit
        if values is not None:
            self._add(values, 1)

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload."""
        self.contributors |= contributors
        if payload is not None:
            ranks = contributors.bit_count()
            self._add(two_bit.as_planes(payload, ranks), ranks)

    def to_send(self) -> Buffer | None:
        """Return the sum over all contributors."""
        if self._planes is None:
            return None
        ranks = self.contributors.bit_count()
        if ranks != self._counted:
            self._planes = add_constant(self._planes, ranks - self._counted, two_bit.planes_of(ranks))
            self._counted = ranks
        return self._planes.reshape(-1)

    to_keep = to_send

    def _add(self, planes: Planes, ranks: int) -> None:
        self._counted += ranks
        if self._planes is None:
            self._planes = planes
        else:
            self._planes = add(self._planes, planes, two_bit.planes_of(self._counted))
