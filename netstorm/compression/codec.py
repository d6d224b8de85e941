"""What a codec is: how the sum of one tensor over all ranks is made with fewer bytes. Pure.

A codec is a generator of rounds. It yields what this rank contributes to a round, and goes on when the sum of
that round is there; in the end the gradient has become the sum. So a codec of several rounds reads like
blocking code, and whoever drives it decides on which thread it goes on. `docs/contributing/adding-a-codec.md`
shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.protocol.codecs import BFLOAT16, FLOAT16, narrow

__all__ = [
    "AGREED",
    "AnyArray",
    "BFloat16",
    "Codec",
    "Float16",
    "Floats",
    "GradientPlace",
    "Rounds",
    "State",
    "SubKey",
    "Transfer",
    "Uncompressed",
    "take_residual",
]


AnyArray: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]

State: TypeAlias = dict[str, AnyArray]
"""What a codec keeps of a tensor from one gradient to the next, by name, such as `residual`: what has not
been sent yet. A checkpoint saves it. It is empty at first."""

AGREED: Final = "agreed"
"""Name in a `State` of what ranks have agreed on: the same bits at all. A rank that joins an elastic job
later gets it from the others before its first gradient."""


def _no_clock() -> float:
    return 0.0


class SubKey(NamedTuple):
    """A further key that a tensor needs, besides its own."""

    suffix: str
    """Of the tensor's name."""
    elements: int
    codec: int = 0
    """That of most of its rounds; it determines the size of chunks."""
    in_each: bool = True
    """Each gradient has a round of it."""


class GradientPlace(NamedTuple):
    """Which gradient it is."""

    shape: tuple[int, ...]
    """Of the tensor."""
    ranks: int
    """The most that the job may have."""
    rank: int
    round: int
    """Counts the gradients of the tensor, the same at all ranks."""
    now: Callable[[], float] = _no_clock
    """The time in s, on any clock that does not jump."""


class Transfer(NamedTuple):
    """One round of one key."""

    part: int
    """0: of the tensor's own key; 1: of the first of its further ones."""
    codec: int
    """How the values travel (`protocol.codecs`)."""
    source: Any
    """What this rank contributes, as that form takes it; it must not be changed while the round is under
    way."""
    destination: Any
    """Where the form is to write the sum."""
    counted: list[tuple[int, int, int]] | None = None
    """Gets, with the sum, which ranks are in it: first element, end and bit set of each of its parts. For
    forms whose results do not say so themselves."""


Rounds: TypeAlias = Generator[Transfer, int, None]
"""Gets the number of ranks whose values are in a round when it is done (the fewest, if chunks differ)."""


class Codec(Protocol):
    """How gradients of float32 travel. One object serves all tensors; what it keeps of each is its
    `State`.
    """

    @property
    def name(self) -> str:
        """What a script says."""

    @property
    def fingerprint(self) -> str:
        """The name and all parameters: ranks must agree on them."""

    def form(self, shape: tuple[int, ...]) -> int | None:
        """Return the codec of most rounds of a tensor's own key; None: it has none, only further keys
        have.
        """

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return which further keys a tensor needs."""

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum a gradient over all ranks, in place.

        Args:
            gradient: flat; becomes the sum, the same bits at all ranks.
            state: of the tensor at this rank, which is updated.
            place: which gradient it is.
        """


def take_residual(gradient: Floats, state: State) -> Floats:
    """Add what has not been sent yet to a gradient, and return the residual's memory, to be written."""
    residual = state.get("residual")
    if residual is None:
        residual = state["residual"] = np.zeros_like(gradient)
    else:
        with np.errstate(all="ignore"):
            np.add(gradient, residual, out=gradient)
    return residual


# Codecs of 16 bits: values are rounded to a shorter type on the wire, and summed in float32.


class Uncompressed:
    """Values as they are: for tensors that a rule exempts."""

    name: ClassVar[str] = "none"
    fingerprint: ClassVar[str] = "none"
    _codec: ClassVar[int] = 0

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of all rounds."""
        return self._codec

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return no further keys."""
        return ()

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum in one round."""
        yield Transfer(0, self._codec, gradient, gradient)


class Float16(Uncompressed):
    """Half the bytes: 11 significant bits, from 6e-8 to 65504; larger sums become infinite."""

    name: ClassVar[str] = "fp16"
    fingerprint: ClassVar[str] = "fp16"
    _codec: ClassVar[int] = narrow(FLOAT16)


class BFloat16(Uncompressed):
    """Half the bytes: 8 significant bits, and the range of float32."""

    name: ClassVar[str] = "bf16"
    fingerprint: ClassVar[str] = "bf16"
    _codec: ClassVar[int] = narrow(BFLOAT16)
