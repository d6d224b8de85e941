"""What the payload of a chunk means: the seam between trees, which move payloads, and the values in them.

A key has a plain form, `Dense` or that of sparse rows, and a round of it may have another one, as pushes
under gradient compression do. All that aggregating and forwarding knows of values is here: how a rank's own
contribution becomes part of a sum, how a received payload does, what a sum is as a payload, how a result is
written, and which payloads no correct node sends. The number of a form, `codec`, travels with each part.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from netstorm.protocol.frames import Buffer

__all__ = ["Array", "Form", "Sum", "Values"]

Array = npt.NDArray[np.generic]

Values = Any
"""What the user has, or wants, of a key or of one of its chunks, as its form knows it: flat arrays if it is
dense.
"""


class Sum(Protocol):
    """Contributions to one chunk. Starts empty; ends as what is sent to the parent or, at the root, to the
    children.
    """

    contributors: int
    """Bit set of the ranks added in."""

    def add_own(self, values: Values | None, bit: int) -> None:
        """Add what `Form.own` has returned for this rank (None: zeros)."""

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add what a child sent (None: zeros), whose memory is ours from now on; `Form.problem` is None."""

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: zeros. It may be the user's own memory."""

    def to_keep(self) -> Buffer | None:
        """Return the sum in memory of our own: the root's result, which outlives the user's source."""


class Form(Protocol):
    """One way to say the values of a key's chunks."""

    @property
    def codec(self) -> int:
        """The number that parts carry (`Part.codec`): the same on all ranks."""

    def new_sum(self) -> Sum:
        """Return an empty sum of one chunk."""

    def own(self, source: Values, start: int, end: int) -> Values | None:
        """Return this rank's contribution to elements `start` to `end`, for `Sum.add_own`; None: zeros.

        Args:
            source: what the operation contributes.
        """

    def write(self, destination: Values, start: int, end: int, payload: Buffer | None) -> None:
        """Write the result of elements `start` to `end` (None: zeros) to where the user wants it."""

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return why no correct node sends this for so many elements, as in "has 3 bytes, not 4"; None: it
        may be added, passed on and written.

        Args:
            contributors: bit set of the ranks that are summed in it.
        """
