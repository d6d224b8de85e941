"""An all-reduce, as the user submits it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from netstorm.kvstore.values.form import Form, Values
from netstorm.kvstore.values.key import Key

__all__ = ["Done", "Operation"]

Done = Callable[[Exception | None], None]
"""Called once, from the I/O thread: None, or why the operation failed. It must not block."""


class Operation:
    """Sum `source` over all ranks into `destination`, for one round of one key.

    `source` and `destination` are of the types that the operation's form takes: for dense values, flat arrays
    of the key's type, which may be the same memory. `source` None contributes zeros; `destination` None drops
    the result. Both must stay valid until `done` is called, and only the node may change them.
    """

    __slots__ = (
        "begun_at",
        "destination",
        "done",
        "for_others",
        "form",
        "key",
        "priority",
        "round",
        "rule",
        "source",
    )

    def __init__(
        self,
        *,
        key: Key,
        round: int,
        source: Values | None,
        destination: Values | None,
        done: Done,
        priority: int = 0,
        rule: str = "",
        form: Form | None = None,
        for_others: bool = False,
    ) -> None:
        self.key = key
        self.round = round
        self.source = source
        self.destination = destination
        self.done = done
        self.priority = priority
        self.rule = rule
        """Fingerprint of what this rank does with the sum; ranks must agree."""
        self.form: Final[Form] = form or key.form
        """How the values travel; ranks must agree, round by round."""
        self.for_others = for_others
        """No program waits for it here: this rank's program has ended, and contributes to the others' rounds.
        """
        self.begun_at = 0.0

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        return f"round {self.round} of key {self.key.name!r}"
