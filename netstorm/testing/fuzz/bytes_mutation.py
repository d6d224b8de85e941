"""Mutations that know nothing of a format: bits, bytes, numbers, pieces. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

__all__ = ["mutate_bytes"]

_BYTES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x90, 0xDF, 0xC0, 0xCA, 0x20, 0x0A, 0x22, 0x5B, 0x7B)
_NUMBERS: Final = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_PIECE: Final = 32
_MOST_AT_ONCE: Final = 4


def mutate_bytes(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Return `data` with one to four changes; `other` lends pieces."""
    changed = bytearray(data)
    for _ in range(1 + int(chance.random() ** 2 * _MOST_AT_ONCE)):
        _CHANGES[int(chance.random() * len(_CHANGES))](chance, changed, other)
    return bytes(changed)


def _flip(chance: random.Random, data: bytearray, _other: bytes) -> None:
    if data:
        data[int(chance.random() * len(data))] ^= 1 << int(chance.random() * 8)


def _set(chance: random.Random, data: bytearray, _other: bytes) -> None:
    if data:
        data[int(chance.random() * len(data))] = (
            chance.choice(_BYTES) if chance.random() < 0.5 else chance.getrandbits(8)
        )


def _insert(chance: random.Random, data: bytearray, _other: bytes) -> None:
    at = int(chance.random() * (len(data) + 1))
    data[at:at] = chance.randbytes(1 + int(chance.random() * 8))


def _delete(chance: random.Random, data: bytearray, _other: bytes) -> None:
    first, end = _range(chance, len(data))
    del data[first:end]


def _truncate(chance: random.Random, data: bytearray, _other: bytes) -> None:
    del data[int(chance.random() * (len(data) + 1)) :]


def _repeat(chance: random.Random, data: bytearray, _other: bytes) -> None:
    first, end = _range(chance, len(data))
    data[first:first] = data[first:end] * (1 + int(chance.random() ** 4 * 64))


def _splice(chance: random.Random, data: bytearray, other: bytes) -> None:
    first, end = _range(chance, len(other))
    at, until = _range(chance, len(data))
    data[at:until] = other[first:end]


def _cross(chance: random.Random, data: bytearray, other: bytes) -> None:
    data[int(chance.random() * (len(data) + 1)) :] = other[int(chance.random() * (len(other) + 1)) :]


def _number(chance: random.Random, data: bytearray, _other: bytes) -> None:
    size = chance.choice((1, 2, 4, 8))
    if len(data) < size:
        return
    at = int(chance.random() * (len(data) - size + 1))
    value = chance.choice(_NUMBERS) & (1 << 8 * size) - 1
    if chance.random() < 0.3:
        value = int.from_bytes(data[at : at + size], "little") + chance.randint(-4, 4) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, "little" if chance.random() < 0.5 else "big")


def _range(chance: random.Random, size: int) -> tuple[int, int]:
    first = int(chance.random() * size)
    return first, min(size, first + 1 + int(chance.random() * _PIECE))


_CHANGES: Final[tuple[Callable[[random.Random, bytearray, bytes], None], ...]] = (
    _flip,
    _set,
    _insert,
    _delete,
    _truncate,
    _repeat,
    _splice,
    _cross,
    _number,
)
