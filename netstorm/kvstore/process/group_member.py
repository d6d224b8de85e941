"""What a group of a frontend needs of the job: its keys, its calls and messages, and who is in a result."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Final

from netstorm.errors import NodeLost
from netstorm.kvstore.calls import CallPositions, GroupCalls, TensorCalls, TensorExchange
from netstorm.kvstore.forms import Collective
from netstorm.kvstore.operations import (
    ANY_PEER,
    Bytes,
    Done,
    Operation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.codecs import Reduction

__all__ = ["GroupMember", "after_all", "not_yet_known"]


_AVERAGED: Final = (Reduction.SUM, Reduction.AVERAGE)
"""What gradients are reduced by."""


class GroupMember:
    """This process as a member of one group.

    Attributes:
        name: of the group, the same at every member.
        rank: within the group.
        ranks: of the members in the job, by rank within the group.
        runtime: of the process.
        positions: of the calls of all groups of the process.
        own_calls: the collective calls of the program.
        reduced_by: ranks whose values are in all parts of all reductions of this group since the program has
            last cleared it; None: there were none.
    """

    live_ranks = "the ranks of the job"
    """What tells a program of the framework which ranks are in the job, for error messages."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        runtime: Runtime,
        namespace: int,
        positions: CallPositions,
    ) -> None:
        self.name: Final = name
        self.ranks: Final = tuple(ranks)
        self.rank: Final = self.ranks.index(runtime.rank)
        self.runtime: Final = runtime
        self.positions: Final = positions
        self.reduced_by: int | None = None
        self._register: Final = functools.partial(runtime.register, namespace)
        self._tensor_calls = 0
        self.own_calls: Final = self.calls("")

    @property
    def size(self) -> int:
        """How many members the group has."""
        return len(self.ranks)

    @property
    def called(self) -> int:
        """How many collective calls have been made."""
        return self.own_calls.called

    def calls(self, suffix: str) -> GroupCalls:
        """Return a sequence of calls that is numbered by itself; `suffix` tells it from others."""
        calls = GroupCalls(self.name + suffix, self.ranks, size=self.runtime.size, register=self._register)
        self.positions.add(calls)
        return calls

    def tensor_calls(self) -> TensorCalls:
        """Return new calls that sum tensors by codecs; all members must ask for the same, in the same
        order.
        """
        name = f"{self.name}/codecs {self._tensor_calls}"
        self._tensor_calls += 1
        calls = TensorCalls(name, self.ranks, size=self.runtime.size, register=self._register)
        self.positions.add(calls)
        return calls

    def record_reduced(self, ranks: int) -> None:
        """Record the bit set of the ranks whose values are in all parts of a reduction."""
        self.reduced_by = ranks if self.reduced_by is None else self.reduced_by & ranks

    def operation(self, calls: GroupCalls, exchange: TensorExchange, timeout_s: float) -> Operation:
        """Return the next call of a sequence as an operation, whose `done` is still to be given.

        Raises:
            UsageError: values that cannot be reduced so; a newcomer of an elastic job without its state.
        """
        self.positions.check(calls)
        return calls.operation(exchange, not_yet_known, timeout_s)

    def contributors(self, operation: Operation) -> frozenset[int]:
        """Return the members whose values are in all parts of the result of an operation that has ended."""
        whole = functools.reduce(int.__and__, operation.contributors, -1)
        form = operation.form
        # A result that may lack late ranks does not say who is in the job.
        if isinstance(form, Collective) and form.signature.reduction in _AVERAGED and operation.loss is None:
            self.record_reduced(whole)
        return frozenset(place for place, rank in enumerate(self.ranks) if whole >> rank & 1)

    def missing(self, operation: Operation, giver: int | None) -> NodeLost | None:
        """Return the error if a result lacks the values of the one member that gives some."""
        if giver is None or all(bits >> self.ranks[giver] & 1 for bits in operation.contributors):
            return None
        return NodeLost(
            f"{operation}: rank {giver} is not in the job any more, or has just joined it, so nobody has "
            f"given the values; name another rank ({self.live_ranks})"
        )

    def send_operation(
        self, source: Bytes, what: str, peer: int, tag: int, channel: str = ""
    ) -> SendOperation:
        """Return the operation that sends bytes to a member; `what` describes the values."""
        return SendOperation(
            peer=self.ranks[peer],
            channel=self.name + channel,
            tag=tag,
            source=source,
            what=what,
            done=not_yet_known,
        )

    def receive_operation(
        self, target: Bytes, what: str, peer: int | None, tag: int, channel: str = ""
    ) -> ReceiveOperation:
        """Return the operation that receives bytes from a member; None: from any."""
        return ReceiveOperation(
            peer=ANY_PEER if peer is None else self.ranks[peer],
            channel=self.name + channel,
            tag=tag,
            destination=target,
            what=what,
            done=not_yet_known,
            peers=self.ranks if peer is None else (),
        )


def after_all(count: int, done: Done) -> Done:
    """Return what calls `done` when it has been called so many times, with the first error if there is
    one.
    """
    if count == 0:
        done(None)
    lock = threading.Lock()
    errors: list[Exception] = []
    left = count

    def one(error: Exception | None) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
            if error is not None:
                errors.append(error)
        if last:
            done(errors[0] if errors else None)

    return one


def not_yet_known(_: Exception | None) -> None:
    """Stand for what will end an operation until that is known."""
