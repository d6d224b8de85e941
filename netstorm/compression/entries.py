"""Some elements of an array, the others being zeros: their sums, and their encoding on the wire. Pure.

A payload has the number of its entries, and of those that ranks have contributed to it (`uint32`,
little-endian), then the entries' values as `float32`, then the gaps between them. A gap is the number of
elements that are left out before an entry, in bytes: each 255 says 255 more, and another byte ends it. At one
entry in a hundred elements that is 1.1 bytes an entry.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from netstorm.compression.codec import Floats
from netstorm.compression.rows import Rows, add_rows
from netstorm.protocol.frames import Buffer

__all__ = ["Entries", "decode_entries", "encode_entries", "entries_problem", "largest_entries", "total_of"]

Numbers = npt.NDArray[np.int64]

_HEADER: Final = struct.Struct("<II")
_MORE: Final = 255
_MOST_CONTRIBUTED: Final = (1 << 32) - 1


class Entries(NamedTuple):
    """Elements `numbers`, rising, and their `values`, both of shape (n,)."""

    numbers: Numbers
    values: Floats

    def between(self, first: int, end: int) -> Entries:
        """Return views of the entries from element `first` to before `end`, numbered from 0."""
        low, high = np.searchsorted(self.numbers, (first, end))
        return Entries(self.numbers[low:high] - first, self.values[low:high])


def total_of(first: Entries, second: Entries) -> Entries:
    """Return the sum; neither of the two is changed."""
    total = add_rows(
        Rows(first.numbers, first.values.reshape(-1, 1).copy()),
        Rows(second.numbers, second.values.reshape(-1, 1)),
    )
    return Entries(total.numbers, total.values.reshape(-1))


def largest_entries(entries: Entries, count: int) -> Entries:
    """Return the `count` entries of the largest magnitude; NaN is the largest of all."""
    if len(entries.numbers) <= count:
        return entries
    magnitudes = np.abs(entries.values)
    magnitudes[np.isnan(magnitudes)] = np.inf
    chosen = np.sort(np.argpartition(magnitudes, -count)[-count:]) if count else np.empty(0, np.int64)
    return Entries(entries.numbers[chosen], entries.values[chosen])


def encode_entries(entries: Entries, contributed: int) -> bytes:
    """Return entries as a payload.

    Args:
        contributed: how many entries ranks have contributed to these.
    """
    gaps = np.diff(entries.numbers, prepend=-1) - 1
    further, rest = np.divmod(gaps, _MORE)
    if further.any():
        coded = np.full(len(gaps) + int(further.sum()), _MORE, np.uint8)
        coded[np.cumsum(further + 1) - 1] = rest
    else:
        coded = rest.astype(np.uint8)
    header = _HEADER.pack(len(gaps), min(contributed, _MOST_CONTRIBUTED))
    return b"".join((header, entries.values.astype("<f4", copy=False).tobytes(), coded.tobytes()))


def decode_entries(payload: Buffer) -> tuple[Entries, int]:
    """Return the entries of a payload that has no `problem`, and how many have been contributed."""
    count, contributed = _HEADER.unpack_from(payload)
    values = np.frombuffer(payload, "<f4", count, _HEADER.size)
    coded = np.frombuffer(payload, np.uint8, offset=_HEADER.size + values.nbytes)
    ends = np.flatnonzero(coded != _MORE)
    numbers = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(count)
    return Entries(numbers, values), contributed


def entries_problem(payload: Buffer, elements: int, ranks: int) -> str | None:
    """Return what is wrong with a payload for so many elements of so many ranks; None: it may be decoded."""
    size = memoryview(payload).nbytes
    if size < _HEADER.size:
        return f"has {size} bytes: entries begin with {_HEADER.size}"
    count, contributed = _HEADER.unpack_from(payload)
    if not count <= elements or not count <= contributed <= elements * ranks:
        return f"has {count} entries of {contributed}, with {elements} elements and {ranks} ranks"
    coded = size - _HEADER.size - 4 * count
    if coded < count:
        return f"has {size} bytes, which is too few for {count} entries"
    if not count:
        return None if not coded else f"has {size} bytes and no entries"
    gaps = np.frombuffer(payload, np.uint8, offset=_HEADER.size + 4 * count)
    if np.count_nonzero(gaps != _MORE) != count or gaps[-1] == _MORE:
        return f"has gaps for other than its {count} entries"
    last = int(gaps.sum(dtype=np.int64)) + count - 1
    return None if last < elements else f"has an entry {last} of {elements} elements"
