"""State as a tree of plain values and tensors, and its encoding. Pure.

A tree is made of dictionaries, lists, tuples, numbers, texts, bytes, None and tensors. It becomes
MessagePack, with a number in the place of each tensor, so that reading it never runs code. Pickle would; and
a format of tensors alone, such as safetensors, has no place for an optimizer's other values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from netstorm.errors import CheckpointError, UsageError

__all__ = ["Flat", "flatten", "unflatten"]

_TENSOR: Final = 1
_TUPLE: Final = 2
_LARGE: Final = 3
"""Codes of MessagePack's extension type."""

_DEEPEST: Final = 64
"""Levels of nesting; deeper trees, and those that contain themselves, are refused."""
_INT64: Final = range(-(2**63), 2**64)
"""What MessagePack holds as a number."""


class Flat(NamedTuple):
    """A tree as bytes, and its tensors in order."""

    tree: bytes
    names: tuple[str, ...]
    """Where in the tree each tensor is, such as "model.layers.0.weight"."""
    tensors: tuple[object, ...]


def flatten(value: object, is_tensor: Callable[[object], bool]) -> Flat:
    """Take the tensors out of a tree.

    Args:
        value: the tree.
        is_tensor: whether an object is a tensor.

    Raises:
        UsageError: names an object that is neither plain nor a tensor, and says what to keep instead.
    """
    flattening = _Flattening(is_tensor)
    plain = flattening.plain(value, (), 0)
    return Flat(_encoder.encode(plain), tuple(flattening.names), tuple(flattening.tensors))


def unflatten(tree: bytes, tensors: Sequence[object]) -> object:
    """Return the tree that `flatten` took apart, with these tensors.

    Raises:
        CheckpointError: the bytes are no such tree.
    """

    def extension(code: int, data: memoryview) -> object:
        if code == _TENSOR:
            return tensors[int.from_bytes(data, "big")]
        if code == _TUPLE:
            items = decoder.decode(data)
            if not isinstance(items, list):
                raise ValueError("a tuple that is no list")
            return tuple(items)
        if code == _LARGE:
            return int.from_bytes(data, "big", signed=True)
        raise ValueError(f"unknown extension {code}")

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    try:
        return decoder.decode(tree)
    except (msgspec.MsgspecError, IndexError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the values of the checkpoint make no sense: {error}") from None


class _Flattening:
    def __init__(self, is_tensor: Callable[[object], bool]) -> None:
        self._is_tensor: Final = is_tensor
        self.names: Final[list[str]] = []
        self.tensors: Final[list[object]] = []

    def plain(self, value: object, path: tuple[str, ...], depth: int) -> object:
        """Return a value as msgspec encodes it."""
        if depth > _DEEPEST:
            raise UsageError(
                f"{_name(path[:4])}… is nested more than {_DEEPEST} levels deep, or contains itself"
            )
        if value is None or type(value) in {bool, float, str, bytes}:
            return value
        if type(value) is int:
            return value if value in _INT64 else msgspec.msgpack.Ext(_LARGE, _signed(value))
        if self._is_tensor(value):
            self.names.append(_name(path))
            self.tensors.append(value)
            return msgspec.msgpack.Ext(_TENSOR, (len(self.tensors) - 1).to_bytes(4, "big"))
        if isinstance(value, Mapping):
            return {
                self._key(key, path): self.plain(item, (*path, str(key)), depth + 1)
                for key, item in value.items()
            }
        if type(value) in {list, tuple}:
            assert isinstance(value, (list, tuple))
            items = [self.plain(item, (*path, str(place)), depth + 1) for place, item in enumerate(value)]
            if isinstance(value, list):
                return items
            return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(items))
        raise UsageError(
            f"{_name(path)} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds "
            "dictionaries, lists, tuples, numbers, texts, bytes, None and tensors; keep what it needs of it "
            "as those, such as its state_dict()"
        )

    def _key(self, key: object, path: tuple[str, ...]) -> str | int:
        if isinstance(key, (str, int)) and type(key) in {str, int} and (type(key) is str or key in _INT64):
            return key
        raise UsageError(
            f"{_name(path)} has the key {key!r} of type {type(key).__name__}: keys must be str or int"
        )


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the state"


def _signed(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


_encoder: Final = msgspec.msgpack.Encoder()
