"""The form of zeros that fit a round of any form: those of a rank whose program has ended. Pure.

A round that began in it takes the form of the first values that come, or of the operation of this rank's own
program. Sums of zeros become sums of that form.
"""

from __future__ import annotations

from typing import Final

from netstorm.kvstore.values.form import Values
from netstorm.protocol.chunks import UNDETERMINED_FORM
from netstorm.protocol.frames import Buffer

__all__ = ["UndeterminedForm", "ZeroSum"]


class UndeterminedForm:
    """The form of zeros in a round whose real form is not known yet. See `Form`."""

    __slots__ = ()

    codec: Final = UNDETERMINED_FORM

    def new_sum(self) -> ZeroSum:
        """Return an empty sum of one chunk."""
        return ZeroSum()

    def own(self, source: Values, start: int, end: int) -> None:
        """Return this rank's contribution."""

    def write(
        self, destination: Values, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Do nothing: a round to which only ended ranks contribute has no user."""

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload: it has values, and zeros have none."""
        return "has values, and no form"


class ZeroSum:
    """Contributions to one chunk, all of them zeros. See `Sum`."""

    __slots__ = ("contributors",)

    def __init__(self) -> None:
        self.contributors = 0

    def add_own(self, values: Values | None, bit: int) -> None:
        """Add this rank to the contributors."""
        self.contributors |= bit

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's contributors."""
        self.contributors |= contributors

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent."""
        return None

    to_keep = to_send
