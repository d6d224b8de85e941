"""An all-reduce, as the user submits it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple
from zlib import crc32

from netstorm.kvstore.values.form import Form, Values
from netstorm.kvstore.values.key import Key
from netstorm.protocol.messages import LossTerms

__all__ = ["Call", "Done", "Operation"]

Done = Callable[[Exception | None], None]
"""Called once, from the I/O thread: None, or why the operation failed. It must not block."""


class Call(NamedTuple):
    """The collective call that an operation carries out."""

    group: str
    number: int
    """Counts the calls of the group, from 0, in the order of the program."""
    text: str
    """What was called, with which types and shapes: the same at every member."""
    members: tuple[int, ...] = ()
    """The ranks of the group in the job."""
    timeout_s: float = math.inf
    """The longest wait for its end; reaching it ends the job."""

    def __str__(self) -> str:
        """Return the call as error messages name it."""
        return f"call {self.number} of group {self.group!r}, {self.text}"


class Operation:
    """Sum `source` over all ranks into `destination`, for one round of one key.

    `source` and `destination` are of the types that the operation's form takes: for dense values, flat arrays
    of the key's type, which may be the same memory. `source` None contributes zeros; `destination` None drops
    the result. Both must stay valid until `done` is called, and only the node may change them.
    """

    __slots__ = (
        "begun_at",
        "call",
        "contributors",
        "destination",
        "digest",
        "done",
        "for_others",
        "form",
        "from_lowest",
        "key",
        "loss",
        "priority",
        "receivers",
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
        receivers: tuple[int, ...] = (),
        call: Call | None = None,
        from_lowest: bool = False,
        loss: LossTerms | None = None,
    ) -> None:
        self.key = key
        self.round = round
        self.source = source
        self.destination = destination
        self.done = done
        self.priority = priority
        self.rule = rule if call is None else str(call)
        """Fingerprint of what this rank does with the sum, or of the call; ranks must agree."""
        self.form: Final[Form] = form or key.form
        """How the values travel; ranks must agree, round by round."""
        self.for_others = for_others
        """No program waits for it here: this rank's program has ended, and contributes to the others' rounds.
        """
        self.receivers: Final = receivers
        """For each segment of a collective round: bit set of the ranks that want its result. Others get
        headers alone. Empty: all ranks want everything."""
        self.call: Final = call
        self.digest: Final = 0 if call is None else crc32(self.rule.encode())
        """Of the call: travels with every part, so that ranks whose calls differ never mix their values."""
        self.from_lowest: Final = from_lowest
        """Only the lowest rank of the job contributes its source, as to an initial value."""
        self.contributors: Final[dict[int, int]] = {}
        """By bit set of ranks: bit set of the chunks whose results are the sum of just their contributions.
        There are several only if a rank left or joined the job meanwhile, or with `loss`."""
        self.loss: Final = loss
        """The round may end without some contributions; None: it waits for all. Ranks must agree. The source
        is dense, no memory of the destination, and changes: what was counted becomes zero. So what is left in
        it has not been counted, and belongs to this rank's next contribution."""
        self.begun_at = 0.0

    def record_result(self, chunk: int, contributors: int) -> None:
        """Record who is in the result of a chunk."""
        self.contributors[contributors] = self.contributors.get(contributors, 0) | 1 << chunk

    def record_counted(self, start: int, end: int) -> None:
        """Record that a result contains this rank's values of a chunk, from element `start` to `end`."""
        counted = None if self.source is None else self.form.own(self.source, start, end)
        if counted is not None:
            counted[:] = 0

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        if self.call is not None:
            return str(self.call)
        return f"round {self.round} of key {self.key.name!r}"
