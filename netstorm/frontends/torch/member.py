"""What a process group needs of the job: its keys, its calls and messages, and how they end."""

from __future__ import annotations

import _thread
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch.distributed import Work

from netstorm import clock
from netstorm.errors import NetStormError, WaitTimeout
from netstorm.frontends.torch.errors import as_torch_error, given_to_a_future
from netstorm.frontends.torch.internals import never_traced
from netstorm.frontends.torch.tensors import Staged, array_of
from netstorm.kvstore.calls import CallPositions, GroupCalls, TensorExchange
from netstorm.kvstore.operations import (
    Done,
    Operation,
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.process.group_member import GroupMember, after_all
from netstorm.kvstore.process.runtime import CompletionThread, Runtime
from netstorm.protocol.codecs import Element

__all__ = [
    "CallWork",
    "ProcessGroupMember",
    "copy_back",
    "future_of",
    "methods_are_never_compiled",
    "never_compiled",
]


_NO_TIMEOUT: Final = timedelta(0)

_KEPT: Final = 64
"""More single values than are summed between a forward pass and its backward pass."""


class ProcessGroupMember(GroupMember):
    """This process as a member of one process group.

    Attributes:
        timeout: of calls that bring none.
        thread: ends calls whose end runs code of the user's.
    """

    live_ranks = "netstorm.frontends.torch.elastic.live_ranks()"

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
        super().__init__(name, ranks, runtime=runtime, namespace=namespace, positions=positions)
        self.timeout = timeout
        self.thread: Final = thread
        self._saving: GroupCalls | None = None
        self._kept: Final[deque[CallWork]] = deque(maxlen=_KEPT)
        """The last works of single values. DDP's reducer keeps that of `Join`'s count until a backward pass
        asks for its future, and C++ alone does not keep what Python has of it."""
        self._sequences = 0
        self._lock: Final = threading.Lock()

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
        exchange: TensorExchange,
        result: list[torch.Tensor],
        timeout: timedelta,
        memory: Sequence[Staged] = (),
        *,
        giver: int | None = None,
        calls: GroupCalls | None = None,
    ) -> CallWork:
        """Begin a collective call, and return its work.

        Args:
            exchange: what to do; its memory is used until the call ends.
            result: tensors that the future gives.
            timeout: of the call; 0 or less: the group's.
            memory: the user's tensors in it, to read and to copy back to.
            giver: member whose values everybody gets; the call fails without them.
            calls: the sequence that it is one of; None: the group's own.
        """
        operation = self.operation(calls or self._next_calls(), exchange, self._seconds(timeout))
        work = self.work(exchange.text, result, timeout, lambda: self.runtime.process.waiting_text(operation))

        def ended(error: Exception | None) -> None:
            work.contributors = self.contributors(operation)
            work.finish(self.missing(operation, giver) if error is None else error)

        self._submit(operation, memory, ended, work)
        if len(result) == 1 and result[0].numel() == 1:
            self._kept.append(work)
        return work

    def more_calls(self, what: str) -> GroupCalls:
        """Return a new sequence of calls; all members must ask for the same, in the same order."""
        self._sequences += 1
        return self.calls(f"/{what} {self._sequences}")

    def is_behind(self, calls: GroupCalls, *, begun: bool) -> bool:
        """Return whether the next call of a sequence has ended, or only `begun`, without this rank."""
        node = self.runtime.node
        return any(node.is_behind(key, round, begun=begun) for key, round in calls.next_rounds().items())

    def _next_calls(self) -> GroupCalls:
        """Return the sequence that the caller's next call is one of.

        `torch.distributed.checkpoint.async_save` saves in a thread, by default over the default group. Its
        calls come between those of the training at another place at each rank, so they have numbers of
        their own.
        """
        if threading.current_thread() is threading.main_thread() or not _saves_in_background():
            return self.own_calls
        with self._lock:
            if self._saving is None:
                self._saving = self.calls("/checkpoint")
            return self._saving

    def begin(
        self,
        exchange: TensorExchange,
        done: Done,
        memory: Sequence[Staged] = (),
        calls: GroupCalls | None = None,
    ) -> None:
        """Begin a collective call that is a part of another one; `done` is called at its end.

        `calls` is the sequence that it is one of; None: the group's own.
        """
        operation = self.operation(calls or self._next_calls(), exchange, self.timeout.total_seconds())

        def ended(error: Exception | None) -> None:
            self.contributors(operation)
            done(error)

        self._submit(operation, memory, ended, None)

    def send(self, source: Staged, what: str, peer: int, tag: int, channel: str = "") -> SendOperation:
        """Return the operation that sends a tensor's bytes to a member; `what` describes the tensor."""
        return self.send_operation(array_of(source.host, Element.BYTES), what, peer, tag, channel)

    def receive(
        self, target: Staged, what: str, peer: int | None, tag: int, channel: str = ""
    ) -> ReceiveOperation:
        """Return the operation that receives a tensor's bytes from a member; None: from any."""
        return self.receive_operation(array_of(target.host, Element.BYTES), what, peer, tag, channel)

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
        work = self.work(
            text, result, timeout, lambda: ", ".join(str(operation) for operation, _ in messages[:4])
        )

        def finish(error: Exception | None) -> None:
            received = [operation for operation, _ in messages if isinstance(operation, ReceiveOperation)]
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


def _saves_in_background() -> bool:
    """Return whether PyTorch's checkpoints have called, outside of the main thread."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 -- a traceback would take ten times as long
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back
    return False


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


def future_of(work: Any, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return the future of a call, as DDP's hooks do: it gives `tensor`, or raises what the call has failed
    with.
    """

    def ended(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()
        return tensor

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
    return future


# Keeps torch.compile out of NetStorm's own code, which hands memory to other threads and waits for them.
#
# A compiled program calls it as it is, as it calls Gloo's C++.

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def never_compiled(function: Function) -> Function:
    """Decorate a function: torch.compile traces neither it nor what it calls."""
    never_traced(function)
    return function


def methods_are_never_compiled(decorated: Class) -> Class:
    """Decorate a class: torch.compile traces none of its methods."""
    for member in vars(decorated).values():
        if inspect.isfunction(member):
            never_compiled(member)
    return decorated


# One call under way, as PyTorch has it: waiting, its future, its error.

_Work: Final[Any] = Work
"""Without PyTorch's types: those of its binding do not fit what it takes from Python."""


_GRACE_S: Final = 5.0
"""How long the scheduler's error of a time-out may take: it names who is missing."""


@methods_are_never_compiled
class CallWork(_Work):
    """A call of a process group. `finish` ends it, once, from any thread.

    Attributes:
        contributors: the members whose values are in all parts of the result; None: the call has not ended,
            or is no collective one.
    """

    def __init__(
        self,
        text: str,
        result: list[torch.Tensor],
        *,
        timeout_s: float,
        thread: CompletionThread,
        waiting_for: Callable[[], str],
        timed_out: Callable[[str], None],
    ) -> None:
        """Begin.

        Args:
            text: the call, as error messages show it.
            result: what the future gives.
            timeout_s: of the group; reaching it fails the job, as nobody knows what is still in flight. For
                collective calls the node sees to that, and its error names who is missing.
            thread: runs continuations.
            waiting_for: says what the call waits for; it may take a moment.
            timed_out: called with the reason if the call has reached its time-out.
        """
        super().__init__()
        self._text: Final = text
        self._result: Final = result
        self._deadline: Final = clock.monotonic() + timeout_s
        self._timeout_s: Final = timeout_s
        self._thread: Final = thread
        self._waiting_for: Final = waiting_for
        self._timed_out: Final = timed_out
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._state: Final = _thread.allocate_lock()
        self._completed = False
        self._error: NetStormError | None = None
        self._trigger: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._at_wait: Final[list[Callable[[], None]]] = []
        self._devices: list[int | str | torch.device] = []
        self._source = -1
        self.contributors: frozenset[int] | None = None

    # --------------------------------------------------------------------------------------- who ends it

    def finish(self, error: Exception | None, source: int = -1) -> None:
        """End the call, with an error or well.

        Args:
            error: why there is no result.
            source: the rank that a message came from.
        """
        with self._state:
            if self._completed:
                return
            self._source = source
            self._error = None if error is None else as_torch_error(error)
            self._completed = True
            trigger = self._trigger
        self._ended.release()
        if trigger is not None:
            self._thread.run(lambda: self._complete(trigger))

    def order_after(self, function: Callable[[], None]) -> None:
        """Have `function` called by whoever waits: it lets the waiting thread's stream wait for a device."""
        self._at_wait.append(function)

    def on_device(self, device: torch.device | None) -> None:
        """Record that the result is on a device (None: the CPU). Its futures then order streams."""
        if device is not None and device not in self._devices:
            self._devices.append(device)

    # ------------------------------------------------------------------------------ the interface of `Work`

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call's end.

        Args:
            timeout: how long; None or 0: until the group's time-out, which fails the job.

        Raises:
            WaitTimeout: the message says what is missing.
            NetStormError: why there is no result. All of them are also `DistBackendError`s.
        """
        limit = timeout.total_seconds() if timeout else 0.0
        seconds = limit if limit > 0 else max(0.0, self._deadline + _GRACE_S - clock.monotonic())
        if not self._completed:
            if not self._ended.acquire(timeout=min(seconds, _thread.TIMEOUT_MAX)):
                self._raise_timeout(limit)
            else:
                self._ended.release()
        if self._error is not None:
            raise as_torch_error(self._error)
        for order in self._at_wait:
            order()
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or not."""
        return self._completed

    def is_success(self) -> bool:
        """Return whether the call has ended well."""
        return self._completed and self._error is None

    def exception(self) -> NetStormError | None:
        """Return why there is no result; None while there is none, or if there is one."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the call has written."""
        return self._result

    def synchronize(self) -> None:
        """Let the current stream wait for the result."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that a message came from, within the group; -1: no message has come."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the call's tensors. Its continuations run on a thread of their own."""
        with self._state:
            if self._future is None:
                trigger: torch.futures.Future[None] = torch.futures.Future(devices=self._devices)
                self._trigger = trigger
                # An exception in a continuation is one of the future for C++, too: DDP's reducer needs it.
                self._future = trigger.then(self._value)
                completed = self._completed
            else:
                return self._future
        if completed:
            self._complete(trigger)
        return self._future

    def _complete(self, trigger: torch.futures.Future[None]) -> None:
        for order in self._at_wait:
            order()  # the future records an event of this thread's stream, which comes after the result
        trigger.set_result(None)

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise given_to_a_future(self._error)
        return self._result

    def _raise_timeout(self, limit_s: float) -> None:
        seconds = limit_s if limit_s > 0 else self._timeout_s
        waits = self._waiting_for()
        if self._completed:  # in the meantime
            return
        text = f"{self._text} has not completed within its timeout of {seconds:g} s{waits and ': ' + waits}"
        if limit_s <= 0:
            self._timed_out(text)
        raise as_torch_error(WaitTimeout(text))
