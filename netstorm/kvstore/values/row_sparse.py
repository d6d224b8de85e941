"""The form of sparse rows, and their sums. Pure.

A payload has the rows that some rank has values for; no payload means no rows. The sum of a chunk is the
union of the rows that came in, each added up. As with dense values a received payload belongs to the node,
which adds to its rows in place, and forwards it as it came if nothing was added.

A row belongs to the chunk in which its first element is. Chunks of a row-sparse key are whole rows. Rows may
be pushed to a dense key, too, and its chunks need not be whole rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.compression.rows import Rows, add_rows, decode, encode, problem
from netstorm.protocol.chunks import ROW_SPARSE
from netstorm.protocol.frames import Buffer

__all__ = ["RowParts", "RowSparse", "RowSum"]

RowParts = list[tuple[int, Rows]]
"""The destination of results: the rows of each chunk that has any, with the number of the chunk's first row,
in order of arrival.
"""


class RowSparse:
    """The form of rounds in which some rows travel. See `Form`.

    An operation's source is `Rows`, its destination `RowParts`.
    """

    __slots__ = ("_dtype", "_length", "_wide")

    codec: Final = ROW_SPARSE

    def __init__(self, dtype: np.dtype[np.generic], length: int) -> None:
        """Describe rows of so many values."""
        self._dtype: Final = dtype
        self._length: Final = max(1, length)
        self._wide: Final = dtype == np.float16
        """Sums are kept in float32: one rounding a hop (design, section 5)."""

    def new_sum(self) -> RowSum:
        """Return an empty sum of one chunk."""
        return RowSum(self._dtype, self._length, wide=self._wide)

    def own(self, source: Rows, start: int, end: int) -> Rows | None:
        """Return views of the source's rows that begin in these elements; None: there are none."""
        return source.between(-(-start // self._length), -(-end // self._length))

    def write(
        self, destination: RowParts, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Append the rows of a result; they are views of its payload."""
        if payload is not None:
            destination.append((-(-start // self._length), decode(payload, self._length, self._dtype)))

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of rows of a chunk of `elements` values; None: nothing."""
        return problem(payload, self._length, self._dtype, -(-elements // self._length))


class RowSum:
    """Contributions to one chunk of rows. See `Sum`."""

    __slots__ = ("_dtype", "_length", "_own", "_received", "_total", "_wide", "contributors")

    def __init__(self, dtype: np.dtype[np.generic], length: int, *, wide: bool) -> None:
        self.contributors = 0
        self._dtype = dtype
        self._length = length
        self._wide = wide
        self._own: Rows | None = None
        """This rank's rows while nothing has been received: views of the user's memory."""
        self._received: Buffer | None = None
        """The payload that `_total` is views of; it is forwarded."""
        self._total: Rows | None = None
        """The running sum; float32 for float16 keys."""

    def add_own(self, values: Rows | None, bit: int) -> None:
        """Add this rank's rows (None: it has none in this chunk)."""
        self.contributors |= bit
        if values is None:
            return
        if self._total is None:
            self._own = values
        else:
            self._add(values)

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: no rows), whose memory the sum may change from now on."""
        self.contributors |= contributors
        if payload is None:
            return
        rows = decode(payload, self._length, self._dtype)
        if self._total is not None:
            self._add(rows)
            return
        self._total, self._received = rows, payload
        if self._own is not None:
            self._add(self._own)
            self._own = None

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: no rows."""
        if self._received is not None:
            return self._received
        rows = self._total or self._own
        if rows is None:
            return None
        with np.errstate(all="ignore"):
            return encode(Rows(rows.numbers, rows.values.astype(self._dtype, copy=False)))

    def to_keep(self) -> Buffer | None:
        """Return the root's result, in private memory as every payload."""
        return self.to_send()

    def _add(self, rows: Rows) -> None:
        assert self._total is not None
        if self._wide and self._received is not None:
            self._total = Rows(self._total.numbers, self._total.values.astype(np.float32))
            self._received = None
        total = add_rows(self._total, rows)
        if total is not self._total:
            self._total, self._received = total, None
