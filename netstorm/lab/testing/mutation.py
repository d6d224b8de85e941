"""Mutations of structured values: what decodes stays decodable, but says something else. Pure.

A value is what MessagePack and JSON have: nested lists and mappings of numbers, texts, bytes and null.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, Final

from netstorm.testing.fuzz.bytes_mutation import mutate_bytes
from netstorm.testing.fuzz.target import Mutator

__all__ = ["mutate_value", "structured"]

_WHOLE: Final = (
    0, 1, -1, 2, 3, 7, 8, 15, 16, 63, 64, 255, 256, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40,
    2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1,
)  # fmt: skip
_REAL: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = (
    "", "0", "float32", "float16", "int64", "complex128", "object", "*", "job", "x" * 300, "\0", "\n", "é",
    "🦊", "__class__", "{0}", "%s", "../..", "nan", "[red]",
)  # fmt: skip
_OTHERS: Final[tuple[Callable[[], Any], ...]] = (
    lambda: None,
    lambda: True,
    list,
    dict,
    lambda: [0],
    lambda: b"",
    lambda: {0: 0},
    lambda: b"\xff" * 9,
)
_LONG: Final = 400
"""Elements that a list grows to."""

_DEEP: Final = 250


def mutate_value(chance: random.Random, value: Any, other: Any) -> Any:
    """Return `value`, changed in one to four places; it may be changed itself. `other` lends parts."""
    for _ in range(1 + int(chance.random() ** 2 * 4)):
        value = _mutate_once(chance, value, other)
    return value


def structured(
    unpack: Callable[[bytes], Any], pack: Callable[[Any], bytes], errors: tuple[type[Exception], ...]
) -> Mutator:
    """Return a mutator of inputs that are encoded values.

    Args:
        unpack: decodes an input.
        pack: encodes a value, also one that no correct program would.
        errors: what both raise.
    """

    def mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
        if chance.random() < 0.15:
            return mutate_bytes(chance, data, other)
        try:
            return pack(mutate_value(chance, unpack(data), unpack(other)))
        except errors:
            return mutate_bytes(chance, data, other)

    return mutate


def _mutate_once(chance: random.Random, value: Any, other: Any) -> Any:
    parent: Any = None
    place: Any = None
    at = value
    while isinstance(at, (list, dict)) and at and chance.random() < 0.85:
        parent = at
        place = (
            int(chance.random() * len(at))
            if isinstance(at, list)
            else list(at)[int(chance.random() * len(at))]
        )
        at = at[place]
    new = _changed(chance, at, other)
    if parent is None:
        return new
    parent[place] = new
    return value


def _changed(chance: random.Random, at: Any, other: Any) -> Any:
    kind = chance.random()
    if kind < 0.1:
        return _part_of(chance, other)
    if kind < 0.14:
        return chance.choice(_OTHERS)()
    if isinstance(at, bool):
        return not at
    if isinstance(at, int):
        return chance.choice(_WHOLE) if chance.random() < 0.6 else at + chance.randint(-3, 3)
    if isinstance(at, float):
        return chance.choice(_REAL) if chance.random() < 0.7 else at * chance.uniform(-2, 2)
    if isinstance(at, str):
        return _changed_text(chance, at)
    if isinstance(at, bytes):
        return mutate_bytes(chance, at, b"\0\1\2\3\xff")
    if isinstance(at, list):
        return _changed_list(chance, at, other)
    if isinstance(at, dict):
        return _changed_mapping(chance, at, other)
    return chance.choice(_WHOLE)


def _changed_text(chance: random.Random, text: str) -> str:
    if chance.random() < 0.6 or not text:
        return chance.choice(_TEXTS)
    at = int(chance.random() * len(text))
    return text[:at] + chance.choice(_TEXTS) + text[at + int(chance.random() * 3) :]


def _changed_list(chance: random.Random, values: list[Any], other: Any) -> list[Any]:
    kind = int(chance.random() * 8)
    at = int(chance.random() * (len(values) + 1))
    if kind == 0 and values:
        del values[at - 1]
    elif kind == 1:
        values.insert(at, _part_of(chance, other))
    elif kind == 2 and values:
        values.insert(at, copy.deepcopy(values[int(chance.random() * len(values))]))
    elif kind == 3:
        chance.shuffle(values)
    elif kind == 4:
        del values[at:]
    elif kind == 5 and values:
        first = int(chance.random() * len(values))
        values[first], values[at - 1] = values[at - 1], values[first]
    elif kind == 6 and values and chance.random() < 0.2:
        values += [values[-1]] * int(chance.random() ** 3 * _LONG)
    elif kind == 7 and chance.random() < 0.02:
        nested: list[Any] = []
        for _ in range(int(chance.random() * _DEEP)):
            nested = [nested]
        values.insert(at, nested)
    return values


def _changed_mapping(chance: random.Random, values: dict[Any, Any], other: Any) -> dict[Any, Any]:
    kind = chance.random()
    keys = list(values)
    new = chance.choice(_WHOLE) if chance.random() < 0.5 else chance.choice(_TEXTS)
    if keys and kind < 0.3:
        del values[chance.choice(keys)]
    elif keys and kind < 0.6:
        values[new] = values.pop(chance.choice(keys))
    else:
        values[new] = _part_of(chance, other)
    return values


def _part_of(chance: random.Random, value: Any) -> Any:
    while isinstance(value, (list, dict)) and value and chance.random() < 0.7:
        children = value if isinstance(value, list) else list(value.values())
        value = children[int(chance.random() * len(children))]
    return copy.deepcopy(value)
