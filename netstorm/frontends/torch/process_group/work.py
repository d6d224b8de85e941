"""One call under way, as PyTorch has it: waiting, its future, its error."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import Work

from netstorm import clock
from netstorm.errors import NetStormError, WaitTimeout
from netstorm.frontends.torch.compiler import methods_are_never_compiled
from netstorm.frontends.torch.errors import as_torch_error, given_to_a_future
from netstorm.kvstore.process.runtime import CompletionThread

__all__ = ["CallWork"]


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
