"""One all-reduce that the user has asked for, and its rounds' state on this node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from netstorm.kvstore.form import Form, Sum, Values
from netstorm.kvstore.keys import Key
from netstorm.protocol.frames import Buffer
from netstorm.topology.holding import Stretch
from netstorm.topology.policy import Plan

__all__ = ["Done", "Operation", "Round"]

Done = Callable[[Exception | None], None]
"""Called once, from the I/O thread: None, or why the operation failed. It must not block."""


class Operation:
    """Sum `source` over all ranks into `destination`, for one round of one key.

    `source` and `destination` are what the operation's form takes: of dense values flat arrays of the key's
    type, which may be the same memory. `source` None contributes zeros; `destination` None drops the result.
    Both must stay valid until `done` is called, and unchanged but by us.
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
        """Nobody here has asked for it: this rank's program has ended, and the others' round shall go on."""
        self.begun_at = 0.0

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        return f"round {self.round} of {self.key.name}"


class Round:
    """One round of one key under one policy: a sum for each chunk that something is known of."""

    __slots__ = (
        "form",
        "key",
        "missing",
        "moved",
        "operation",
        "plan",
        "results",
        "round",
        "stretch",
        "sums",
        "version",
    )

    def __init__(self, key: Key, round: int, plan: Plan, form: Form, moved: dict[int, Plan]) -> None:
        assert key.layout is not None
        self.key = key
        self.form = form
        """The operation's as soon as that is here; until then one with the codec of the parts that are."""
        self.round = round
        self.version: Final = plan.version
        self.plan = plan
        self.moved: Final = moved
        """Chunks that have gone over to later policies (`takeover`)."""
        self.operation: Operation | None = None
        """What the user wants; None while only other ranks' data is here."""
        self.sums: list[Sum | None] = [None] * key.layout.chunks
        self.results = [False] * key.layout.chunks
        self.missing = key.layout.chunks
        """Chunks whose result has not arrived."""
        look_ahead = plan.policy.look_ahead
        self.stretch: Final = (
            Stretch((key.identity, round), key.layout.offsets, look_ahead) if look_ahead else None
        )
        """What is held back of it; None: nothing ever is."""

    def plan_of(self, chunk: int) -> Plan:
        """Return the plan that a chunk is summed by."""
        return self.moved.get(chunk, self.plan)

    def sum_of(self, chunk: int) -> Sum:
        """Return the sum of a chunk, new if this is the first that is heard of it."""
        found = self.sums[chunk]
        if found is None:
            found = self.sums[chunk] = self.form.new_sum()
        return found

    def own_values(self, chunk: int) -> Values | None:
        """Return this rank's contribution to a chunk, as its form has it; None: zeros."""
        operation, layout = self.operation, self.key.layout
        if operation is None or operation.source is None or layout is None:
            return None
        start, end = layout.bounds[chunk]
        return self.form.own(operation.source, start, end)

    def store(self, chunk: int, payload: Buffer | None) -> None:
        """Write the result of a chunk to where the user wants it."""
        self.results[chunk] = True
        self.missing -= 1
        self.sums[chunk] = None
        operation, layout = self.operation, self.key.layout
        if operation is None or operation.destination is None or layout is None:
            return
        start, end = layout.bounds[chunk]
        self.form.write(operation.destination, start, end, payload)
