"""Types of elements in memory. NumPy has no bfloat16, so its bits are handled here. Pure.

Types of 16 bits are reduced in float32 within a node: one rounding a hop (design, section 5).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.kvstore.values.form import Array
from netstorm.protocol.collectives import Element

__all__ = ["NARROW", "STORED", "narrowed", "widened"]

STORED: Final[dict[Element, np.dtype[np.generic]]] = {
    Element.BYTES: np.dtype(np.uint8),
    Element.FLOAT16: np.dtype(np.float16),
    Element.BFLOAT16: np.dtype(np.uint16),
    Element.FLOAT32: np.dtype(np.float32),
    Element.FLOAT64: np.dtype(np.float64),
    Element.INT8: np.dtype(np.int8),
    Element.INT16: np.dtype(np.int16),
    Element.INT32: np.dtype(np.int32),
    Element.INT64: np.dtype(np.int64),
    Element.UINT8: np.dtype(np.uint8),
    Element.UINT16: np.dtype(np.uint16),
    Element.UINT32: np.dtype(np.uint32),
    Element.UINT64: np.dtype(np.uint64),
    Element.BOOL: np.dtype(np.uint8),
}
"""The NumPy type that holds elements of each type."""

NARROW: Final = frozenset({Element.FLOAT16, Element.BFLOAT16})
"""Types that are reduced in float32."""

_QUIET_BIT: Final = np.uint32(0x00400000)
"""Set in a NaN before it is rounded, which might leave no bit of its payload."""


def widened(values: Array, element: Element) -> Array:
    """Return values as they are reduced: in float32 if they are of 16 bits."""
    if element is Element.FLOAT16:
        return values.astype(np.float32)
    if element is Element.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def narrowed(values: Array, element: Element) -> Array:
    """Return reduced values as they are stored, rounded to the nearest, ties to even."""
    with np.errstate(all="ignore"):
        if element is Element.FLOAT16:
            return values.astype(np.float16)
        if element is Element.BFLOAT16:
            bits = values.view(np.uint32)
            rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
            nan = np.isnan(values)
            if nan.any():
                rounded[nan] = (bits[nan] | _QUIET_BIT) >> 16
            return rounded.astype(np.uint16)
    return values
