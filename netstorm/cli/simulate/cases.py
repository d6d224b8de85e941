"""What `netstorm simulate` asks its worker: one scheme, or the optimum, on one network."""

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
"""In place of a scheme's name: no scheme, but what none can beat."""


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    """A network that is drawn at random."""

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
    """The network is there; the time from here on is the scheme's."""


class Formed(msgspec.Struct, frozen=True, kw_only=True, tag="formed"):
    """The policy is there."""

    formation_s: float
    reason: str


class RoundDone(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """A round has taken so long, in the network's time."""

    seconds: float


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """All of a case is done."""

    optimum_s: float | None = None
    """If that was asked."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A case has come to nothing."""

    message: str
    unfit: bool
    """The scheme cannot be had on this network; else something has gone wrong."""


Answer: TypeAlias = Begun | Formed | RoundDone | Ended | Failed
