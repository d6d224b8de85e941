"""The form of whole numbers in as few bits as their sum needs. Pure.

One rank's numbers are 0 to `most`, and stand for -most/2 to most/2. A sum over n ranks is 0 to n times
`most`, in bit planes (`compression.bit_planes`), which are added without being unpacked. So sums are exact,
and all trees give the same ones.
"""

from __future__ import annotations

from typing import Final

from netstorm.compression import packed_numbers
from netstorm.compression.bit_planes import Planes, add_constant, add_planes
from netstorm.compression.packed_numbers import planes_of
from netstorm.kvstore.values.form import Payload, Payloads
from netstorm.protocol.codecs import packed
from netstorm.protocol.frames import Buffer

__all__ = ["Packed", "PackedSum"]


class Packed:
    """The form of packed numbers. See `Form`.

    An operation's source is a `Planes` of all its numbers, its destination a list of `Payload`s.
    """

    __slots__ = ("_most", "codec")

    def __init__(self, most: int) -> None:
        """Describe the numbers.

        Args:
            most: the largest of one rank.
        """
        self._most: Final = most
        self.codec: Final = packed(most)

    def new_sum(self) -> PackedSum:
        """Return an empty sum of one chunk."""
        return PackedSum(self._most)

    def own(self, source: Planes, start: int, end: int) -> Planes:
        """Return this rank's numbers."""
        return packed_numbers.cut(source, start, end)

    def write(
        self, destination: Payloads, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Append the result."""
        destination.append(Payload(start, end, payload, contributors))

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` sums over some ranks; None: nothing."""
        return packed_numbers.problem(payload, elements, contributors.bit_count(), self._most)


class PackedSum:
    """Contributions to one chunk. See `Sum`."""

    __slots__ = ("_counted", "_halves", "_most", "_planes", "contributors")

    def __init__(self, most: int) -> None:
        self.contributors = 0
        self._most = most
        self._planes: Planes | None = None
        """The sum, number by number. It is never changed: it may be a received payload."""
        self._counted = 0
        """How many ranks' numbers are in `_planes`. The other contributors have sent zeros."""
        self._halves = 0
        """What is to be added to each number of `_planes`, in halves."""

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
            planes, half = packed_numbers.parted(payload, ranks, self._most)
            self._halves += half
            self._add(planes, ranks)

    def to_send(self) -> Buffer | None:
        """Return the sum over all contributors."""
        if self._planes is None:
            return None
        ranks = self.contributors.bit_count()
        self._halves += (ranks - self._counted) * self._most
        if ranks != self._counted or self._halves > 1:
            whole, self._halves = divmod(self._halves, 2)
            self._planes = add_constant(self._planes, whole, planes_of(ranks, self._most))
            self._counted = ranks
        return packed_numbers.joined(self._planes, self._halves, self._most)

    to_keep = to_send

    def _add(self, planes: Planes, ranks: int) -> None:
        self._counted += ranks
        if self._planes is None:
            self._planes = planes
        else:
            self._planes = add_planes(self._planes, planes, planes_of(self._counted, self._most))
