"""`set_gradient_compression`: what MXNet's users may say, and what a key keeps because of it."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from netstorm.compression.two_bit import Signs, quantised
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.quantised import Quantised

__all__ = ["GradientCompression", "Residual", "compression_of"]

_DEFAULT_THRESHOLD: Final = 0.5
"""MXNet's."""


class GradientCompression:
    """Type 2bit with a threshold: what a store's pushes travel as from now on."""

    def __init__(self, threshold: np.float32, ranks: int) -> None:
        """Describe it; `ranks` is the size of the job."""
        self.threshold: Final = threshold
        self.form: Final = Quantised(threshold, ranks)
        self.text: Final = f" compression=2bit threshold={threshold!s}"
        """Belongs to the fingerprint of a round: all ranks must compress alike."""

    def check_key(self, key: Key, what: str) -> None:
        """Refuse keys that MXNet does not compress either.

        Raises:
            UsageError: it is not of float32.
        """
        if self.form.codec not in key.forms:
            raise UsageError(
                f"{what} of key {key.name!r}, which is {key.spec.dtype}: gradient compression is for dense "
                "float32 only, as MXNet's is; keep such keys in a store without it"
            )


class Residual:
    """What compression has kept back of a key's gradients on this node."""

    __slots__ = ("_array", "_begun")

    def __init__(self, key: Key) -> None:
        """Begin with zeros."""
        self._array: Final = StagingBuffer(key.spec.shape, key.dtype)
        self._begun = False

    @property
    def array(self) -> NDArray:
        """Written by each operation that quantises, so that MXNet's engine keeps their order."""
        return self._array.array

    def quantise(self, gradient: Any, threshold: np.float32) -> Signs:
        """Return what is sent of a gradient; within an operation that writes `array`."""
        kept = np.frombuffer(self._array.memory(), np.float32)
        if not self._begun:
            kept[:] = 0
            self._begun = True
        return quantised(gradient, kept, threshold)


def compression_of(parameters: Any, ranks: int) -> GradientCompression:
    """Return what `set_gradient_compression` was told.

    Args:
        parameters: a dictionary with `type` and perhaps `threshold`; others are ignored, as MXNet does.
        ranks: size of the job.

    Raises:
        UsageError: something that MXNet refuses, too.
    """
    if not isinstance(parameters, dict):
        raise UsageError(
            f"gradient compression takes a dictionary such as {{'type': '2bit', 'threshold': 0.5}}, "
            f"not {parameters!r}"
        )
    if "type" not in parameters:
        raise UsageError(f"gradient compression {parameters!r} has no type; MXNet 1.9 knows '2bit'")
    if str(parameters["type"]) != "2bit":
        raise UsageError(
            f"Unknown type for gradient compression {parameters['type']!r}; MXNet 1.9 knows '2bit'"
        )
    given = parameters.get("threshold", _DEFAULT_THRESHOLD)
    try:
        with np.errstate(all="ignore"):
            threshold = np.float32(str(given))
    except ValueError:
        threshold = np.float32("nan")
    if not (math.isfinite(threshold) and threshold > 0):
        raise UsageError(
            f"gradient compression with threshold {given!r}: it must be a float32 greater than 0"
        )
    return GradientCompression(threshold, ranks)
