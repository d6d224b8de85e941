"""Codecs of whole numbers, in as few bits as their sum needs: 2bit, int8 and one bit. Pure.

Sums are exact, so all trees give the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from netstorm.compression.codec import Floats, GradientPlace, Rounds, State, SubKey, Transfer, take_residual
from netstorm.errors import UsageError
from netstorm.protocol.codecs import MAXIMA, QUANTISED, packed
from netstorm.protocol.frames import Buffer

__all__ = [
    "RESOLUTION",
    "TWO_BIT_MOST",
    "Int8",
    "OneBit",
    "Planes",
    "Signs",
    "TwoBit",
    "add_constant",
    "add_planes",
    "as_planes",
    "cut_planes",
    "exceeds",
    "joined_planes",
    "levels_of",
    "noise",
    "packed_planes_of",
    "packed_problem",
    "parted_planes",
    "plane_bytes",
    "quantised",
    "sums_into",
    "two_bit_problem",
    "two_bit_values",
    "unpacked",
]


# Small integers in bit planes, added without being unpacked.
#
# A plane has one bit of each integer, eight to a byte. Integers of n bits take n planes, the least
# significant first. Two such arrays are added by full adders, as hardware does it, with NumPy's bitwise
# operations on whole planes: that handles 8 integers a byte, where unpacked ones would take a byte each.
# Unused bits at the end of a plane belong to integers that are never read.

N = TypeVar("N", np.uint8, np.uint16)


Planes = npt.NDArray[np.uint8]
"""Of shape (planes, bytes of a plane)."""

MOST_BITS = 16
"""Of an integer."""

Plane = npt.NDArray[np.uint8]
"""Of shape (bytes,)."""


def plane_bytes(count: int) -> int:
    """Return the bytes of a plane of `count` integers."""
    return -(-count // 8)


def add_planes(first: Planes, second: Planes, planes: int) -> Planes:
    """Return the sums of the integers of two arrays.

    Args:
        planes: of the result: enough for every sum, and at least those of either array.
    """
    total = np.empty((planes, first.shape[1]), np.uint8)
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    carry: Plane | None = None
    for plane in range(planes):
        if plane < len(shorter):
            left, right = longer[plane], shorter[plane]
            differ = np.bitwise_xor(left, right, out=total[plane])
            both = left & right
            if carry is not None:
                both |= carry & differ
                differ ^= carry
            carry = both
        else:
            carry = _carried(longer[plane] if plane < len(longer) else None, carry, total[plane])
    return total


def add_constant(values: Planes, constant: int, planes: int) -> Planes:
    """Return the sums of integers and one constant; see `add`."""
    total = np.empty((planes, values.shape[1]), np.uint8)
    carry: Plane | None = None
    for plane in range(planes):
        bits = values[plane] if plane < len(values) else None
        if not constant >> plane & 1:
            carry = _carried(bits, carry, total[plane])
        elif bits is None:  # 1 + carry
            total[plane] = 0xFF if carry is None else ~carry
        elif carry is None:
            np.invert(bits, out=total[plane])
            carry = bits
        else:
            np.invert(bits ^ carry, out=total[plane])
            carry = bits | carry
    return total


def _carried(bits: Plane | None, carry: Plane | None, total: Plane) -> Plane | None:
    """Write one plane plus a carry; return the next carry."""
    if bits is None or carry is None:
        total[:] = carry if bits is None and carry is not None else 0 if bits is None else bits
        return None
    np.bitwise_xor(bits, carry, out=total)
    return bits & carry


def exceeds(values: Planes, limit: int) -> bool:
    """Return whether any of the integers is larger than `limit`."""
    if limit >= (1 << len(values)) - 1:
        return False
    equal: Plane | None = None
    """Which integers have the same more significant bits as `limit`; None: all."""
    found: Plane | None = None
    for plane in reversed(range(len(values))):
        bits = values[plane]
        if limit >> plane & 1:
            equal = bits if equal is None else equal & bits
        else:
            larger = bits if equal is None else equal & bits
            found = larger if found is None else found | larger
            equal = ~bits if equal is None else equal & ~bits
    return found is not None and bool(found.any())


def unpacked(values: Planes, count: int) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Return `count` integers, a byte each, or two if they have more than 8 bits."""
    if len(values) <= 8:
        return _joined_bits(values, count, np.dtype(np.uint8))
    return _joined_bits(values, count, np.dtype(np.uint16))


def _joined_bits(values: Planes, count: int, kind: np.dtype[N]) -> npt.NDArray[N]:
    total = np.unpackbits(values[0], count=count, bitorder="little").astype(kind, copy=False)
    for plane in range(1, len(values)):
        bits = np.unpackbits(values[plane], count=count, bitorder="little").astype(kind, copy=False)
        # A product, since NumPy's shifts are several times as slow.
        np.bitwise_or(total, np.multiply(bits, kind.type(1 << plane), out=bits), out=total)
    return total


# Whole numbers as bit planes, and back.
#
# One rank's numbers are 0 to `most`, and stand for -most/2 to most/2. If `most` is odd, none of them stands
# for 0, which a rank with nothing to say contributes. So such a sum has a last byte beside its planes: 1 if
# half a unit is to be added to each of its numbers.

Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


def as_planes(numbers: Numbers, most: int) -> Planes:
    """Return numbers from 0 to `most` as bit planes. 1 ns a number of 8 bits."""
    planes = np.empty((most.bit_length(), plane_bytes(len(numbers))), np.uint8)
    bits = np.empty_like(numbers)
    for plane in range(len(planes)):
        np.bitwise_and(numbers, numbers.dtype.type(1 << plane), out=bits)
        planes[plane] = np.packbits(bits, bitorder="little")
    return planes


def cut_planes(planes: Planes, start: int, end: int) -> Planes:
    """Return numbers `start` to `end`, beginning at a byte; the bits after the last one are undefined."""
    first, offset = divmod(start, 8)
    whole = planes[:, first : plane_bytes(end)]
    if not offset:
        return np.ascontiguousarray(whole)
    bits = np.unpackbits(whole, axis=1, bitorder="little")[:, offset : offset + end - start]
    return np.packbits(bits, axis=1, bitorder="little")


def packed_planes_of(ranks: int, most: int) -> int:
    """Return the bits of a sum over `ranks` ranks."""
    return (ranks * most).bit_length()


def joined_planes(planes: Planes, half: int, most: int) -> Buffer:
    """Return sums as a payload; `half`: 1 if half a unit is to be added to each."""
    content = planes.reshape(-1)
    return np.append(content, np.uint8(half)) if most % 2 else content


def parted_planes(payload: Buffer, ranks: int, most: int) -> tuple[Planes, int]:
    """Return a view of the sums of a payload, and what `joined` has got as `half`."""
    content = np.frombuffer(payload, np.uint8)
    half = int(content[-1]) if most % 2 else 0
    return content[: len(content) - most % 2].reshape(packed_planes_of(ranks, most), -1), half


def packed_problem(payload: Buffer, count: int, ranks: int, most: int) -> str | None:
    """Return what is wrong with a payload of `count` numbers summed over `ranks` ranks; None: nothing."""
    planes = packed_planes_of(ranks, most)
    if not 0 < planes <= MOST_BITS:
        return f"has sums of {planes} bits: expected 1 to {MOST_BITS}"
    size, right = memoryview(payload).nbytes, planes * plane_bytes(count) + most % 2
    if size != right:
        return f"has {size} bytes, not {right}: {count} sums over {ranks} ranks of {planes} bits"
    sums, half = parted_planes(payload, ranks, most)
    if half > 1:
        return f"has {half} halves: expected 0 or 1"
    return f"has values that no sum over {ranks} ranks has" if exceeds(sums, ranks * most - half) else None


def sums_into(out: Floats, payload: Buffer | None, ranks: int, most: int) -> None:
    """Write the sums over `ranks` ranks to `out`, as numbers from -ranks * most / 2 on."""
    if payload is None:
        out[:] = 0
        return
    planes, half = parted_planes(payload, ranks, most)
    lowest = np.float32((ranks * most - half) / 2)
    np.subtract(unpacked(planes, len(out)), lowest, out=out, dtype=np.float32)


# MXNet's gradient compression of type 2bit: of each value only whether it has reached +t, or -t.
#
# A residual keeps what is lost, and is added to the next gradient, so small values count once they have
# accumulated (Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech
# 2015). The arithmetic is that of MXNet's `quantize_2bit`, in float32 and in the same order, so the numbers
# are the same bit for bit.
#
# On the wire a sum over n ranks is, for each value, the integer s + n, where s from -n to n times t is the
# sum, in as many bits as 2n has (`bit_planes`). One rank's values take 2 bits, a 16th of float32; those of 9
# take 5. Sums are never rounded or quantised again on the way, so all trees give the same ones.

TWO_BIT_MOST: Final = 2
"""Of one rank's numbers (`packed_numbers`): 0 for -t, 1 for 0, 2 for +t."""

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Signs:
    """A quantised gradient: one bit a value, eight to a byte, the first value in the least significant."""

    positive: Bits
    """Which values are +t."""
    negative: Bits
    """Which values are -t."""

    def planes(self, start: int, end: int) -> Planes | None:
        """Return values `start` to `end` as the sum over one rank; None: all are 0."""
        positive, negative = _cut(self.positive, start, end), _cut(self.negative, start, end)
        either = positive | negative
        if not either.any():
            return None
        found = np.empty((2, len(either)), np.uint8)
        np.invert(either, out=found[0])
        found[1] = positive
        return found


def quantised(gradient: Floats, residual: Floats, threshold: np.float32) -> Signs:
    """Return the quantised gradient; `residual` is updated, and keeps the rest. 6 GB/s.

    Args:
        gradient: flat.
        residual: of the same size, 0 at first.
        threshold: t, which is greater than 0.
    """
    with np.errstate(all="ignore"):  # the user sees inf and nan in the values, as with MXNet
        np.add(residual, gradient, out=residual)
        positive, negative = residual >= threshold, residual <= -threshold
        taken = np.multiply(positive.view(np.int8) - negative.view(np.int8), threshold, dtype=np.float32)
        np.subtract(residual, taken, out=residual)
    return Signs(np.packbits(positive, bitorder="little"), np.packbits(negative, bitorder="little"))


def two_bit_problem(payload: Buffer, count: int, ranks: int) -> str | None:
    """Return what is wrong with a payload of `count` values summed over `ranks` ranks; None: nothing."""
    return packed_problem(payload, count, ranks, TWO_BIT_MOST)


def two_bit_values(payload: Buffer, ranks: int, threshold: np.float32, out: Floats) -> None:
    """Write the sums over `ranks` ranks to `out`, as values of the gradient. 4 GB/s."""
    count = len(out)
    found = unpacked(parted_planes(payload, ranks, TWO_BIT_MOST)[0], count)
    if ranks < 128:
        signed: npt.NDArray[np.int8] | npt.NDArray[np.int32] = np.subtract(
            found, ranks, dtype=np.uint8, casting="unsafe"
        ).view(np.int8)
    else:
        signed = found.astype(np.int32) - ranks
    np.multiply(signed, threshold, out=out, dtype=np.float32, casting="unsafe")


def _cut(bits: Bits, start: int, end: int) -> Bits:
    """Return bits `start` to `end`, beginning at a byte; the bits after the last one are undefined."""
    first, offset = divmod(start, 8)
    whole = bits[first : plane_bytes(end)]
    if not offset:
        return whole
    return np.packbits(
        np.unpackbits(whole, bitorder="little")[offset : offset + end - start], bitorder="little"
    )


# MXNet's gradient compression of type 2bit as a codec.


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

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return no further keys."""
        return ()

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum in one round."""
        residual = state.get("residual")
        if residual is None:
            residual = state["residual"] = np.zeros_like(gradient)
        yield Transfer(0, QUANTISED, quantised(gradient, residual, self.threshold), gradient)
        with np.errstate(all="ignore"):
            np.multiply(gradient, self.threshold, out=gradient)


# Blocks of values that share a scale, and pieces of a gradient that fit into a processor's cache.

BLOCK: Final = 256
"""Values that share a scale: scales are 4 bytes a block, 1.6 % of the bytes of float32."""

PIECE: Final = 128 * BLOCK
"""Elements: 128 KiB. A gradient is encoded piece by piece, so that intermediate results stay in the cache."""

_NO_SIGN: Final = np.int32(0x7FFFFFFF)


def blocks_of(elements: int) -> int:
    """Return how many blocks so many values have; the last one may be shorter."""
    return -(-elements // BLOCK)


def pieces(elements: int) -> Iterator[tuple[slice, slice, Floats]]:
    """Yield which elements a piece has, which blocks, and memory for as many elements, the same each time."""
    memory = np.empty(min(elements, PIECE), np.float32)
    for start in range(0, elements, PIECE):
        end = min(elements, start + PIECE)
        yield slice(start, end), slice(start // BLOCK, blocks_of(end)), memory[: end - start]


def maxima(values: Floats) -> Floats:
    """Return the largest magnitude of each block; NaN is the largest of all."""
    # Floats without their sign have the order of whole numbers, NaN above infinity; those compare faster.
    found = np.empty(blocks_of(len(values)), np.int32)
    bits = values.view(np.int32)
    for elements, blocks, memory in pieces(len(values)):
        magnitudes = np.bitwise_and(bits[elements], _NO_SIGN, out=memory.view(np.int32))
        np.maximum.reduceat(magnitudes, _starts(memory), out=found[blocks])
    return found.view(np.float32)


def sums(values: Floats) -> Floats:
    """Return the sum of the magnitudes of each block."""
    found = np.empty(blocks_of(len(values)), np.float32)
    for elements, blocks, magnitudes in pieces(len(values)):
        np.abs(values[elements], out=magnitudes)
        np.add.reduceat(magnitudes, _starts(magnitudes), out=found[blocks])
    return found


def scaled(values: Floats, of_blocks: Floats, out: Floats) -> None:
    """Write values, each times what belongs to its block, to `out`, which may be the same memory."""
    full = len(values) // BLOCK * BLOCK
    np.multiply(
        values[:full].reshape(-1, BLOCK),
        of_blocks[: full // BLOCK, np.newaxis],
        out=out[:full].reshape(-1, BLOCK),
    )
    if full < len(values):
        np.multiply(values[full:], of_blocks[-1], out=out[full:])


def each(of_blocks: Floats, elements: int) -> Floats:
    """Return what belongs to the block of each of so many elements."""
    return np.repeat(of_blocks, BLOCK)[:elements]


def _starts(piece: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(0, len(piece), BLOCK)


# Noise for stochastic rounding, at the cost of an addition.
#
# To draw a number for each value takes as long as all else that encoding does. So noise is cut from one
# table, at a place that depends on rank, gradient and tensor. The table has equally spaced numbers, each as
# often as any other, in random order. Over all places each value gets them equally often, too, so rounding is
# right on the average, to half of their distance.

_NUMBERS: Final = 1 << 17
"""Of the table: 512 KiB. More would leave a processor's cache."""

_DIFFERENT: Final = 1 << 12
"""Numbers that differ. Of more, the largest plus 127 would be 128 in float32."""

RESOLUTION: Final = 1 / (2 * _DIFFERENT)
"""How far, at most, the mean of a rounded value is from the value, in steps."""

_STRIDE: Final = 54_037
"""From one cut to the next, modulo the numbers; odd, so that all places occur."""

_SEED: Final = 1


def noise(place: GradientPlace, most: int) -> Iterator[Floats]:
    """Yield noise for one piece of a gradient after the other: views, between 0 and 1.

    Args:
        place: which gradient it is.
        most: values of a piece.
    """
    table = _table(most)
    start = crc32(repr((place.rank, place.round, place.shape)).encode())
    while True:
        start %= _NUMBERS
        yield table[start : start + most]
        start += _STRIDE


@functools.lru_cache(maxsize=2)
def _table(most: int) -> Floats:
    """Return the numbers in a random order, and the first `most` of them again."""
    random = np.random.Generator(np.random.SFC64(_SEED))
    numbers = (random.permutation(_NUMBERS) % _DIFFERENT).astype(np.float32)
    numbers += np.float32(0.5)
    numbers /= np.float32(_DIFFERENT)
    found = np.resize(numbers, _NUMBERS + most)
    found.flags.writeable = False
    return found


# One byte a value: whole numbers with a scale a block, whose sums are exact.
#
# A first round finds the scale of each block: the largest magnitude that any rank has in it. Then each rank
# sends whole numbers from -levels to levels, with `levels` so small that a sum over all ranks has 9 bits.
# They add up without rounding, so all trees give the same bits. What a rank rounds off it adds to its next
# gradient (error feedback: Karimireddy et al., arXiv 1901.09847).

_MOST_LEVELS: Final = 127
_LARGEST_SUM: Final = 255
"""A sum takes 9 bits, up to 36 ranks; a rank's own numbers 8 or fewer."""
_FEWEST_LEVELS: Final = 7

_SMALLEST_SCALE: Final = np.float32(2.0**-100)
"""Blocks of smaller values wait in the residual: their steps would be so small that float32 rounds them."""


class Int8:
    """Block-wise whole numbers with error feedback.

    A block in which any rank has NaN or infinity becomes NaN at all ranks, and leaves no residual.
    """

    name: ClassVar[str] = "int8"

    def __init__(self, rounding: Literal["nearest", "stochastic"] = "nearest") -> None:
        """Describe the numbers.

        Args:
            rounding: to the nearest; or up or down at random, right on the average, to `RESOLUTION`.

        Raises:
            UsageError: another rounding.
        """
        if rounding not in {"nearest", "stochastic"}:
            raise UsageError(f"int8 with rounding={rounding!r}: expected 'nearest' or 'stochastic'")
        self._stochastic: Final = rounding == "stochastic"
        self.fingerprint: Final = f"int8 rounding={rounding}"

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of most rounds: as if the job had four ranks."""
        return packed(2 * levels_of(4))

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return the key of the scales."""
        return (SubKey("scales", blocks_of(int(np.prod(shape, dtype=np.int64)))),)

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Agree on scales, then sum whole numbers."""
        residual = take_residual(gradient, state)
        own = maxima(gradient)
        scales = own.copy()
        yield Transfer(1, MAXIMA, scales, scales)
        finite = bool(np.isfinite(own).all() and np.isfinite(scales).all())
        within = finite and bool((own <= scales).all())  # not so if this rank is not in the maxima
        scales[scales < _SMALLEST_SCALE] = 0
        levels = levels_of(place.ranks)
        dither = noise(place, PIECE) if self._stochastic else None
        steps = scales / np.float32(levels)
        numbers = np.empty(len(gradient), np.uint8)
        with np.errstate(all="ignore"):
            factors = np.where(scales > 0, np.float32(levels) / scales, np.float32(0))
            for piece, blocks, whole in pieces(len(gradient)):
                scaled(gradient[piece], factors[blocks], whole)
                _round(whole, dither)
                if not finite:
                    # Where the scale is NaN or infinite, sums become NaN, whatever is sent.
                    np.nan_to_num(whole, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
                if not within:
                    np.minimum(whole, np.float32(levels), out=whole)
                    np.maximum(whole, np.float32(-levels), out=whole)
                np.copyto(numbers[piece].view(np.int8), whole, casting="unsafe")
                scaled(whole, steps[blocks], whole)
                np.subtract(gradient[piece], whole, out=residual[piece])
        numbers += np.uint8(levels)  # modulo 256: faster than in float32
        if not finite:
            residual[~np.isfinite(residual)] = 0
        sums: list[tuple[int, int, bytes, int]] = []
        yield Transfer(0, packed(2 * levels), as_planes(numbers, 2 * levels), sums)
        for start, end, payload, contributors in sums:
            sums_into(gradient[start:end], payload, contributors.bit_count(), 2 * levels)
            if not contributors >> place.rank & 1:
                _take_back_numbers(residual, numbers, steps, levels, range(start, end))
        with np.errstate(all="ignore"):
            scaled(gradient, steps, gradient)


def levels_of(ranks: int) -> int:
    """Return the largest whole number of one rank, on either side of 0."""
    return max(_FEWEST_LEVELS, min(_MOST_LEVELS, _LARGEST_SUM // ranks))


def _round(exact: Floats, dither: Iterator[Floats] | None) -> None:
    """Make whole numbers, in place: the nearest ones; or at random, the one below or the one above."""
    if dither is None:
        np.rint(exact, out=exact)
        return
    exact += next(dither)[: len(exact)]
    np.floor(exact, out=exact)


def _take_back_numbers(
    residual: Floats, numbers: npt.NDArray[np.uint8], steps: Floats, levels: int, elements: range
) -> None:
    """Add what this rank has sent of some elements to its residual again: their sums came without it."""
    start, end = elements.start, elements.stop
    sent = (numbers[start:end].astype(np.float32) - np.float32(levels)) * each(steps, end)[start:]
    with np.errstate(all="ignore"):
        sent[~np.isfinite(sent)] = 0
        residual[start:end] += sent


# The sign of each value, and a magnitude a block (Seide et al., "1-bit stochastic gradient descent",
# Interspeech 2014; EF-SignSGD: Karimireddy et al., arXiv 1901.09847).
#
# A first round sums the mean magnitudes of the blocks; all ranks use their average. Then the signs are
# counted, exactly. What that leaves of a gradient is added to the next one.

_SIGNS: Final = packed(1)


class OneBit:
    """Signs with error feedback; zeros have one, too.

    A block in which any rank has NaN or infinity, or values whose sum is infinite in float32, becomes NaN or
    infinite at all ranks, and leaves no residual.
    """

    name: ClassVar[str] = "1bit"
    fingerprint: ClassVar[str] = "1bit"

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of most rounds."""
        return _SIGNS

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return the key of the magnitudes."""
        return (SubKey("scales", blocks_of(int(np.prod(shape, dtype=np.int64)))),)

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Agree on magnitudes, then count signs."""
        residual = take_residual(gradient, state)
        counts = np.full(blocks_of(len(gradient)), BLOCK, np.float32)
        counts[-1:] -= -len(gradient) % BLOCK
        with np.errstate(all="ignore"):
            magnitudes = sums(gradient) / counts
        ranks = yield Transfer(1, 0, magnitudes, magnitudes)
        magnitudes /= np.float32(max(1, ranks))
        negative = np.packbits(np.signbit(gradient), bitorder="little")
        with np.errstate(all="ignore"):
            for piece, blocks, sent in pieces(len(gradient)):
                np.copysign(each(magnitudes[blocks], len(sent)), gradient[piece], out=sent)
                np.subtract(gradient[piece], sent, out=residual[piece])
        if not np.isfinite(magnitudes).all():
            residual[~np.isfinite(residual)] = 0
        results: list[tuple[int, int, bytes, int]] = []
        yield Transfer(0, _SIGNS, np.invert(negative)[np.newaxis], results)
        with np.errstate(all="ignore"):
            for start, end, payload, contributors in results:
                sums_into(gradient[start:end], payload, contributors.bit_count(), 1)
                if not contributors >> place.rank & 1:
                    _take_back_signs(residual, negative, magnitudes, range(start, end))
            scaled(gradient, 2 * magnitudes, gradient)  # sums count halves


def _take_back_signs(
    residual: Floats,
    negative: np.ndarray[tuple[int], np.dtype[np.uint8]],
    magnitudes: Floats,
    elements: range,
) -> None:
    """Add what this rank has sent of some elements to its residual again: their sums came without it."""
    start, end = elements.start, elements.stop
    sent = each(magnitudes, end)[start:]
    sent[np.unpackbits(negative, count=end, bitorder="little")[start:].view(np.bool_)] *= -1
    sent[~np.isfinite(sent)] = 0
    residual[start:end] += sent
