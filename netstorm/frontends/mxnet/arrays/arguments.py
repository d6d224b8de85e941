"""The arguments of MXNet's KVStore: keys and values, one or a list, with one array or one for each device."""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import kind_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.kvstore.forms import Key

__all__ = ["Group", "check_dense", "check_fits", "grouped", "paired_with_row_ids"]

Group = tuple[int | str, list[NDArray]]
"""A key and its arrays, one for each device."""

_NDArray = mx.nd.NDArray


def grouped(key: object, value: object, what: str) -> list[Group]:
    """Return each key once, in order of appearance, with all of its arrays.

    Args:
        key: int or str, or a list of them. A list may name a key several times, once for each device.
        value: for a single key an NDArray or a list of them; for a list of keys a list of those.
        what: the method, for error messages.

    Raises:
        UsageError: keys of a wrong type or of two types, different numbers of keys and values, no array, or
            something that is no array.
    """
    if not isinstance(key, (list, tuple)):  # most calls have one key
        return [(_key(key, what), _arrays(value, key, what))]
    groups: dict[int | str, list[NDArray]] = {}
    for user_key, arrays in _pairs(key, value, what):
        groups.setdefault(user_key, []).extend(arrays)
    return list(groups.items())


def _pairs(key: object, value: object, what: str) -> list[Group]:
    """Return each key, as often as it is named, with its arrays; the errors are those of `grouped`."""
    if not isinstance(key, (list, tuple)):
        return [(_key(key, what), _arrays(value, key, what))]
    if not isinstance(value, (list, tuple)) or len(value) != len(key):
        count = len(value) if isinstance(value, (list, tuple)) else 1
        raise UsageError(
            f"{what} of {len(key)} keys with {count} values; give one value (or list of arrays) a key"
        )
    if len({isinstance(one, str) for one in key}) > 1:
        raise UsageError(f"{what}: keys must be all int or all str, not a mixture: {list(key)[:5]}")
    return [(_key(one, what), _arrays(arrays, one, what)) for one, arrays in zip(key, value, strict=True)]


def paired_with_row_ids(
    key: object, out: object, row_ids: object
) -> list[tuple[int | str, list[NDArray], list[NDArray]]]:
    """Return what a `row_sparse_pull` asks for: each key, as often as it is named, its outs, and the row
    numbers for each of these.

    Raises:
        UsageError: outs or row numbers are missing, are of the wrong kind, or their counts differ.
    """
    what = "row_sparse_pull"
    if out is None or row_ids is None:
        raise UsageError(f"{what} needs out, the arrays to write to, and row_ids, the numbers of their rows")
    paired = _pairs(key, out, what)
    numbers = _row_ids(row_ids, what)
    count = sum(len(arrays) for _, arrays in paired)
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count:
        raise UsageError(f"{what}: {len(numbers)} row_ids for {count} outs; give one, or one for each")
    remaining = iter(numbers)
    for user_key, arrays in paired:
        for array in arrays:
            if array.stype != "row_sparse":
                raise UsageError(
                    f"{what} of key {user_key!r} to a {array.stype} array; out must be row_sparse: make it "
                    "with mx.nd.sparse.zeros('row_sparse', shape)"
                )
    return [(user_key, arrays, [next(remaining) for _ in arrays]) for user_key, arrays in paired]


def _row_ids(row_ids: object, what: str) -> list[NDArray]:
    numbers: list[NDArray] = []
    for given in row_ids if isinstance(row_ids, (list, tuple)) else [row_ids]:
        for ids in given if isinstance(given, (list, tuple)) else [given]:
            if not isinstance(ids, _NDArray) or not kind_of(ids).dense:
                raise UsageError(f"{what}: row_ids must be dense NDArrays, not {type(ids).__name__}")
            numbers.append(ids)
    return numbers


def check_dense(arrays: Sequence[NDArray], key: Key, what: str) -> None:
    """Check that all arrays are dense.

    Raises:
        UsageError: one is not.
    """
    for array in arrays:
        if not kind_of(array).dense:
            raise UsageError(
                f"{what}, key {key.name!r}, with a {array.stype} array: only dense arrays go with it; call "
                "tostype('default')"
            )


def check_fits(arrays: Sequence[NDArray], key: Key, what: str) -> None:
    """Check that arrays can be pushed to, or pulled from, a key.

    Raises:
        UsageError: an array is sparse, but not row-sparse.
        KeyMismatch: an array has another shape or type than the key; the message has both.
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


def _key(key: object, what: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise UsageError(f"{what}: a key must be int or str, not {type(key).__name__} ({key!r})")
    return key


def _arrays(value: object, key: object, what: str) -> list[NDArray]:
    if isinstance(value, _NDArray):
        return [value]
    arrays: list[NDArray] = []
    for array in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(array, _NDArray):
            raise UsageError(
                f"{what} of key {key!r} with {type(array).__name__}; "
                "it must be an mxnet NDArray or a list of them"
            )
        arrays.append(array)
    if not arrays:
        raise UsageError(f"{what} of key {key!r} with an empty list of arrays")
    return arrays
