"""What ranks contribute to one chunk of elements, reduced in place. Pure.

A received payload belongs to the node, which reduces into it, and forwards it: so a hub holds one model, not
one per child, and a chunk is forwarded without a copy. The user's source is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from netstorm.kvstore.values.elements import NARROW, STORED, narrowed, widened
from netstorm.kvstore.values.form import Array
from netstorm.protocol.collectives import Element, Reduction
from netstorm.protocol.frames import Buffer

__all__ = ["ChunkSum"]

_UFUNCS: Final[dict[Reduction, Callable[..., Array]]] = {
    Reduction.SUM: np.add,
    Reduction.AVERAGE: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MINIMUM: np.minimum,
    Reduction.MAXIMUM: np.maximum,
    Reduction.AND: np.bitwise_and,
    Reduction.OR: np.bitwise_or,
    Reduction.XOR: np.bitwise_xor,
}

_OF_TRUTH_VALUES: Final[dict[Reduction, Callable[..., Array]]] = {
    Reduction.SUM: np.bitwise_or,
    Reduction.MAXIMUM: np.bitwise_or,
    Reduction.PRODUCT: np.bitwise_and,
    Reduction.MINIMUM: np.bitwise_and,
}
"""What is the same for bytes that are 0 or 1, and stays 0 or 1."""


class ChunkSum:
    """Contributions to one chunk. See `Sum`.

    A missing payload contributes nothing, which for sums is zeros.
    """

    __slots__ = ("_dtype", "_element", "_own", "_received", "_reduce", "_values", "contributors")

    def __init__(self, element: Element, reduction: Reduction = Reduction.SUM) -> None:
        self.contributors = 0
        self._element = element
        self._dtype = STORED[element]
        truth = _OF_TRUTH_VALUES.get(reduction) if element is Element.BOOL else None
        self._reduce = truth or _UFUNCS.get(reduction)
        """None: one rank contributes."""
        self._own: Array | None = None
        """This rank's values while nothing has been received: a view of the user's memory."""
        self._received: Buffer | None = None
        """The payload that `_values` is a view of; it is forwarded."""
        self._values: Array | None = None
        """The running sum; float32 for types of 16 bits."""

    def add_own(self, values: Array | None, bit: int) -> None:
        """Add this rank's contribution (None: it has none)."""
        self.contributors |= bit
        if values is None:
            return
        if self._values is None:
            self._own = values
        else:
            self._add(widened(values, self._element))

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: no contribution), whose memory the sum may change from now on."""
        self.contributors |= contributors
        if payload is None:
            return
        values: Array = np.frombuffer(payload, self._dtype)
        if self._values is not None:
            self._add(widened(values, self._element))
            return
        if self._own is None:
            self._values, self._received = values, payload
            return
        if self._element in NARROW:
            self._values = widened(values, self._element)
        else:
            self._values, self._received = values, payload
        own, self._own = self._own, None
        self._add(widened(own, self._element))

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: nobody has contributed.

        It may be the user's memory: the result cannot come back before the parent has stored this payload.
        """
        if self._values is None:
            return self._own
        if self._received is not None:
            return self._received
        return narrowed(self._values, self._element)

    def to_keep(self) -> Buffer | None:
        """Return the root's result in private memory: it outlives the user's source."""
        if self._values is None and self._own is not None:
            return self._own.copy()
        return self.to_send()

    def _add(self, more: Array) -> None:
        assert self._values is not None
        if self._reduce is None:
            return
        if self._received is not None and self._element in NARROW:
            self._values, self._received = widened(self._values, self._element), None
        with np.errstate(all="ignore"):  # the user sees inf and nan in the values; no warnings
            self._reduce(self._values, more, out=self._values, casting="unsafe")
