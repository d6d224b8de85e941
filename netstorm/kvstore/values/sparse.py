"""The form of some elements of many, of a float32 key. Pure.

The sum of a chunk is the union of the elements that came in, each added up. The root may keep only the
largest of them: then all ranks see which ones are missing, and each keeps for itself what it has contributed
to those. Nodes between drop nothing: an element that one of them had dropped, and another had not, would look
complete.
"""

from __future__ import annotations

from typing import Final

from netstorm.compression import entries
from netstorm.compression.entries import Entries
from netstorm.kvstore.values.form import Payload, Payloads
from netstorm.protocol.codecs import argument_of
from netstorm.protocol.frames import Buffer

__all__ = ["Sparse", "SparseSum"]

_PARTS: Final = 100
"""Of what a rank contributes on the average: the unit of the codec's argument."""


class Sparse:
    """The form of sparse values. See `Form`.

    An operation's source is `Entries`, its destination a list of `Payload`s.
    """

    __slots__ = ("_kept", "codec")

    def __init__(self, codec: int) -> None:
        """Describe the values.

        Args:
            codec: of `protocol.codecs.sparse`.
        """
        self.codec: Final = codec
        self._kept: Final = argument_of(codec) or 0

    def new_sum(self) -> SparseSum:
        """Return an empty sum of one chunk."""
        return SparseSum(self._kept)

    def own(self, source: Entries, start: int, end: int) -> Entries | None:
        """Return this rank's entries; None: it has none."""
        found = source.between(start, end)
        return found if len(found.numbers) else None

    def write(
        self, destination: Payloads, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Append the result."""
        destination.append(Payload(start, end, payload, contributors))

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload for `elements` elements; None: nothing."""
        return entries.problem(payload, elements, contributors.bit_count())


class SparseSum:
    """Contributions to one chunk. See `Sum`."""

    __slots__ = ("_contributed", "_kept", "_total", "contributors")

    def __init__(self, kept: int) -> None:
        self.contributors = 0
        self._kept = kept
        self._total: Entries | None = None
        self._contributed = 0

    def add_own(self, values: Entries | None, bit: int) -> None:
        """Add this rank's entries (None: it has none in this chunk)."""
        self.contributors |= bit
        if values is not None:
            self._add(values, len(values.numbers))

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: no entries)."""
        self.contributors |= contributors
        if payload is not None:
            self._add(*entries.decode(payload))

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: no entries."""
        return None if self._total is None else entries.encode(self._total, self._contributed)

    def to_keep(self) -> Buffer | None:
        """Return the root's result: the largest entries, if the form keeps only some."""
        if self._total is None or not self._kept:
            return self.to_send()
        most = -(-self._contributed * self._kept // (_PARTS * self.contributors.bit_count()))
        return entries.encode(entries.largest(self._total, most), self._contributed)

    def _add(self, more: Entries, contributed: int) -> None:
        self._contributed += contributed
        self._total = more if self._total is None else entries.total_of(self._total, more)
