"""What a user asks of an asynchronous store: a push, or a pull, of one key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.kvstore.keys import Array, Key
from netstorm.kvstore.operation import Done

__all__ = ["UNBOUNDED", "AsyncOperation", "PullOperation", "PushOperation", "Pushes"]

UNBOUNDED: Final = -1
"""As a staleness: ranks may be ahead as far as they like."""


@dataclass(slots=True, kw_only=True, eq=False)
class PushOperation:
    """Have the owners of a key update it with `source`.

    `source` is a flat array of the key's type, and must stay valid and unchanged until `done` is called: then
    every owner has applied its part.
    """

    key: Key
    number: int
    """Counts the pushes of this key, from 0. Taken, like the clock, when the user calls."""
    source: Array
    rule: str
    """Fingerprint of the update rule."""
    live: tuple[float, ...] = ()
    """What scripts change of it between pushes."""
    clock: int = 0
    whole: bool = False
    """The rule needs whole tensors."""
    priority: int = 0
    done: Done
    begun_at: float = 0.0

    @property
    def round(self) -> int:
        """Its number: what a timeline calls it."""
        return self.number

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        return f"push {self.number} of {self.key.name}"


@dataclass(slots=True, kw_only=True, eq=False)
class PullOperation:
    """Write the newest values of a key into `destination`, a flat array of its type.

    A key's pulls go one after the other: begin the next when `done` has been called.
    """

    key: Key
    number: int
    """Counts the pulls of this key, from 0."""
    pushed: int
    """So many of this rank's pushes must be in the values: those that the user made before."""
    destination: Array
    least: int = 0
    """So many clocks of every other rank must be in them."""
    counted: bool = False
    """Clocks are those that the script counts; or else each push of the key is one."""
    whole: bool = False
    priority: int = 0
    done: Done
    begun_at: float = 0.0

    @property
    def round(self) -> int:
        """Its number: what a timeline calls it."""
        return self.number

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        return f"pull {self.number} of {self.key.name}"


AsyncOperation: TypeAlias = PushOperation | PullOperation


class Pushes:
    """What one rank has pushed and pulled of one key, counted where the user calls."""

    __slots__ = ("in_clock", "pulls", "total")

    def __init__(self) -> None:
        self.total = 0
        self.in_clock = 0
        """Since the last `clock()`."""
        self.pulls = 0
