"""Codecs of some values of many: rows of a matrix, and the largest elements of a gradient. Pure."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from netstorm.compression.codec import (
    Codec,
    Float16,
    Floats,
    GradientPlace,
    Rounds,
    State,
    SubKey,
    Transfer,
    Uncompressed,
)
from netstorm.errors import UsageError
from netstorm.protocol.codecs import sparse
from netstorm.protocol.frames import Buffer

__all__ = [
    "MOMENTUM",
    "SIZE_LOWER_BOUND",
    "Array",
    "BySize",
    "Entries",
    "Numbers",
    "Rows",
    "TopK",
    "add_rows",
    "bi_sparse",
    "decode_entries",
    "decode_rows",
    "encode_entries",
    "encode_rows",
    "entries_problem",
    "joined_rows",
    "largest_entries",
    "mixed_precision",
    "rows_problem",
    "tidy",
    "total_of",
]


# Some rows of a matrix: their sums, and their encoding on the wire.
#
# A payload is the values of its rows, one row after the other, and after them the number of each row as
# `uint32`, little-endian. Its length tells how many rows it has. Row numbers rise, so there is one payload
# for each set of rows, and adding two sets is a merge.

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

_ON_WIRE: Final = np.dtype("<u4")


class Rows:
    """Rows of a matrix, the others being zeros: `numbers`, rising, shape (n,), and `values`, (n, length)."""

    __slots__ = ("numbers", "values")

    def __init__(self, numbers: Numbers, values: Array) -> None:
        self.numbers = numbers
        self.values = values

    def __len__(self) -> int:
        return len(self.numbers)

    def between(self, first: int, end: int) -> Rows | None:
        """Return views of the rows from number `first` to before `end`, renumbered from 0; None: there are
        none.
        """
        low, high = np.searchsorted(self.numbers, (first, end))
        return Rows(self.numbers[low:high] - first, self.values[low:high]) if low < high else None


def tidy(numbers: npt.NDArray[np.integer[Any]], values: Array, count: int) -> Rows:
    """Return rows in order, each once; the values of repeated rows are added.

    Rows that are in order already are not copied.

    Args:
        numbers: shape (n,), in any order.
        values: shape (n, length).
        count: rows of the whole matrix.

    Raises:
        UsageError: a number is not that of a row.
    """
    own = numbers.astype(np.int64, copy=False)
    if len(own) == 0:
        return Rows(own, values)
    low, high = int(own.min()), int(own.max())
    if low < 0 or high >= count:
        raise UsageError(
            f"row {low if low < 0 else high} of an array with {count} rows: row numbers are 0 to {count - 1}"
        )
    if (own[1:] > own[:-1]).all():
        return Rows(own, values)
    order = np.argsort(own, kind="stable")
    sorted_numbers = own[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_numbers[1:] > sorted_numbers[:-1])))
    with np.errstate(all="ignore"):  # the user sees inf and nan in the values; no warnings
        sums = np.add.reduceat(values[order], starts, axis=0, dtype=values.dtype)
    return Rows(sorted_numbers[starts], sums)


def add_rows(total: Rows, more: Rows) -> Rows:
    """Return the sum: `total` itself, changed, if it has all rows of `more`; else new rows."""
    places = np.searchsorted(total.numbers, more.numbers)
    known = places < len(total)
    known[known] = total.numbers[places[known]] == more.numbers[known]
    with np.errstate(all="ignore"):
        if known.all():
            total.values[places] += more.values
            return total
        # Rows that only one side has are copied: adding zero would turn -0.0 into 0.0.
        new_numbers = more.numbers[~known]
        shift = np.searchsorted(new_numbers, total.numbers)
        new_places = places[~known] + np.arange(len(new_numbers))
        old_places = np.arange(len(total)) + shift
        size = len(total) + len(new_numbers)
        numbers = np.empty(size, np.int64)
        values = np.empty((size, total.values.shape[1]), total.values.dtype)
        numbers[old_places], numbers[new_places] = total.numbers, new_numbers
        values[old_places], values[new_places] = total.values, more.values[~known]
        values[old_places[places[known]]] += more.values[known]
    return Rows(numbers, values)


def encode_rows(rows: Rows) -> bytearray:
    """Return rows, at least one, as a payload."""
    size = rows.values.size * rows.values.itemsize
    payload = bytearray(size + len(rows) * _ON_WIRE.itemsize)
    values = np.frombuffer(payload, rows.values.dtype, rows.values.size)
    values.reshape(rows.values.shape)[:] = rows.values
    np.frombuffer(payload, _ON_WIRE, offset=size)[:] = rows.numbers
    return payload


def decode_rows(payload: bytes | bytearray | memoryview, length: int, dtype: np.dtype[np.generic]) -> Rows:
    """Return the rows of a payload that has no `problem`, as views: writable if the payload is.

    Args:
        payload: of `encode`.
        length: values of a row.
        dtype: of the values.
    """
    count = memoryview(payload).nbytes // (length * dtype.itemsize + _ON_WIRE.itemsize)
    values = np.frombuffer(payload, dtype, count * length)
    numbers = np.frombuffer(payload, _ON_WIRE, count, offset=values.nbytes)
    return Rows(numbers.astype(np.int64), values.reshape(count, length))


def rows_problem(
    payload: bytes | bytearray | memoryview, length: int, dtype: np.dtype[np.generic], count: int
) -> str | None:
    """Return what is wrong with a payload for `count` rows of `length` values; None: it may be decoded."""
    size, row = memoryview(payload).nbytes, length * dtype.itemsize + _ON_WIRE.itemsize
    if size == 0 or size % row:
        return f"has {size} bytes, not {row} for each row"
    rows = size // row
    numbers = np.frombuffer(payload, _ON_WIRE, rows, offset=rows * length * dtype.itemsize)
    if not (numbers[1:] > numbers[:-1]).all():
        return "has rows that are not in order, or one twice"
    return None if numbers[-1] < count else f"has row number {numbers[-1]}, of {count} rows"


def joined_rows(parts: list[tuple[int, Rows]], length: int, dtype: np.dtype[np.generic]) -> Rows:
    """Return the rows of several parts of a matrix, each given with the number of its first row."""
    parts = sorted(parts, key=lambda part: part[0])
    return Rows(
        np.concatenate([np.empty(0, np.int64), *(first + rows.numbers for first, rows in parts)]),
        np.concatenate([np.empty((0, length), dtype), *(rows.values for _, rows in parts)]),
    )


# Some elements of an array, the others being zeros: their sums, and their encoding on the wire.
#
# A payload has the number of its entries, and of those that ranks have contributed to it (`uint32`, little-
# endian), then the entries' values as `float32`, then the gaps between them. A gap is the number of elements
# that are left out before an entry, in bytes: each 255 says 255 more, and another byte ends it. At one entry
# in a hundred elements that is 1.1 bytes an entry.

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


# The largest values of a gradient, and where they are; the rest waits.
#
# `topk` is Deep Gradient Compression (Lin et al., arXiv 1712.01887): a rank sends the share of its values
# that is largest, and adds the others to its next gradient, with momentum correction, local clipping and a
# warm-up if asked. Sums are unions of the ranks' elements. If the root keeps only some, all ranks see which
# are missing, and those who have contributed to them take their values back, so nothing is lost.

_SAMPLE: Final = 65_536
"""Values by which the threshold is estimated. With the largest percent of them its own error is 4 %."""

_FIRST_RATIO: Final = 0.25
"""With which a warm-up begins; section 3.3 of the paper."""

_MOST_KEPT: Final = 1000.0


class TopK:
    """Sparse values with error feedback."""

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        kept: float = 2.0,
        momentum: float = 0.0,
        clip: float = 0.0,
        warmup: int = 0,
        name: str = "topk",
    ) -> None:
        """Describe what is sent.

        Args:
            ratio: share of its values that a rank sends.
            kept: how many elements the result keeps, as a multiple of what a rank has sent on the average; 0:
                all. Without a limit results of many ranks have many times the elements.
            momentum: factor of momentum correction; the optimizer must have none then. 0: off.
            clip: largest norm of a rank's gradient of a tensor, times the square root of the number of ranks;
                0: any.
            warmup: gradients after which `ratio` is reached, from a quarter on, by equal factors.
            name: of the codec.

        Raises:
            UsageError: a value out of its range.
        """
        for what, value, right, allowed in (
            ("ratio", ratio, 0 < ratio <= 1, "more than 0, up to 1"),
            ("kept", kept, kept == 0 or 0.01 <= kept <= _MOST_KEPT, f"0, or from 0.01 to {_MOST_KEPT:g}"),
            ("momentum", momentum, 0 <= momentum < 1, "from 0 to less than 1"),
            ("clip", clip, 0 <= clip < np.inf, "0 or more"),
            ("warmup", warmup, warmup >= 0, "0 or more"),
        ):
            if not right:
                raise UsageError(f"{name} with {what}={value!r}: expected {allowed}")
        self.name: Final = name
        self.fingerprint: Final = (
            f"{name} ratio={ratio:g} kept={kept:g} momentum={momentum:g} clip={clip:g} warmup={warmup}"
        )
        self._ratio: Final = ratio
        self._codec: Final = sparse(kept)
        self._momentum: Final = np.float32(momentum)
        self._clip: Final = clip
        self._warmup: Final = warmup

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of all rounds."""
        return self._codec

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return no further keys."""
        return ()

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Send the largest values, in one round."""
        for name in ("residual", "velocity") if self._momentum else ("residual",):
            if name not in state:
                state[name] = np.zeros_like(gradient)
        residual, velocity = state["residual"], state["velocity"] if self._momentum else None
        with np.errstate(all="ignore"):
            self._clip_in_place(gradient, place.ranks)
            if velocity is not None:
                velocity *= self._momentum
                velocity += gradient
                residual += velocity
            else:
                residual += gradient
        numbers = _largest(residual, self._ratio_at(place.round))
        sent = residual[numbers]
        residual[numbers] = 0
        masked = None if velocity is None else velocity[numbers]
        if velocity is not None:
            velocity[numbers] = 0
        results: list[tuple[int, int, bytes, int]] = []
        yield Transfer(0, self._codec, Entries(numbers, sent), results)
        gradient[:] = 0
        lacking = np.ones(len(numbers), np.bool_)
        for start, end, payload, contributors in results:
            if payload is not None:
                found, _ = decode_entries(payload)
                gradient[start:end][found.numbers] = found.values
            if contributors >> place.rank & 1:
                low, high = np.searchsorted(numbers, (start, end))
                lacking[low:high] = gradient[numbers[low:high]] == 0
        with np.errstate(all="ignore"):
            residual[numbers[lacking]] += sent[lacking]
        if velocity is not None and masked is not None:  # what the model has not got keeps its momentum
            velocity[numbers[lacking]] = masked[lacking]

    def _ratio_at(self, round: int) -> float:
        if round >= self._warmup:
            return self._ratio
        first = max(_FIRST_RATIO, self._ratio)
        return float(first * (self._ratio / first) ** (round / self._warmup))

    def _clip_in_place(self, gradient: Floats, ranks: int) -> None:
        if self._clip:
            norm, most = float(np.linalg.norm(gradient)), self._clip / ranks**0.5
            if norm == np.inf:  # in float32
                norm = float(np.linalg.norm(gradient.astype(np.float64)))
            if norm > most:
                gradient *= np.float32(most / norm)


def _largest(values: Floats, ratio: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the numbers of about the largest values, rising, without zeros. NaN is the largest of all."""
    magnitudes = np.abs(values)
    magnitudes[np.isnan(magnitudes)] = np.inf
    # An odd step: dimensions are often even, and the sample must have values of all rows and columns.
    sample = magnitudes if len(magnitudes) <= _SAMPLE else magnitudes[:: len(magnitudes) // _SAMPLE | 1]
    count = max(1, round(len(sample) * ratio))
    threshold = np.partition(sample, -count)[-count] if len(sample) else 0
    found = np.flatnonzero(magnitudes >= max(threshold, np.finfo(np.float32).smallest_subnormal))
    most = max(1, round(len(values) * ratio))
    if len(found) <= 2 * most:
        return found
    # Values that are all alike, or a sample that is not: exactly so many.
    return np.sort(found[np.argpartition(magnitudes[found], -most)[-most:]])


# GeoMX's Bi-Sparse and mixed-precision quantisation: by the size of a tensor one codec or another.
#
# Large tensors are sparse, with momentum correction, and their sums keep the elements of all ranks. In GeoMX
# the server of a site makes its sum sparse; here, where there are no servers, each rank its gradient.

SIZE_LOWER_BOUND: Final = 200_000
"""Elements; GeoMX's default of MXNET_KVSTORE_SIZE_LOWER_BOUND."""

MOMENTUM: Final = 0.9
"""Of the momentum correction; GeoMX's."""


class BySize:
    """One codec for small tensors, and sparse values for large ones."""

    def __init__(
        self, name: str, small: Codec, ratio: float, *, momentum: float, size_lower_bound: int
    ) -> None:
        """Describe the codecs.

        Args:
            name: of the codec.
            small: of small tensors.
            ratio: of large tensors, share of its values that a rank sends.
            momentum: of large tensors, factor of momentum correction.
            size_lower_bound: elements of the smallest tensor that travels sparsely.

        Raises:
            UsageError: a value out of its range.
        """
        if not size_lower_bound >= 1:
            raise UsageError(f"{name} with size_lower_bound={size_lower_bound!r}: expected 1 or more")
        self.name: Final = name
        self._bound: Final = size_lower_bound
        self._small: Final = small
        self._large: Final[Codec] = TopK(ratio, kept=0, momentum=momentum, name=name)
        self.fingerprint: Final = (
            f"{name} ratio={ratio:g} momentum={momentum:g} size_lower_bound={size_lower_bound}"
        )

    def form(self, shape: tuple[int, ...]) -> int | None:
        """Return the codec of all rounds."""
        return self.of(shape).form(shape)

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return no further keys."""
        return self.of(shape).parts(shape)

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum in one round."""
        return self.of(place.shape).rounds(gradient, state, place)

    def of(self, shape: tuple[int, ...]) -> Codec:
        """Return the codec of tensors of a shape."""
        return self._small if np.prod(shape, dtype=np.int64) < self._bound else self._large


def bi_sparse(
    ratio: float = 0.01, *, momentum: float = MOMENTUM, size_lower_bound: int = SIZE_LOWER_BOUND
) -> BySize:
    """Return GeoMX's Bi-Sparse compression: small tensors travel as they are.

    Args:
        ratio: share of its values that a rank sends; GeoMX calls it the threshold.
        momentum: factor of momentum correction.
        size_lower_bound: elements of the smallest tensor that travels sparsely.

    Raises:
        UsageError: a value out of its range.
    """
    return BySize("bsc", Uncompressed(), ratio, momentum=momentum, size_lower_bound=size_lower_bound)


def mixed_precision(
    ratio: float = 0.01, *, momentum: float = MOMENTUM, size_lower_bound: int = SIZE_LOWER_BOUND
) -> BySize:
    """Return GeoMX's mixed-precision quantisation: small tensors travel as float16; see `bi_sparse`.

    Raises:
        UsageError: a value out of its range.
    """
    return BySize("mpq", Float16(), ratio, momentum=momentum, size_lower_bound=size_lower_bound)
