"""What a process group needs of the job: its keys, its calls and messages, and how they end."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Final

import torch

from netstorm.errors import NodeLost
from netstorm.frontends.torch.process_group.memory import Staged, array_of
from netstorm.frontends.torch.process_group.work import CallWork
from netstorm.kvstore.calls import CallPositions, Exchange, GroupCalls, TensorCalls
from netstorm.kvstore.forms import Collective, Key
from netstorm.kvstore.operations import (
    ANY_PEER,
    Done,
    Operation,
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.process.runtime import CompletionThread, Runtime
from netstorm.protocol.codecs import COLLECTIVE, Element, Reduction

__all__ = ["Member", "after_all", "copy_back"]

_NO_TIMEOUT: Final = timedelta(0)

_AVERAGED: Final = (Reduction.SUM, Reduction.AVERAGE)
"""What gradients are reduced by."""


class Member:
    """This process as a member of one group.

    Attributes:
        name: of the group, the same at every member.
        rank: within the group.
        ranks: of the members in the job, by rank within the group.
        runtime: of the process.
        timeout: of calls that bring none.
        positions: of the calls of all groups of the process.
        reduced_by: ranks whose values are in all parts of all reductions of this group since the program has
            last cleared it; None: there were none.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        runtime: Runtime,
        namespace: int,
        thread: CompletionThread,
        timeout: timedelta,
        positions: CallPositions,
    ) -> None:
        self.name: Final = name
        self.ranks: Final = tuple(ranks)
        self.rank: Final = self.ranks.index(runtime.rank)
        self.runtime: Final = runtime
        self.timeout = timeout
        self.thread: Final = thread
        self.positions: Final = positions
        self.reduced_by: int | None = None
        self._namespace: Final = namespace
        self._tensor_calls = 0
        self._calls: Final = self.calls("")
        self._saving: GroupCalls | None = None
        self._lock: Final = threading.Lock()

    @property
    def size(self) -> int:
        """How many members the group has."""
        return len(self.ranks)

    @property
    def called(self) -> int:
        """How many collective calls have been made."""
        return self._calls.called

    def calls(self, suffix: str) -> GroupCalls:
        """Return a sequence of calls that is numbered by itself; `suffix` tells it from others."""

        def register(key_name: str, elements: int, members: tuple[int, ...]) -> Key:
            return self.runtime.register(
                self._namespace, key_name, (elements,), "float32", form=COLLECTIVE, members=members
            )

        calls = GroupCalls(self.name + suffix, self.ranks, size=self.runtime.size, register=register)
        self.positions.add(calls)
        return calls

    def tensor_calls(self) -> TensorCalls:
        """Return new calls that sum tensors by codecs; all members must ask for the same, in the same
        order.
        """

        def register(name: str, shape: tuple[int, ...], form: int, members: tuple[int, ...]) -> Key:
            return self.runtime.register(self._namespace, name, shape, "float32", form=form, members=members)

        name = f"{self.name}/codecs {self._tensor_calls}"
        self._tensor_calls += 1
        calls = TensorCalls(name, self.ranks, size=self.runtime.size, register=register)
        self.positions.add(calls)
        return calls

    def record_reduced(self, ranks: int) -> None:
        """Record the bit set of the ranks whose values are in all parts of a reduction."""
        self.reduced_by = ranks if self.reduced_by is None else self.reduced_by & ranks

    def work(
        self,
        text: str,
        result: list[torch.Tensor],
        timeout: timedelta,
        waiting_for: Callable[[], str] = lambda: "",
    ) -> CallWork:
        """Return what will be a call's end.

        Args:
            text: the call, as error messages show it.
            result: tensors that the future gives.
            timeout: of the call; 0 or less: the group's.
            waiting_for: says what it waits for.
        """
        self.runtime.check()
        return CallWork(
            text,
            result,
            timeout_s=self._seconds(timeout),
            thread=self.thread.for_caller(),
            waiting_for=waiting_for,
            timed_out=self.runtime.fail,
        )

    def _seconds(self, timeout: timedelta) -> float:
        return (timeout if timeout > _NO_TIMEOUT else self.timeout).total_seconds()

    def call(
        self,
        exchange: Exchange,
        result: list[torch.Tensor],
        timeout: timedelta,
        memory: Sequence[Staged] = (),
        giver: int | None = None,
    ) -> CallWork:
        """Begin a collective call, and return its work.

        Args:
            exchange: what to do; its memory is used until the call ends.
            result: tensors that the future gives.
            timeout: of the call; 0 or less: the group's.
            memory: the user's tensors in it, to read and to copy back to.
            giver: member whose values everybody gets; the call fails without them.
        """
        operation = self._operation(self._next_calls(), exchange, self._seconds(timeout))
        work = self.work(exchange.text, result, timeout, lambda: self.runtime.process.waiting_text(operation))

        def ended(error: Exception | None) -> None:
            work.contributors = self._contributors(operation)
            work.finish(self._missing(operation, giver) if error is None else error)

        self._submit(operation, memory, ended, work)
        return work

    def _next_calls(self) -> GroupCalls:
        """Return the sequence that the caller's next call is one of.

        `torch.distributed.checkpoint.async_save` saves in a thread, by default over the default group. Its
        calls come between those of the training at another place at each rank, so they have numbers of
        their own.
        """
        if threading.current_thread() is threading.main_thread() or not _saves_in_background():
            return self._calls
        with self._lock:
            if self._saving is None:
                self._saving = self.calls("/checkpoint")
            return self._saving

    def _operation(self, calls: GroupCalls, exchange: Exchange, timeout_s: float) -> Operation:
        self.positions.check(calls)
        return calls.operation(exchange, _ignore, timeout_s)

    def _contributors(self, operation: Operation) -> frozenset[int]:
        """Return the members whose values are in all parts of a result."""
        whole = functools.reduce(int.__and__, operation.contributors, -1)
        if isinstance(operation.form, Collective) and operation.form.signature.reduction in _AVERAGED:
            self.record_reduced(whole)
        return frozenset(place for place, rank in enumerate(self.ranks) if whole >> rank & 1)

    def _missing(self, operation: Operation, giver: int | None) -> NodeLost | None:
        """Return the error if a result lacks the values of the one member that gives some."""
        if giver is None or all(bits >> self.ranks[giver] & 1 for bits in operation.contributors):
            return None
        return NodeLost(
            f"{operation}: rank {giver} is not in the job any more, or has just joined it, so nobody has "
            "given the values; name another rank (netstorm.frontends.torch.elastic.live_ranks())"
        )

    def begin(
        self, exchange: Exchange, done: Done, memory: Sequence[Staged] = (), calls: GroupCalls | None = None
    ) -> None:
        """Begin a collective call that is a part of another one; `done` is called at its end.

        `calls` is the sequence that it is one of; None: the group's own.
        """
        operation = self._operation(calls or self._next_calls(), exchange, self.timeout.total_seconds())

        def ended(error: Exception | None) -> None:
            self._contributors(operation)
            done(error)

        self._submit(operation, memory, ended, None)

    def send(self, source: Staged, what: str, peer: int, tag: int, channel: str = "") -> SendOperation:
        """Return the operation that sends a tensor's bytes to a member; `what` describes the tensor."""
        return SendOperation(
            peer=self.ranks[peer],
            channel=self.name + channel,
            tag=tag,
            source=array_of(source.host, Element.BYTES),
            what=what,
            done=_ignore,
        )

    def receive(
        self, target: Staged, what: str, peer: int | None, tag: int, channel: str = ""
    ) -> ReceiveOperation:
        """Return the operation that receives a tensor's bytes from a member; None: from any."""
        return ReceiveOperation(
            peer=ANY_PEER if peer is None else self.ranks[peer],
            channel=self.name + channel,
            tag=tag,
            destination=array_of(target.host, Element.BYTES),
            what=what,
            done=_ignore,
            peers=self.ranks if peer is None else (),
        )

    def exchange_messages(
        self,
        text: str,
        messages: Sequence[tuple[PointToPointOperation, Staged]],
        result: list[torch.Tensor],
        timeout: timedelta,
        whole: Staged | None = None,
    ) -> CallWork:
        """Begin to send and receive messages, each with its tensor, and return the work of all together.

        Args:
            text: the call, as error messages show it.
            messages: operations, and their memory.
            result: tensors that the future gives.
            timeout: of the call; 0 or less: the group's.
            whole: memory that the messages are parts of; copied back when all are done.
        """
        work = self.work(text, result, timeout, lambda: ", ".join(str(one) for one, _ in messages[:4]))

        def finish(error: Exception | None) -> None:
            received = [one for one, _ in messages if isinstance(one, ReceiveOperation)]
            known = error is None and len(received) == 1 and received[0].source >= 0
            source = self.ranks.index(received[0].source) if known else -1
            if error is None and whole is not None and whole.is_copy:
                thread.run(lambda: copy_back([whole], lambda failed: work.finish(failed, source), work))
            else:
                work.finish(error, source)

        thread = self.thread.for_caller()
        done = after_all(len(messages), finish)
        for operation, memory in messages:
            self._submit(operation, (memory,), done, work)
        return work

    def _submit(
        self,
        operation: Operation | PointToPointOperation,
        memory: Sequence[Staged],
        done: Done,
        work: CallWork | None,
    ) -> None:
        """Submit an operation once its memory can be read; copy results back before `done`."""
        copies = [] if isinstance(operation, SendOperation) else [each for each in memory if each.is_copy]
        waits = [each for each in memory if each.must_wait]
        if work is not None:
            for each in memory:
                work.on_device(each.device)
        operation.done = self._copies_back(copies, done, work) if copies else done
        if waits:
            self.thread.for_caller().run(lambda: self._submit_when_read(operation, waits, done))
        else:
            self.runtime.submit(operation)

    def _copies_back(self, copies: Sequence[Staged], done: Done, work: CallWork | None) -> Done:
        """Return what copies results back when an operation has ended well, and then calls `done`."""
        thread = self.thread.for_caller()

        def ended(error: Exception | None) -> None:
            if error is None:
                thread.run(lambda: copy_back(copies, done, work))
            else:
                done(error)

        return ended

    def _submit_when_read(
        self, operation: Operation | PointToPointOperation, waits: Sequence[Staged], done: Done
    ) -> None:
        try:
            for each in waits:
                each.wait_until_read()
        except Exception as error:  # noqa: BLE001 -- whatever it is, whoever waits must hear of it
            done(error)
        else:
            self.runtime.submit(operation)


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


def _saves_in_background() -> bool:
    """Return whether PyTorch's checkpoints have called, outside of the main thread."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 -- a traceback would take ten times as long
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back
    return False


def _ignore(_: Exception | None) -> None:
    """Stand for what will end a call until that is known."""


def copy_back(copies: Sequence[Staged], done: Done, work: CallWork | None) -> None:
    """Give results to the user's tensors, and end a call."""
    try:
        for copy in copies:
            copy.copy_back()
            if work is not None:
                work.order_after(copy.order_current_stream)
    except Exception as error:  # noqa: BLE001 -- as above
        done(error)
    else:
        done(None)
