"""PowerSGD: a matrix as the product of two thin ones (Vogels et al., arXiv 1905.13727, algorithm 1 and 2).
Pure.

Both factors are sums over ranks, so they add up along any tree. The right factor of one gradient begins the
next one. What the product leaves of a rank's gradient is added to its next one.

All ranks must make the same bits of equal factors, whatever their processors. So what follows a sum uses only
operations that IEEE 754 defines, element by element, and sums in a fixed order; no BLAS.
"""

from __future__ import annotations

from typing import ClassVar, Final
from zlib import crc32

import numpy as np

from netstorm.compression.codec import Floats, GradientPlace, Rounds, State, SubKey, Transfer, take_residual
from netstorm.errors import UsageError
from netstorm.protocol.codecs import FACTORS

__all__ = ["PowerSGD"]

_GAIN: Final = 2.0
"""Tensors whose factors are not smaller by this factor travel as they are."""


_PIECE: Final = 32_768
"""Elements that are computed at once."""


class PowerSGD:
    """Factors of low rank, with error feedback.

    A tensor in which any rank has NaN or infinity becomes NaN at all ranks, and leaves no residual. The next
    one begins anew. Products with values near the largest of float32 may become infinite.
    """

    name: ClassVar[str] = "powersgd"

    def __init__(self, rank: int = 4) -> None:
        """Describe the factors.

        Args:
            rank: columns of each.

        Raises:
            UsageError: a rank below 1.
        """
        if not rank >= 1 or rank != int(rank):
            raise UsageError(f"powersgd with rank={rank!r}: expected a whole number from 1 on")
        self._rank: Final = int(rank)
        self.fingerprint: Final = f"powersgd rank={rank}"

    def form(self, shape: tuple[int, ...]) -> int | None:
        """Return the codec of rounds of a tensor that is no matrix; None: it is one."""
        return None if self.parts(shape) else 0

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return the keys of both factors, if it is worth it."""
        rows, columns = _matrix(shape)
        if (rows + columns) * self._rank * _GAIN > rows * columns:
            return ()
        return SubKey("left", rows * self._rank, FACTORS), SubKey("right", columns * self._rank, FACTORS)

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum the left factors, then the right ones."""
        if not self.parts(place.shape):
            yield Transfer(0, 0, gradient, gradient)
            return
        rows, columns = _matrix(place.shape)
        residual = take_residual(gradient, state)
        matrix = gradient.reshape(rows, columns)
        right = state.get("right")
        if right is None:
            right = _without_exponents(self._first_right(columns, place.shape))
        # A rank that has joined later begins with another right factor than the others. That makes another
        # basis of the left factors, all the same at all ranks, and no wrong sum.
        with np.errstate(all="ignore"):
            left = np.ascontiguousarray(matrix @ right)
        yield Transfer(1, 0, left.reshape(-1), left.reshape(-1))
        _orthogonalise(left)
        with np.errstate(all="ignore"):
            own = np.ascontiguousarray(matrix.T @ left)
            np.subtract(matrix, left @ own.T, out=residual.reshape(rows, columns))
        residual[~np.isfinite(residual)] = 0
        total = np.empty_like(own)
        counted: list[tuple[int, int, int]] = []
        yield Transfer(2, 0, own.reshape(-1), total.reshape(-1), counted)
        with np.errstate(all="ignore"):
            missing = [slice(start, end) for start, end, ranks in counted if not ranks >> place.rank & 1]
            if missing:
                _take_back(residual.reshape(rows, columns), left, own, missing)
            _multiply(left, total, matrix)
        usable = np.isfinite(total).all(axis=0) & total.any(axis=0)
        first = self._first_right(columns, place.shape)
        state["right"] = _without_exponents(np.where(usable, total, first))

    def _first_right(self, columns: int, shape: tuple[int, ...]) -> Floats:
        """Return what all ranks begin with: whole numbers, which all machines make alike."""
        random = np.random.Generator(np.random.PCG64(crc32(repr((shape, self._rank)).encode())))
        return random.integers(-1000, 1001, (columns, self._rank)).astype(np.float32)


def _multiply(left: Floats, right: Floats, product: Floats) -> None:
    """Write `left` times the transpose of `right`: column after column, and a few rows at a time, which stay
    in the cache.
    """
    rows = max(1, _PIECE // max(1, product.shape[1]))
    columns = np.ascontiguousarray(right.T)
    memory = np.empty((min(rows, len(product)), product.shape[1]), np.float32)
    for start in range(0, len(product), rows):
        piece, factors = product[start : start + rows], left[start : start + rows]
        term = memory[: len(piece)]
        np.multiply(factors[:, :1], columns[0], out=piece)
        for column in range(1, len(columns)):
            piece += np.multiply(factors[:, column : column + 1], columns[column], out=term)


def _take_back(residual: Floats, left: Floats, own: Floats, missing: list[slice]) -> None:
    """Add to the residual what this rank has sent of some parts of its right factor, and was not counted."""
    uncounted = np.zeros_like(own)
    for part in missing:
        uncounted.reshape(-1)[part] = own.reshape(-1)[part]
    back = left @ uncounted.T
    back[~np.isfinite(back)] = 0
    residual += back


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix, as PowerSGD has it: the first dimension by the
    others.
    """
    if len(shape) < 2:
        return 1, int(np.prod(shape, dtype=np.int64))
    return shape[0], int(np.prod(shape[1:], dtype=np.int64))


def _without_exponents(columns: Floats) -> Floats:
    """Return columns times powers of two, so that the largest of each is 0.5 to 1.

    So gradients of any magnitude are multiplied without overflow, or loss of digits.
    """
    _, exponents = np.frexp(np.abs(columns).max(axis=0, initial=0))
    return np.ldexp(columns, -exponents)


def _orthogonalise(columns: Floats) -> None:
    """Make columns orthonormal, in place (Gram and Schmidt); a column that depends on others becomes zero."""
    wide = columns.astype(np.float64)
    with np.errstate(all="ignore"):
        for place in range(wide.shape[1]):
            column = wide[:, place]
            before = _dot(column, column)
            for other in range(place):
                column -= _dot(column, wide[:, other]) * wide[:, other]
            norm = np.sqrt(_dot(column, column))
            if norm <= 1e-7 * np.sqrt(before):
                column[:] = 0
            else:
                column /= norm
    columns[:] = wide


def _dot(
    first: np.ndarray[tuple[int], np.dtype[np.float64]], second: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float:
    """Return the product, added up from the first element to the last."""
    return float(np.cumsum(first * second)[-1]) if len(first) else 0.0
