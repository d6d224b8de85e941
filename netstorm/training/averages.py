"""Averages of what ranks have: by part, over those who are in it.

All ranks have the same values after an average: the *base* of the next one. Under a codec a rank sends what
it has learnt since, its change, and the average of all changes is added to the base. So what a codec loses is
lost of a small change and not of a value, and what a rank has not sent yet (its residual) is added to its
next change.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import numpy as np

from netstorm.compression.codec import Floats, Rounds, State
from netstorm.kvstore.forms import Array
from netstorm.kvstore.operations import Operation

__all__ = [
    "Changes",
    "CountedSum",
    "divide_by_contributors",
    "divide_parts",
    "forget_the_past",
    "in_all_parts",
]

_OF_THE_PAST: Final = ("residual", "velocity")
"""What codecs keep of earlier gradients (`State`)."""


class CountedSum(Protocol):
    """A sum that knows who is in each of its parts once it is there."""

    def counted(self, elements: int) -> Iterable[tuple[slice, int]]:
        """Return the parts of so many elements, and the bit sets of the ranks in them."""


class Changes:
    """The averages of one key at one rank. One is made at a time."""

    def __init__(self) -> None:
        """Begin without a base."""
        self._base: Floats | None = None

    def remember(self, values: Floats) -> None:
        """Begin the next change with these values, which all ranks have."""
        if self._base is None:
            self._base = values.copy()
        else:
            self._base[:] = values

    def rounds(
        self,
        values: Floats,
        total: CountedSum,
        encode: Callable[[Floats], Rounds],
        *,
        weight: int = 1,
        count: int | None = None,
    ) -> Rounds:
        """Replace values by their average, the same bits at all ranks.

        Args:
            values: flat; the sum over so many ranks as `weight` says.
            total: of the changes.
            encode: returns the rounds that make a change the sum of all changes, in place.
            weight: how many ranks' values these are.
            count: of how many ranks the sum is; None: of those that contribute to it, part by part.
        """
        base = self._base
        assert base is not None, "a value that all ranks have is known"
        with np.errstate(all="ignore"):
            change = values - base if weight == 1 else values - np.float32(weight) * base
        yield from encode(change)
        with np.errstate(all="ignore"):
            divide_parts(change, total, count)
            np.add(base, change, out=base)
        values[:] = base


def divide_parts(values: Floats, total: CountedSum, count: int | None = None) -> None:
    """Make a sum the average of the ranks in it, part by part, or of `count` ranks, in place."""
    for elements, contributors in total.counted(len(values)):
        values[elements] /= np.float32(count or max(1, contributors.bit_count()))


def in_all_parts(parts: Iterable[int]) -> int:
    """Return the bit set of the ranks that are in all parts of a result, given those of each part."""
    return max(functools.reduce(operator.and_, parts, -1), 0)


def forget_the_past(state: State) -> None:
    """Forget what has not been sent: this rank has just joined, and its values counted in no average yet."""
    for name in _OF_THE_PAST:
        state.pop(name, None)


def divide_by_contributors(operation: Operation, values: Array) -> None:
    """Make the result of an operation of its key's own form the average of those who are in it, in place.

    Args:
        operation: it has ended.
        values: its destination.
    """
    bounds = operation.key.layout_of(operation.form).bounds
    for contributors, chunks in operation.contributors.items():
        divisor = values.dtype.type(max(1, contributors.bit_count()))
        whole = chunks == (1 << len(bounds)) - 1
        parts = [part for chunk, part in enumerate(bounds) if chunks >> chunk & 1]
        for begin, end in [(0, len(values))] if whole else parts:
            with np.errstate(all="ignore"):
                np.true_divide(values[begin:end], divisor, out=values[begin:end])
