"""The form of dense values, and their sums. Pure.

A received payload belongs to the node, which adds to it in place: so a hub holds one model, not one per
child, and forwards a chunk without copying it. The user's source is only read.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.kvstore.values.form import Array
from netstorm.protocol.frames import Buffer

__all__ = ["ChunkSum", "Dense"]


class Dense:
    """The form of values that all travel, as they are in memory. See `Form`."""

    __slots__ = ("_dtype", "_item_bytes", "_wide")

    codec: Final = 0

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self._dtype: Final = dtype
        self._item_bytes: Final = dtype.itemsize
        self._wide: Final = dtype == np.float16
        """Sums are kept in float32: one rounding a hop (design, section 5)."""

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._dtype, wide=self._wide)

    def own(self, source: Array, start: int, end: int) -> Array:
        """Return a view of the user's source."""
        return source[start:end]

    def write(self, destination: Array, start: int, end: int, payload: Buffer | None) -> None:
        """Copy a result to the user's destination."""
        destination[start:end] = 0 if payload is None else np.frombuffer(payload, self._dtype)

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` values; None: nothing."""
        size = memoryview(payload).nbytes
        right = elements * self._item_bytes
        return None if size == right else f"has {size} bytes, not {right}"


class ChunkSum:
    """Contributions to one chunk of dense values. See `Sum`."""

    __slots__ = ("_dtype", "_own", "_received", "_values", "_wide", "contributors")

    def __init__(self, dtype: np.dtype[np.generic], *, wide: bool) -> None:
        self.contributors = 0
        self._dtype = dtype
        self._wide = wide
        self._own: Array | None = None
        """This rank's values while nothing has been received: a view of the user's memory."""
        self._received: Buffer | None = None
        """The payload that `_values` is a view of; it is forwarded."""
        self._values: Array | None = None
        """The running sum; float32 for float16 keys."""

    def add_own(self, values: Array | None, bit: int) -> None:
        """Add this rank's contribution (None: zeros)."""
        self.contributors |= bit
        if values is None:
            return
        if self._values is None:
            self._own = values
        else:
            _add(self._values, values)

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: zeros), whose memory the sum may change from now on."""
        self.contributors |= contributors
        if payload is None:
            return
        values: Array = np.frombuffer(payload, self._dtype)
        if self._values is not None:
            _add(self._values, values)
            return
        if self._wide:
            self._values = values.astype(np.float32)
        else:
            self._values, self._received = values, payload
        if self._own is not None:
            _add(self._values, self._own)
            self._own = None

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: zeros.

        It may be the user's memory: the result cannot come back before the parent has stored this payload.
        """
        if self._values is None:
            return self._own
        if self._received is not None:
            return self._received
        return _rounded(self._values, self._dtype)

    def to_keep(self) -> Buffer | None:
        """Return the root's result in private memory: it outlives the user's source."""
        if self._values is None and self._own is not None:
            return self._own.copy()
        return self.to_send()


def _add(total: Array, more: Array) -> None:
    with np.errstate(all="ignore"):  # the user sees inf and nan in the values; no warnings
        np.add(total, more, out=total, casting="unsafe")


def _rounded(values: Array, dtype: np.dtype[np.generic]) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(dtype)
