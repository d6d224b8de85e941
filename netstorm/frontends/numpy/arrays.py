"""Arrays of the program as flat memory for the node, trees of them, and NumPy's types as NetStorm's.

An array in C order and this machine's byte order is used as it is. Any other is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError
from netstorm.kvstore.forms import STORED
from netstorm.protocol.codecs import Element, Reduction, can_reduce

__all__ = [
    "Array",
    "Target",
    "Tree",
    "describe",
    "element_of",
    "flat",
    "leaves",
    "ready_to_read",
    "reduction_of",
    "with_leaves",
]

Array: TypeAlias = npt.NDArray[Any]

Tree: TypeAlias = Any
"""An array, or a list, tuple or dictionary of trees."""

_REDUCTIONS: Final[Mapping[str, Reduction]] = {
    "sum": Reduction.SUM,
    "mean": Reduction.AVERAGE,
    "product": Reduction.PRODUCT,
    "min": Reduction.MINIMUM,
    "max": Reduction.MAXIMUM,
}

_ELEMENTS: Final[Mapping[str, Element]] = {
    **{element.name.lower(): element for element in Element if element is not Element.BYTES},
    "complex64": Element.FLOAT32,
    "complex128": Element.FLOAT64,
}
"""By NumPy's name of a type. A complex number is reduced as two real ones, which is right for sums alone."""

_LINEAR: Final = frozenset({Reduction.SUM, Reduction.AVERAGE})


def reduction_of(op: str) -> Reduction:
    """Return a reduction by its name.

    Raises:
        UsageError: there is none of that name.
    """
    reduction = _REDUCTIONS.get(str(op))
    if reduction is None:
        raise UsageError(f"op={op!r}: expected one of {', '.join(map(repr, _REDUCTIONS))}")
    return reduction


def element_of(dtype: np.dtype[Any], reduction: Reduction, what: str) -> Element:
    """Return the type of an array's elements as they are reduced.

    Raises:
        UsageError: they cannot be reduced so.
    """
    element = _ELEMENTS.get(_type_name(dtype))
    is_linear = reduction in _LINEAR
    if element is None or not can_reduce(reduction, element) or (dtype.kind == "c" and not is_linear):
        raise UsageError(
            f"{what}: elements of type {dtype} have no {reduction.name.lower()}: expected whole numbers, "
            "floats of 16, 32 or 64 bits or truth values, or complex numbers with 'sum' or 'mean'; convert "
            "them with astype()"
        )
    return element


def ready_to_read(value: object, what: str) -> Array:
    """Return a value as an array in C order and this machine's byte order; a copy only if it is not so.

    Raises:
        UsageError: it is none, or one of objects, or has a mask.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{what}: a masked array, whose mask would be lost: give its filled() values")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UsageError(
            f"{what}: an array of Python objects ({type(value).__name__}): expected numbers; nothing is "
            "pickled here"
        )
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    return np.asarray(array, native, order="C")


def describe(array: Array) -> str:
    """Return an array's type and shape as error messages show them: equal texts mean equal types and
    shapes.
    """
    return f"{_type_name(array.dtype)} {array.shape}"


@functools.lru_cache(maxsize=256)  # NumPy makes the name anew each time
def _type_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.fields is None else str(dtype)


def flat(array: Array, element: Element = Element.BYTES) -> Array:
    """Return the memory of an array in C order as a flat one, of the type in which elements are stored."""
    return array.reshape(-1).view(STORED[element])


class Target:
    """Where a result goes: a new array, or the user's.

    Attributes:
        memory: what the node writes to, in C order; the user's own if that is possible.
        shape: of the result.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], out: object, source: Array, what: str
    ) -> None:
        """Make memory for a result.

        Args:
            shape: of the result.
            dtype: of the result.
            out: the user's array; None: a new one.
            source: what the node reads meanwhile.
            what: the call, for errors.

        Raises:
            UsageError: the user's array does not fit, or cannot be written.
        """
        self._out: Final = out
        if out is None:
            self.memory: Array = np.empty(shape, dtype)
            return
        if not isinstance(out, np.ndarray):
            raise UsageError(f"{what}: out is a {type(out).__name__}: expected an array of NumPy's")
        if (out.shape, out.dtype) != (shape, dtype):
            raise UsageError(
                f"{what}: out is {describe(out)}: expected {dtype.name} {shape}, as the result has"
            )
        if not out.flags.writeable:
            raise UsageError(f"{what}: out cannot be written: it is read-only")
        is_source = out.ctypes.data == source.ctypes.data and out.nbytes == source.nbytes
        alone = is_source or not np.may_share_memory(out, source)
        self.memory = out if out.flags.c_contiguous and alone else np.empty(shape, dtype)

    def result(self) -> Array:
        """Return the array that has the result, once the node has written it."""
        if not isinstance(self._out, np.ndarray):
            return self.memory
        if self._out is not self.memory:
            np.copyto(self._out, self.memory)
        return self._out


# Trees: what a program holds in lists, tuples and dictionaries, such as the weights of a model.


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf; those of dictionaries in the order of their keys.

    All ranks must go through their trees in the same order, and dictionaries may have been filled in another.
    """
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}[{place}]")
    else:
        yield path, tree


def with_leaves(tree: Tree, values: Iterator[Any]) -> Tree:
    """Return a tree of the same form with other leaves, which come in the order of `leaves`."""
    if isinstance(tree, Mapping):
        made = {key: with_leaves(tree[key], values) for key in sorted(tree, key=str)}
        return {key: made[key] for key in tree}
    if isinstance(tree, list):
        return [with_leaves(value, values) for value in tree]
    if isinstance(tree, tuple):
        parts = [with_leaves(value, values) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return next(values)
