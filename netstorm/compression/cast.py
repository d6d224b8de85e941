"""Codecs of 16 bits: values are rounded to a shorter type on the wire, and summed in float32. Pure."""

from __future__ import annotations

from typing import ClassVar

from netstorm.compression.codec import Floats, Part, Place, Rounds, State, Transfer
from netstorm.protocol.codecs import BFLOAT16, FLOAT16, narrow

__all__ = ["BFloat16", "Float16", "Uncompressed"]


class Uncompressed:
    """Values as they are: for tensors that a rule exempts."""

    name: ClassVar[str] = "none"
    fingerprint: ClassVar[str] = "none"
    _codec: ClassVar[int] = 0

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of all rounds."""
        return self._codec

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return no further keys."""
        return ()

    def rounds(self, gradient: Floats, state: State, place: Place) -> Rounds:
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
