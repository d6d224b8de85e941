"""`set_gradient_compression`: its parameters, and the residual that each key keeps."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

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
    """Type 2bit with a threshold: the form in which a store's pushes travel."""

    def __init__(self, threshold: np.float32, ranks: int) -> None:
        """Make it for a job of `ranks` nodes."""
        self.threshold: Final = threshold
        self.form: Final = Quantised(threshold, ranks)
        self.fingerprint: Final = f" compression=2bit threshold={threshold!s}"
        """Part of the fingerprint of a round: all ranks must compress alike."""

    def check_key(self, key: Key, what: str) -> None:
        """Check that a key can be compressed; MXNet has the same limit.

        Raises:
            UsageError: its type is not float32.
        """
        if self.form.codec not in key.forms:
            raise UsageError(
                f"{what} of key {key.name!r}, which is {key.spec.dtype}: gradient compression is for dense "
                "float32 only, as MXNet's is; keep such keys in a store without it"
            )


class Residual:
    """The part of a key's gradients that compression has not sent yet, on this node."""

    __slots__ = ("_array", "_has_values")

    def __init__(self, key: Key) -> None:
        """Begin with zeros."""
        self._array: Final = StagingBuffer(key.spec.shape, key.dtype)
        self._has_values = False

    @property
    def array(self) -> NDArray:
        """Written by each operation that quantises, so that MXNet's engine keeps their order."""
        return self._array.array

    def quantise(self, gradient: npt.NDArray[np.float32], threshold: np.float32) -> Signs:
        """Return what is sent of a gradient, and keep the rest; within an operation that writes `array`."""
        rest = np.frombuffer(self._array.memory(), np.float32)
        if not self._has_values:
            rest[:] = 0
            self._has_values = True
        return quantised(gradient, rest, threshold)


def compression_of(parameters: object, ranks: int) -> GradientCompression:
    """Return the compression that the parameters of `set_gradient_compression` describe.

    Args:
        parameters: a dictionary with `type` and perhaps `threshold`. Others are ignored, as MXNet does.
        ranks: size of the job.

    Raises:
        UsageError: another type, or a bad threshold. MXNet refuses both, too.
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
