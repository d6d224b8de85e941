"""Who runs Python when: the one interpreter lock of a process, its I/O thread's needs and a script's calls.

A busy Python thread gives the interpreter lock away only when asked to, after a switch interval: at Python's
5 ms a stream of 1 MB chunks fell from 1635 to 92 MB/s (design, section 4). So I/O threads shorten it.

During a burst of calls on a store it is long instead. Each of them takes a tenth of a ms, and one in five
would be asked for the lock, and get it back only when the system has run whoever asked: ms, where there are
more threads than cores. The whole burst takes no longer for it.

A call that has lost the lock nevertheless would wait for it for a whole interval, once for each thread that
is before it: 10 to 25 ms were seen. So our threads look whether they run in the middle of a call, and if
so sleep for a moment, which gives the lock back.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import Final

from netstorm import clock

__all__ = ["SHORT_CALL", "ShortCall", "calls", "give_way", "intervals"]

_BURST_INTERVAL_S: Final = (0.005, 0.02)
"""The switch interval during a burst of calls, at least and at most: what is more than the burst takes is
lost where the script is busy in Python next, and 160 keys take half of the longest."""

_OF_LAST_BURST: Final = 1.5
"""It is so many times as long as the last burst was: the next has the same keys."""

_BURST_ENDS_S: Final = 0.002
"""Without a call for so long a burst is over."""

_LONGEST_CALL_S: Final = 0.01
"""For so long a call is let go first. One that takes longer waits for something, maybe for the I/O thread."""

_GIVES_WAY_S: Final = 50e-6

calls: Final[list[float]] = []
"""When each of the short calls began that threads are in now, in s. To append and to pop takes no lock."""


def give_way() -> None:
    """Let a short call go on that this thread runs in the middle of. Call it if there are any `calls`, from a
    thread that is in none.
    """
    if _in_a_call(clock.monotonic()):
        clock.sleep(_GIVES_WAY_S)


class ShortCall:
    """A call that must be short, and probably more follow at once: a context manager, of which one is enough
    for all.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        now = clock.monotonic()
        calls.append(now)
        intervals.expect_burst(now)

    def __exit__(self, *_: object) -> None:
        del calls[-1:]  # in a child that was forked in a call there is none


SHORT_CALL: Final = ShortCall()


class _SwitchIntervals:
    """Keeps the interpreter's thread switch interval at the smallest that anybody wants, or at that of a
    burst of calls, and restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[object, float] = {}
        self._before = 0.0
        self._first_call = self._last_call = 0.0
        self._burst_interval = max(_BURST_INTERVAL_S)
        self._in_burst = False

    def expect_burst(self, now: float) -> None:
        """Let the calling thread keep the lock, if it wants, until it has not called this for a while."""
        self._last_call = now
        if not self._in_burst and self._wanted:
            self._in_burst = True
            self._first_call = now
            sys.setswitchinterval(self._burst_interval)

    def look(self, now: float) -> float:
        """End a burst that is over; return after how long it is to be looked again, in s."""
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

    def add(self, who: object, interval_s: float | None) -> None:
        """Change it while `who` lives."""
        if interval_s is None:
            return
        with self._lock:
            if not self._wanted:
                self._before = sys.getswitchinterval()
            self._wanted[who] = interval_s
            sys.setswitchinterval(min(self._wanted.values()))

    def remove(self, who: object) -> None:
        """Go back to what the others want, or to what it was."""
        with self._lock:
            if self._wanted.pop(who, None) is not None:
                self._in_burst = False
                sys.setswitchinterval(min(self._wanted.values(), default=self._before))

    def forked(self) -> None:
        """In a child, which has none of the threads, and maybe somebody else's lock."""
        self._lock = threading.Lock()
        self._in_burst = False
        calls.clear()
        if self._wanted:
            self._wanted.clear()
            sys.setswitchinterval(self._before)


intervals: Final = _SwitchIntervals()
os.register_at_fork(after_in_child=intervals.forked)


def _in_a_call(now: float) -> bool:
    began = calls[-1:]
    return bool(began) and now - began[0] < _LONGEST_CALL_S
