"""MXNet's ways to say keys and values: one or a list, one array or one a device, keys repeated."""

from __future__ import annotations

from typing import Any

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx

__all__ = ["grouped"]


def grouped(key: Any, value: Any, what: str) -> list[tuple[int | str, list[Any]]]:
    """Return each key once, in order of appearance, with all of its arrays.

    Args:
        key: int or str, or a list of them. A list may name a key several times; its arrays are then one a
            device.
        value: for a single key an NDArray or a list of them; for a list of keys a list of those.
        what: the method, for error messages.
    Raises: UsageError: keys of several types or of a wrong one, numbers of keys and values that differ, or no
        array.
    """
    if isinstance(key, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(key):
            count = len(value) if isinstance(value, (list, tuple)) else 1
            raise UsageError(
                f"{what} of {len(key)} keys with {count} values; give one value (or list of arrays) a key"
            )
        pairs = list(zip(key, value, strict=True))
    else:
        pairs = [(key, value)]
    if len({type(single) for single, _ in pairs}) > 1:
        raise UsageError(
            f"{what}: keys must be all int or all str, not a mixture: {[single for single, _ in pairs][:5]}"
        )
    groups: dict[int | str, list[Any]] = {}
    for single, arrays in pairs:
        if isinstance(single, bool) or not isinstance(single, (int, str)):
            raise UsageError(f"{what}: a key must be int or str, not {type(single).__name__} ({single!r})")
        several = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
        if not several:
            raise UsageError(f"{what} of key {single!r} with an empty list of arrays")
        for array in several:
            if not isinstance(array, mx.nd.NDArray):
                raise UsageError(
                    f"{what} of key {single!r} with {type(array).__name__}; "
                    "it must be an mxnet NDArray or a list of them"
                )
        groups.setdefault(single, []).extend(several)
    return list(groups.items())
