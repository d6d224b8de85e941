"""A decoder as the fuzzer sees it: what it takes, and which exceptions it may raise. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Mutator", "Target"]

Mutator: TypeAlias = Callable[[random.Random, bytes, bytes], bytes]
"""Makes an input of another one, and perhaps of parts of a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One decoder."""

    name: str
    """One word, which names the folder of its corpus, too."""
    decode: Callable[[bytes], Hashable]
    """Decodes one input, and uses what it has decoded as the program would. Returns what kind of input it
    was: an input of a new kind is worth keeping."""
    allowed: tuple[type[Exception], ...]
    """What it may raise; anything else is a finding."""
    seeds: Callable[[], list[bytes]]
    """Valid inputs to begin with."""
    mutate: Mutator
    weight: float = 1.0
    """Share of the inputs among all targets: more for those that are fast, or that strangers reach."""
    largest: int = 4096
    """Bytes of an input; mutation cuts what is longer."""
