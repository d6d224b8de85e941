"""What a user asks of an asynchronous store: a push, or a pull, of one key; or the states of its updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.compression.rows import Numbers
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.values.form import Values
from netstorm.kvstore.values.key import Array, Key

__all__ = ["UNBOUNDED", "AsyncOperation", "PullOperation", "PushOperation", "Pushes", "StatesOperation"]

UNBOUNDED: Final = -1
"""As a staleness: ranks may be ahead as far as they like."""


@dataclass(slots=True, kw_only=True, eq=False)
class PushOperation:
    """Have the owners of a key update it with `source`.

    `source` is what the form of `codec` takes (a flat array of the key's type, `Signs` or `Rows`), and must
    stay valid and unchanged until `done` is called: then every owner has applied its part.
    """

    key: Key
    number: int
    """Counts the pushes of this key, from 0. Taken, like the clock, when the user calls."""
    source: Values
    rule: str
    """Fingerprint of the update rule."""
    live: tuple[float, ...] = ()
    """What scripts change of it between pushes."""
    clock: int = 0
    whole: bool = False
    """The rule needs whole tensors."""
    codec: int = 0
    """The form in which the values travel."""
    threshold: float = 0.0
    """What a quantised 1 stands for."""
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
    """Write the newest values of a key, or of some of its rows, into `destination`: flat, of its type."""

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
    rows: Numbers | None = None
    """Those that are wanted, by number, rising; None: all. Only of a key whose chunks are whole rows."""
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


@dataclass(slots=True, kw_only=True, eq=False)
class StatesOperation:
    """Collect what the owners' update rules keep of a key: `destination` gets bytes for each block.

    It counts as a pull of the key.
    """

    key: Key
    number: int
    pushed: int
    destination: dict[int, bytes]
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
        return f"pull {self.number} (of states) of {self.key.name}"


AsyncOperation: TypeAlias = PushOperation | PullOperation | StatesOperation


class Pushes:
    """What one rank has pushed and pulled of one key, counted where the user calls."""

    __slots__ = ("in_clock", "pulls", "total")

    def __init__(self) -> None:
        self.total = 0
        self.in_clock = 0
        """Since the last `clock()`."""
        self.pulls = 0
