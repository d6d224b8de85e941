"""MXNet's ways to say keys and values: one or a list, one array or one a device, keys repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import kind_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.kvstore.values.key import Key

__all__ = ["Fitting", "Group", "check_dense", "check_fits", "grouped", "paired_with_row_ids"]

Group = tuple[int | str, list[NDArray]]
"""A key and its arrays, one a device."""

_NDArray = mx.nd.NDArray


def grouped(key: Any, value: Any, what: str) -> list[Group]:
    """Return each key once, in order of appearance, with all of its arrays.

    Args:
        key: int or str, or a list of them. A list may name a key several times; its arrays are then one a
            device.
        value: for a single key an NDArray or a list of them; for a list of keys a list of those.
        what: the method, for error messages.

    Raises:
        UsageError: keys of several types or of a wrong one, numbers of keys and values that differ, no array,
            or something that is none.
    """
    if not isinstance(key, (list, tuple)):
        return [(_key(key, what), _arrays(value, key, what))]
    if not isinstance(value, (list, tuple)) or len(value) != len(key):
        count = len(value) if isinstance(value, (list, tuple)) else 1
        raise UsageError(
            f"{what} of {len(key)} keys with {count} values; give one value (or list of arrays) a key"
        )
    if len({isinstance(single, str) for single in key}) > 1:
        raise UsageError(f"{what}: keys must be all int or all str, not a mixture: {list(key)[:5]}")
    groups: dict[int | str, list[NDArray]] = {}
    for single, arrays in zip(key, value, strict=True):
        groups.setdefault(_key(single, what), []).extend(_arrays(arrays, single, what))
    return list(groups.items())


def paired_with_row_ids(
    key: Any, out: Any, row_ids: Any
) -> list[tuple[int | str, list[NDArray], list[NDArray]]]:
    """Return each key of a `row_sparse_pull`, as often as it is named, with its outs and the row numbers for
    each of these.

    Raises:
        UsageError: outs or row numbers are missing, are of the wrong kind, or are not as many.
    """
    what = "row_sparse_pull"
    if out is None or row_ids is None:
        raise UsageError(f"{what} needs out, the arrays to write to, and row_ids, the numbers of their rows")
    grouped(key, out, what)  # its checks
    outs = zip(key, out, strict=True) if isinstance(key, (list, tuple)) else [(key, out)]
    given = row_ids if isinstance(row_ids, (list, tuple)) else [row_ids]
    numbers: list[NDArray] = []
    for one in given:
        numbers.extend(one if isinstance(one, (list, tuple)) else [one])
    for ids in numbers:
        if not isinstance(ids, _NDArray) or not kind_of(ids).dense:
            raise UsageError(f"{what}: row_ids must be dense NDArrays, not {type(ids).__name__}")
    paired = [(one, _arrays(arrays, one, what)) for one, arrays in outs]
    count = sum(len(arrays) for _, arrays in paired)
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count:
        raise UsageError(f"{what}: {len(numbers)} row_ids for {count} outs; give one, or one for each")
    left = iter(numbers)
    for one, arrays in paired:
        for array in arrays:
            if array.stype != "row_sparse":
                raise UsageError(
                    f"{what} of key {one!r} to a {array.stype} array; out must be row_sparse: make it with "
                    "mx.nd.sparse.zeros('row_sparse', shape)"
                )
    return [(one, arrays, [next(left) for _ in arrays]) for one, arrays in paired]


def check_dense(arrays: Sequence[NDArray], key: Key, what: str) -> None:
    """Check that arrays are dense, where they have to be.

    Raises:
        UsageError: one is not.
    """
    for array in arrays:
        if not kind_of(array).dense:
            raise UsageError(
                f"{what}, key {key.name!r}, with a {array.stype} array: only dense ones go with it; call "
                "tostype('default')"
            )


def check_fits(arrays: Sequence[NDArray], key: Key, what: str) -> None:
    """Check that arrays can be pushed to, or pulled from, a key.

    Raises:
        UsageError: one is sparse, but not row-sparse.
        KeyMismatch: one has another shape or type; the message has both.
    """
    for array in arrays:
        kind = kind_of(array)
        if not kind.dense and array.stype != "row_sparse":
            raise UsageError(
                f"{what} of key {key.name!r} with a {array.stype} array: it must be dense or row_sparse: "
                "call tostype('row_sparse') or tostype('default')"
            )
        if kind.shape != key.spec.shape or kind.dtype != key.dtype:
            raise KeyMismatch(
                f"{what} of key {key.name!r}: the array is {kind.shape} {kind.dtype}, the key "
                f"was initialised as {key.spec.shape} {key.spec.dtype}"
            )


class Fitting:
    """What has been found to fit: a script pushes and pulls the same arrays in each step.

    An array's handle is a Python object of its own, and what it stands for keeps its shape and type. To keep
    the handle keeps nothing of the array.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Final[dict[Key, tuple[object, object]]] = {}
        """The handles of the last two: a key is pushed from one array and pulled to another."""

    def check(self, arrays: Sequence[NDArray], key: Key, what: str) -> None:
        """Do what `check_fits` does, if need be."""
        if len(arrays) != 1:
            check_fits(arrays, key, what)
            return
        handle = arrays[0].handle
        last = self._last.get(key, _NONE)
        if handle is not last[0] and handle is not last[1]:
            check_fits(arrays, key, what)
            self._last[key] = handle, last[0]


_NONE: Final = (None, None)


def _key(key: Any, what: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise UsageError(f"{what}: a key must be int or str, not {type(key).__name__} ({key!r})")
    return key


def _arrays(value: Any, key: Any, what: str) -> list[NDArray]:
    if isinstance(value, _NDArray):
        return [value]
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    if not arrays:
        raise UsageError(f"{what} of key {key!r} with an empty list of arrays")
    for array in arrays:
        if not isinstance(array, _NDArray):
            raise UsageError(
                f"{what} of key {key!r} with {type(array).__name__}; "
                "it must be an mxnet NDArray or a list of them"
            )
    return arrays
