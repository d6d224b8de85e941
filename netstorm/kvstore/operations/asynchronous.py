"""What a user submits to an asynchronous store: a push, a pull, or a pull of update states. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from netstorm.compression.rows import Numbers
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.values.form import Values
from netstorm.kvstore.values.key import Array, Key

__all__ = ["UNBOUNDED", "AsyncOperation", "PullOperation", "PushOperation", "Pushes", "StatesOperation"]

UNBOUNDED: Final = -1
"""As a staleness: ranks may be ahead by any number of clocks."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Operation:
    """What all operations on owners have."""

    kind: ClassVar[str]

    key: Key
    number: int
    """Counts the operations of this kind on this key, from 0, in the order of the user's calls."""
    done: Done
    whole: bool = False
    """The update rule needs whole tensors."""
    priority: int = 0
    begun_at: float = 0.0

    @property
    def round(self) -> int:
        """Its number, which the trace shows."""
        return self.number

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        return f"{self.kind.format(self.number)} of key {self.key.name!r}"


@dataclass(slots=True, kw_only=True, eq=False)
class PushOperation(_Operation):
    """Have the owners of a key update it with `source`.

    `source` is what the form of `codec` takes (a flat array of the key's type, `Signs` or `Rows`). It must
    stay valid and unchanged until `done` is called: then every owner has applied its part.
    """

    kind = "push {}"

    source: Values
    rule: str
    """Fingerprint of the update rule."""
    live: tuple[float, ...] = ()
    """The hyper-parameters that scripts change between pushes."""
    clock: int = 0
    """Taken when the user calls."""
    codec: int = 0
    """The form in which the values travel."""
    threshold: float = 0.0
    """The value of a quantised 1."""


@dataclass(slots=True, kw_only=True, eq=False)
class PullOperation(_Operation):
    """Write the newest values of a key, or of some of its rows, into `destination`: flat, of its type."""

    kind = "pull {}"

    pushed: int
    """How many of this rank's pushes must be in the values: those that the user made before."""
    destination: Array
    least: int | None = None
    """How many clocks of every other rank must be in them, from where this rank began; None: any number."""
    counted: bool = False
    """Whether clocks are those that the script counts; otherwise each push of the key is one."""
    of_all: bool = False
    """Ask all owners, since this rank does not know yet which one has which block."""
    rows: Numbers | None = None
    """Numbers of the rows to pull, rising; None: all. Only of a key whose chunks are whole rows."""


@dataclass(slots=True, kw_only=True, eq=False)
class StatesOperation(_Operation):
    """Collect the states that the owners' update rules keep of a key: bytes for each block.

    It counts as a pull of the key.
    """

    kind = "pull {} (of states)"

    pushed: int
    """How many of this rank's pushes must be in the states."""
    destination: dict[int, bytes]
    with_values: bool = False
    """Whether a block's bytes begin with its values, to which no push is applied before the state is read."""


AsyncOperation: TypeAlias = PushOperation | PullOperation | StatesOperation


class Pushes:
    """What one rank has pushed and pulled of one key, counted where numbers are taken."""

    __slots__ = ("in_clock", "pulls", "total")

    def __init__(self) -> None:
        self.total = 0
        self.in_clock = 0
        """Since the last `clock()`."""
        self.pulls = 0
