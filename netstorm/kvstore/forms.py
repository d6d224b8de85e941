"""The interface between trees, which move payloads, and the values in payloads. Pure.

A key has a form of its own, `Dense` or that of sparse rows. A round of it may have another form, as pushes
under gradient compression do. Aggregation and forwarding use values only through this interface: add a rank's
own contribution or a received payload to a sum, encode a sum as a payload, write a result, and check a
payload. The number of a form, `codec`, travels with each part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from netstorm.protocol.frames import Buffer

__all__ = ["Array", "Form", "Payload", "Payloads", "Sum", "Values"]

Array = npt.NDArray[np.generic]

Values = Any
"""The user's values of a key or of one of its chunks, as the form takes them: a flat array if it is dense.

Each form has its own type (an array, `Signs`, `Rows`, `RowParts`), and none of them have anything in common.
"""


class Payload(NamedTuple):
    """The result of a chunk, as it came."""

    start: int
    """First element."""
    end: int
    content: Buffer | None
    """None: zeros."""
    contributors: int
    """Bit set of the ranks whose contributions are in it."""


Payloads = list[Payload]
"""The destination of an operation whose results another thread decodes, in order of arrival."""


class Sum(Protocol):
    """Contributions to one chunk. Starts empty; ends as what is sent to the parent or, at the root, to the
    children.
    """

    contributors: int
    """Bit set of the ranks whose contributions are in the sum."""

    def add_own(self, values: Values | None, bit: int) -> None:
        """Add this rank's contribution, which `Form.own` has returned (None: zeros)."""

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: zeros), which has no `Form.problem`. The sum may change its memory."""

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: zeros. It may be the user's own memory."""

    def to_keep(self) -> Buffer | None:
        """Return the root's result as a payload, in private memory: it outlives the user's source."""


class Form(Protocol):
    """One way to encode the values of a key's chunks."""

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

    def write(
        self, destination: Values, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Write the result of elements `start` to `end` (None: zeros) to the user's destination.

        Args:
            contributors: bit set of the ranks whose contributions are in it.
        """

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload for so many elements, such as "has 3 bytes, not 4"; None: it
        may be added, forwarded and written.

        Args:
            contributors: bit set of the ranks whose contributions are in it.
        """
