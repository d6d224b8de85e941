"""The sum of one chunk of one round, as far as it is here.

Received payloads belong to us and are added to in place, so a hub holds one model, not one per child, and a
chunk that has come in is forwarded without being copied. The user's source is only read.
"""

from __future__ import annotations

import numpy as np

from netstorm.kvstore.keys import Array
from netstorm.protocol.frames import Buffer

__all__ = ["ChunkSum"]


class ChunkSum:
    """Contributions to one chunk. Starts empty; ends as what is sent to the parent or, at the root, to the
    children.
    """

    __slots__ = ("_own", "_received", "_values", "contributors")

    def __init__(self) -> None:
        self.contributors = 0
        """Bit set of the ranks added in."""
        self._own: Array | None = None
        """Our own values while nothing has been received: a view of the user's memory."""
        self._received: Buffer | None = None
        """What `_values` is a view of; forwarded as it came."""
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

    def add_received(self, payload: Buffer | None, dtype: np.dtype[np.generic], contributors: int) -> None:
        """Add what a child sent (None: zeros), whose memory is ours from now on."""
        self.contributors |= contributors
        if payload is None:
            return
        values: Array = np.frombuffer(payload, dtype)
        if self._values is not None:
            _add(self._values, values)
            return
        if dtype == np.float16:
            # one rounding a hop: sums within a node are kept in float32 (design, section 5)
            self._values = values.astype(np.float32)
        else:
            self._values, self._received = values, payload
        if self._own is not None:
            _add(self._values, self._own)
            self._own = None

    def to_send(self, dtype: np.dtype[np.generic]) -> Buffer | None:
        """Return the sum as a payload for the parent; None: zeros.

        It may be the user's own memory: our result cannot come back before the parent has stored it.
        """
        if self._values is None:
            return self._own
        if self._received is not None:
            return self._received
        return _rounded(self._values, dtype)

    def to_keep(self, dtype: np.dtype[np.generic]) -> Buffer | None:
        """Return the sum in memory of our own: the root's result, which outlives the user's source."""
        if self._values is None and self._own is not None:
            return self._own.copy()
        return self.to_send(dtype)


def _add(total: Array, more: Array) -> None:
    with np.errstate(all="ignore"):  # inf and nan are the user's to see, not warnings of ours
        np.add(total, more, out=total, casting="unsafe")


def _rounded(values: Array, dtype: np.dtype[np.generic]) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(dtype)
