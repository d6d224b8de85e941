"""Which thread holds the interpreter lock: the switch interval, and how threads yield to a short call.

A busy Python thread releases the interpreter lock only when another thread asks for it, after a switch
interval. At Python's 5 ms a stream of 1 MB chunks fell from 1635 to 92 MB/s (docs/design.md, section 4). So
I/O threads shorten it.

During a burst of calls on a store the interval is long instead. Each call takes a tenth of a ms. With a short
interval one call in five would have to release the lock, and get it back only after the other thread has run:
that takes ms where there are more threads than cores. The burst as a whole does not take longer.

A call that has lost the lock nevertheless would wait for a whole interval, once for each thread before it: 10
to 25 ms were measured. So NetStorm's threads check whether a call is in progress, and then sleep for a
moment, which releases the lock.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import Final

from netstorm import clock

__all__ = ["SHORT_CALL", "ShortCall", "active_calls", "switch_intervals", "yield_to_call"]

_BURST_INTERVAL_S: Final = (0.005, 0.02)
"""The shortest and the longest switch interval during a burst of calls. Time beyond the end of the burst is
lost if the script is busy in Python afterwards; 160 keys take half of the longest interval."""

_OF_LAST_BURST: Final = 1.5
"""The interval is so many times as long as the last burst: the next one has the same keys."""

_BURST_ENDS_S: Final = 0.002
"""A burst is over after so long without a call."""

_LONGEST_CALL_S: Final = 0.01
"""Threads yield to a call for so long. A call that takes longer waits for something, maybe for the I/O
thread."""

_YIELD_S: Final = 50e-6

active_calls: Final[list[float]] = []
"""When each short call in progress began, in s. Appending and popping need no lock."""


def yield_to_call() -> None:
    """Let a short call in progress continue. Call it if there are any `active_calls`, from a thread that
    makes none.
    """
    if _in_a_call(clock.monotonic()):
        clock.sleep(_YIELD_S)


class ShortCall:
    """Context manager around a call that is short and probably followed by more at once; one object serves
    all.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        now = clock.monotonic()
        active_calls.append(now)
        switch_intervals.expect_burst(now)

    def __exit__(self, *_: object) -> None:
        del active_calls[-1:]  # in a child that was forked during a call the list is empty


SHORT_CALL: Final = ShortCall()


class _SwitchIntervals:
    """Sets the interpreter's thread switch interval to the smallest requested one, or to that of a burst;
    restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[object, float] = {}
        self._before = 0.0
        self._first_call = self._last_call = 0.0
        self._burst_interval = max(_BURST_INTERVAL_S)
        self._in_burst = False

    def expect_burst(self, now: float) -> None:
        """Let the calling thread keep the lock until it has not called this for a while."""
        self._last_call = now
        if not self._in_burst and self._wanted:
            self._in_burst = True
            self._first_call = now
            sys.setswitchinterval(self._burst_interval)

    def update(self, now: float) -> float:
        """End a burst that is over; return after how many s to call this again."""
        if not self._in_burst:
            return math.inf
        if now - self._last_call <= _BURST_ENDS_S or _in_a_call(now):
            return _BURST_ENDS_S
        with self._lock:
            self._in_burst = False
            shortest, longest = _BURST_INTERVAL_S
            taken = self._last_call - self._first_call
            self._burst_interval = min(max(_OF_LAST_BURST * taken, shortest), longest)
            sys.setswitchinterval(min(self._wanted.values(), default=self._before))
        return math.inf

    def add(self, owner: object, interval_s: float | None) -> None:
        """Request an interval until `remove`; None: no request."""
        if interval_s is None:
            return
        with self._lock:
            if not self._wanted:
                self._before = sys.getswitchinterval()
            self._wanted[owner] = interval_s
            sys.setswitchinterval(min(self._wanted.values()))

    def remove(self, owner: object) -> None:
        """Withdraw a request."""
        with self._lock:
            if self._wanted.pop(owner, None) is not None:
                self._in_burst = False
                sys.setswitchinterval(min(self._wanted.values(), default=self._before))

    def reset_after_fork(self) -> None:
        """Reset in a forked child: it has none of the threads, and the lock may be held by one of them."""
        self._lock = threading.Lock()
        self._in_burst = False
        active_calls.clear()
        if self._wanted:
            self._wanted.clear()
            sys.setswitchinterval(self._before)


switch_intervals: Final = _SwitchIntervals()
os.register_at_fork(after_in_child=switch_intervals.reset_after_fork)


def _in_a_call(now: float) -> bool:
    began = active_calls[-1:]
    return bool(began) and now - began[0] < _LONGEST_CALL_S
