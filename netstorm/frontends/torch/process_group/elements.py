"""PyTorch's types and reductions as NetStorm's."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import torch.distributed as dist

from netstorm.protocol.codecs import Element, Reduction, can_reduce

__all__ = ["NAMES", "element_of", "reduction_name", "reduction_of", "type_name"]

_ELEMENTS: Final = {
    torch.float16: Element.FLOAT16,
    torch.bfloat16: Element.BFLOAT16,
    torch.float32: Element.FLOAT32,
    torch.float64: Element.FLOAT64,
    torch.int8: Element.INT8,
    torch.int16: Element.INT16,
    torch.int32: Element.INT32,
    torch.int64: Element.INT64,
    torch.uint8: Element.UINT8,
    torch.uint16: Element.UINT16,
    torch.uint32: Element.UINT32,
    torch.uint64: Element.UINT64,
    torch.bool: Element.BOOL,
    torch.complex64: Element.FLOAT32,
    torch.complex128: Element.FLOAT64,
}
"""A complex number is reduced as two real ones, which is right for sums alone."""

NAMES: Final = {
    Reduction.SUM: "SUM",
    Reduction.AVERAGE: "AVG",
    Reduction.PRODUCT: "PRODUCT",
    Reduction.MINIMUM: "MIN",
    Reduction.MAXIMUM: "MAX",
    Reduction.AND: "BAND",
    Reduction.OR: "BOR",
    Reduction.XOR: "BXOR",
}
"""What PyTorch calls each reduction."""

_REDUCTIONS: Final = {int(getattr(dist.ReduceOp, name)): reduction for reduction, name in NAMES.items()}
"""By number: PyTorch makes a new object of a reduction whenever it is read, and compares them slowly."""


def type_name(dtype: torch.dtype) -> str:
    """Return a type as error messages show it."""
    return str(dtype).removeprefix("torch.")


def reduction_name(op: Any) -> str:
    """Return a reduction as error messages show it, such as "SUM"."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def reduction_of(op: Any) -> Reduction:
    """Return a reduction.

    Raises:
        NotImplementedError: there is no such reduction here; the message says what to use.
    """
    found = _REDUCTIONS.get(int(getattr(op, "op", op)))
    if found is None:
        raise NotImplementedError(
            f"the netstorm backend has no ReduceOp.{reduction_name(op)}; use one of "
            f"{', '.join(NAMES.values())}"
        )
    return found


@functools.lru_cache(maxsize=256)
def element_of(dtype: torch.dtype, reduction: Reduction) -> Element:
    """Return the type of a tensor's elements, if they can be reduced so.

    Raises:
        NotImplementedError: they cannot; the message says what can.
    """
    if reduction is Reduction.COPY:
        return Element.BYTES
    element = _ELEMENTS.get(dtype)
    if element is None:
        raise NotImplementedError(
            f"the netstorm backend cannot reduce tensors of {type_name(dtype)}; convert them to one of "
            f"{', '.join(type_name(known) for known in _ELEMENTS)}"
        )
    linear = reduction in {Reduction.SUM, Reduction.AVERAGE}
    if not can_reduce(reduction, element) or (dtype.is_complex and not linear):
        raise NotImplementedError(
            f"the netstorm backend has no {reduction.name.lower()} of {type_name(dtype)}; "
            + ("complex numbers have SUM and AVG" if dtype.is_complex else _hint(reduction))
        )
    return element


def _hint(reduction: Reduction) -> str:
    if reduction is Reduction.AVERAGE:
        return "convert truth values to numbers, or use SUM (any) or PRODUCT (all)"
    return "bitwise reductions take whole numbers: view the tensor as an integer type"
