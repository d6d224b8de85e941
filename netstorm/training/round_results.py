"""What an elastic store makes of each round's result: who is in it, and sums as of the full world."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from netstorm.compression.sparse import Rows
from netstorm.kvstore.operations import Operation
from netstorm.protocol.frames import ranks_in
from netstorm.training.averages import in_all_parts

__all__ = ["FollowedEntry", "StoreRoundResults"]


class FollowedEntry(Protocol):
    """One key of a store."""

    contributors: int


class StoreRoundResults:
    """The results of one store's rounds. Called on the I/O thread, before the script sees the result."""

    def __init__(self, world: int, *, rescales: bool) -> None:
        """Begin.

        Args:
            world: the number of ranks whose sums the script expects.
            rescales: sums of floats are scaled to that many contributors.
        """
        self._world: Final = world
        self._rescales: Final = rescales
        self.fingerprint: Final = f" rescaled to {world}" if rescales else ""
        """Part of the fingerprint of a round: all ranks must scale alike."""

    def follow(self, operation: Operation, entry: FollowedEntry) -> None:
        """Look at the result of an operation before its `done` is called."""
        done = operation.done

        def ended(error: Exception | None) -> None:
            if error is None:
                self._rescale(operation)
                entry.contributors = in_all_parts(operation.contributors)
            done(error)

        operation.done = ended

    def follow_sum(self, total: npt.NDArray[np.float32], contributors: int, entry: FollowedEntry) -> None:
        """Look at a sum that a codec has made, on a thread that computes.

        Args:
            total: flat; it may be scaled.
            contributors: bit set of the ranks that are in all of it.
            entry: whose sum it is.
        """
        count = contributors.bit_count()
        if self._rescales and count not in (0, self._world):
            total *= np.float32(self._world / count)
        entry.contributors = max(contributors, 0)

    def _rescale(self, operation: Operation) -> None:
        destination, key = operation.destination, operation.key
        if not self._rescales or operation.from_lowest or not np.issubdtype(key.dtype, np.floating):
            return
        bounds = key.layout_of(operation.form).bounds
        for contributors, chunks in operation.contributors.items():
            count = contributors.bit_count()
            if count in (0, self._world):
                continue
            factor = key.dtype.type(self._world / count)
            if isinstance(destination, list):  # rows of the chunks that have some: views of what was received
                length = max(1, int(np.prod(key.spec.shape[1:], dtype=np.int64)))
                firsts = {-(-bounds[chunk][0] // length) for chunk in ranks_in(chunks)}
                for place, (first, rows) in enumerate(destination):
                    if first in firsts:
                        destination[place] = (first, Rows(rows.numbers, rows.values * factor))
            elif isinstance(destination, np.ndarray):
                for chunk in ranks_in(chunks):
                    begin, end = bounds[chunk]
                    destination[begin:end] *= factor
