"""Messages between `netstorm simulate` and its worker process: a case, and the answers about it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "OPTIMUM",
    "Answer",
    "Begun",
    "Case",
    "Ended",
    "Failed",
    "Formed",
    "Generated",
    "RoundDone",
    "Stored",
]

OPTIMUM = "the optimum"
"""In place of a scheme's name: the optimum, which no scheme can beat."""


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    """A random network."""

    family: str
    nodes: int
    seed: int


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A network file."""

    path: str


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One scheme on one network. Sizes in bytes."""

    network: Generated | Stored
    topology: str
    tensors: tuple[int, ...]
    chunk_bytes: int
    rounds: int
    seed: int
    engine: str


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The network is loaded; the time limit of the case begins."""


class Formed(msgspec.Struct, frozen=True, kw_only=True, tag="formed"):
    """The policy is formed."""

    formation_s: float
    reason: str


class RoundDone(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """A round has ended. Seconds are virtual."""

    seconds: float


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The case is done."""

    optimum_s: float | None = None
    """If the case is the optimum."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The case has failed."""

    message: str
    unfit: bool
    """The scheme does not apply to this network; if not, the case failed because of an error."""


Answer: TypeAlias = Begun | Formed | RoundDone | Ended | Failed
