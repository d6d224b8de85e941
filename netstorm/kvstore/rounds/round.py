"""The state of one round of one key on this node. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.dense import ChunkSum
from netstorm.kvstore.values.form import Form, Sum, Values
from netstorm.kvstore.values.key import Key, Layout
from netstorm.kvstore.values.undetermined import ZeroSum
from netstorm.protocol.chunks import UNDETERMINED_FORM
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import ranks_in
from netstorm.topology.policy import Plan
from netstorm.topology.trees.withholding import LookAheadSpan

__all__ = ["Round"]

_SENT: Final = ChunkSum(np.dtype(np.float32), wide=False)
"""Stands for a sum that has gone to the parent: all its contributors have been counted."""
_SENT.contributors = -1


class Round:
    """One round of one key under one policy: a sum for each chunk of which something has come."""

    __slots__ = (
        "form",
        "key",
        "layout",
        "look_ahead_span",
        "missing",
        "moved",
        "operation",
        "plan",
        "results",
        "round",
        "sums",
        "version",
    )

    def __init__(self, key: Key, round: int, plan: Plan, form: Form, moved: dict[int, Plan]) -> None:
        assert key.layout is not None
        self.key = key
        self.layout: Final[Layout] = key.layout
        self.form = form
        """The operation's, once that is here; before, one with the codec of the parts that have come."""
        self.round = round
        self.version: Final = plan.version
        self.plan = plan
        self.moved: Final = moved
        """Chunks that have moved to later policies (`takeover`)."""
        self.operation: Operation | None = None
        """The user's; None while only other ranks' data is here."""
        self.sums: list[Sum | None] = [None] * key.layout.chunks
        self.results = [False] * key.layout.chunks
        self.missing = key.layout.chunks
        """Chunks whose result has not arrived."""
        look_ahead = plan.policy.look_ahead
        self.look_ahead_span: Final = (
            LookAheadSpan((key.identity, round), key.layout.offsets, look_ahead) if look_ahead else None
        )
        """The sums that are withheld; None: the policy has no look-ahead."""

    @property
    def priority(self) -> int:
        """The operation's; 0 until that is here."""
        return 0 if self.operation is None else self.operation.priority

    def plan_of(self, chunk: int) -> Plan:
        """Return the plan that a chunk is summed by."""
        return self.moved.get(chunk, self.plan) if self.moved else self.plan

    def accepts(self, form: Form) -> bool:
        """Return whether parts in this form may belong to this round."""
        return form.codec == self.form.codec or UNDETERMINED_FORM in (form.codec, self.form.codec)

    def switch_form(self, form: Form) -> None:
        """Continue in a form that the round `accepts`. The undetermined form is replaced by any other."""
        if form.codec == UNDETERMINED_FORM:
            return
        for chunk, total in enumerate(self.sums if self.form.codec == UNDETERMINED_FORM else ()):
            if isinstance(total, ZeroSum):
                self.sums[chunk] = taken = form.new_sum()
                taken.add_received(None, total.contributors)
        self.form = form

    def sum_of(self, chunk: int) -> Sum:
        """Return the sum of a chunk; it is made if there is none."""
        found = self.sums[chunk]
        if found is None:
            found = self.sums[chunk] = self.form.new_sum()
        return found

    def is_under_way(self, chunk: int) -> bool:
        """Return whether another rank has contributed to a chunk that this rank is the root of."""
        total = self.sums[chunk]
        return total is not None and bool(total.contributors & ~(1 << self.plan.rank))

    def mark_sent(self, chunk: int) -> None:
        """Record that a chunk's sum has gone to the parent, and drop it."""
        self.sums[chunk] = _SENT

    def own_values(self, chunk: int) -> Values | None:
        """Return this rank's contribution to a chunk, in the round's form; None: zeros."""
        operation = self.operation
        if operation is None or operation.source is None:
            return None
        start, end = self.layout.bounds[chunk]
        return self.form.own(operation.source, start, end)

    def store(self, chunk: int, payload: Buffer | None) -> None:
        """Write the result of a chunk to the user's destination."""
        self.results[chunk] = True
        self.missing -= 1
        self.sums[chunk] = None
        operation = self.operation
        if operation is None or operation.destination is None:
            return
        start, end = self.layout.bounds[chunk]
        self.form.write(operation.destination, start, end, payload)

    def waiting_text(self) -> str:
        """Return what is missing, for a person."""
        ranks: set[int] = set()
        for chunk, done in enumerate(self.results):
            total = self.sums[chunk]
            if not done and total is not None and total is not _SENT:
                plan = self.plan_of(chunk)
                expected = plan.expected[plan.tree_of(self.layout.slots[chunk])]
                ranks.update(ranks_in(expected & ~total.contributors))
        waited = f"contributions of ranks {sorted(ranks)}" if ranks else "results from other ranks"
        return f"{self.missing} of {len(self.results)} chunks wait for {waited}"
