"""Mutations of text formats: words and lines are moved, and replaced by others of the format. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Final

from netstorm.testing.fuzz.bytes_mutation import mutate_bytes
from netstorm.testing.fuzz.target import Mutator

__all__ = ["of_words"]

_WORDS: Final = re.compile(rb"[A-Za-z_]+|[0-9]+|\s+|.", re.DOTALL)
_NUMBERS: Final = (
    b"0",
    b"-1",
    b"1",
    b"4095",
    b"4096",
    b"65536",
    b"1e999",
    b"99999999999999999999",
    b"0x10",
    b".5",
)
_MOST_AT_ONCE: Final = 5


def of_words(vocabulary: Sequence[bytes]) -> Mutator:
    """Return a mutator of texts in which these words mean something."""
    words = (*vocabulary, *_NUMBERS, "é".encode(), b"\0", b"\t", b"\r\n")

    def mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
        if chance.random() < 0.2:
            return mutate_bytes(chance, data, other)
        parts = _WORDS.findall(data)
        for _ in range(1 + int(chance.random() ** 2 * _MOST_AT_ONCE)):
            kind = int(chance.random() * 7)
            at = int(chance.random() * (len(parts) + 1))
            if kind == 0 and parts:
                parts[at - 1] = chance.choice(words)
            elif kind == 1:
                parts.insert(at, chance.choice(words))
            elif kind == 2 and parts:
                del parts[at - 1 : at + int(chance.random() * 6)]
            elif kind == 3 and parts:
                first = int(chance.random() * len(parts))
                piece = parts[first : first + int(chance.random() * 20)]
                parts[at:at] = piece * (1 + int(chance.random() ** 6 * 100))
            elif kind == 4 and parts:
                first = int(chance.random() * len(parts))
                parts[first], parts[at - 1] = parts[at - 1], parts[first]
            elif kind == 5:
                lent = _WORDS.findall(other)
                first = int(chance.random() * len(lent))
                parts[at : at + int(chance.random() * 5)] = lent[first : first + int(chance.random() * 30)]
            elif kind == 6:
                opened = chance.choice((b"[", b"{", b"- ", b"? ", b"*a ", b"&a ", b"!t ", b'"', b"'", b"|\n"))
                parts.insert(at, opened * (1 + int(chance.random() ** 8 * 2000)))
        return b"".join(parts)

    return mutate
