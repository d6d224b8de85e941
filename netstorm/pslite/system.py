"""What the transport needs of Python and Linux: interpreter lock, fork, allocator, timers."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from netstorm import clock

__all__ = [
    "SHORT_CALL",
    "Abandonable",
    "ShortCall",
    "TimerFd",
    "abandon_after_fork",
    "active_calls",
    "close_inherited",
    "keep_freed_memory",
    "memory_bytes",
    "switch_intervals",
    "usable_processors",
    "yield_to_call",
]


# Which thread holds the interpreter lock: the switch interval, and how threads yield to a short call.
#
# A busy Python thread releases the interpreter lock only when another thread asks for it, after a switch
# interval. At Python's 5 ms a stream of 1 MB chunks fell from 1635 to 92 MB/s (docs/design.md, section 4). So
# I/O threads shorten it.
#
# During a burst of calls on a store the interval is long instead. Each call takes a tenth of a ms. With a
# short interval one call in five would have to release the lock, and get it back only after the other thread
# has run: that takes ms where there are more threads than cores. The burst as a whole does not take longer.
#
# A call that has lost the lock nevertheless would wait for a whole interval, once for each thread before it:
# 10 to 25 ms were measured. So NetStorm's threads check whether a call is in progress, and then sleep for a
# moment, which releases the lock.

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


# Closes the sockets that a forked child inherits from a process with a van.
#
# The child cannot use them, and keeping them would keep connections open for a parent that has died. Python's
# and ZeroMQ's objects are left alone: their locks and threads did not survive the fork. libzmq does not tell
# which descriptors are its own, so they are recognised by their addresses.

_OWN_DESCRIPTORS: Final = Path("/proc/self/fd")


class Abandonable(Protocol):
    """An object that cannot be used in a forked child."""

    def abandon(self) -> None:
        """Release in the child what was inherited, without sending anything."""


_abandonables: Final[WeakSet[Abandonable]] = WeakSet()


def abandon_after_fork(abandonable: Abandonable) -> None:
    """Have `abandonable.abandon` called in every child that this process forks, while the object exists."""
    _abandonables.add(abandonable)


def _abandon_all() -> None:
    for abandonable in list(_abandonables):
        abandonable.abandon()
    _abandonables.clear()


os.register_at_fork(after_in_child=_abandon_all)


def close_inherited(port: int, remotes: set[tuple[str, int]]) -> None:
    """Close TCP sockets that listen on `port`, were accepted there, or are connected to one of `remotes`."""
    for entry in list(_OWN_DESCRIPTORS.iterdir()):
        if _matches(int(entry.name), port, remotes):
            os.close(int(entry.name))


def _matches(descriptor: int, port: int, remotes: set[tuple[str, int]]) -> bool:
    try:
        inherited = socket.socket(fileno=descriptor)
    except OSError:
        return False  # a file, or the directory just listed
    try:
        if inherited.type != socket.SOCK_STREAM or inherited.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if port and inherited.getsockname()[1] == port:
            return True
        with contextlib.suppress(OSError):  # not connected
            return inherited.getpeername()[:2] in remotes
        return False
    finally:
        inherited.detach()


# Makes the C library keep freed memory of messages, instead of returning it to the system.
#
# libzmq allocates each message and frees it soon afterwards, on another thread. By default glibc returns
# blocks of 256 KiB to the system at once, and every new block costs 64 page faults: a quarter of the
# processor time of an all-reduce (40 MB, three processes: 88 ms a node instead of 65;
# `benchmarks/loopback.py`).

# mallopt(3), from malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_KEPT_BYTES: Final = 128 * 2**20
"""Free memory at the top of the heap beyond this is returned to the system."""

_LARGEST_ON_HEAP: Final = 32 * 2**20
"""glibc's own upper limit on 64-bit systems (DEFAULT_MMAP_THRESHOLD_MAX)."""


def keep_freed_memory() -> None:
    """Configure the allocator for messages; a C library without mallopt (musl) stays as it is."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Return how much memory the processes of this machine, or of this container, may have."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no container's own (cgroup v2), or "max"
        return machine


# A timer that is a file descriptor (timerfd_create(2)), for event loops that only watch descriptors.
#
# Python has it from 3.13 on; here libc is called.

_CLOCK_MONOTONIC: Final = 1
_SOONEST_S: Final = 1e-6
"""0 would disarm the timer."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


_libc: Final = ctypes.CDLL(None, use_errno=True)


class TimerFd:
    """A one-shot timer: once armed, it becomes readable one time."""

    def __init__(self) -> None:
        """Make a timer that is not armed."""
        self._fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._fd

    def arm(self, seconds: float) -> None:
        """Become readable in `seconds`, at once if that is not positive; replaces an earlier setting."""
        fraction, whole = math.modf(max(seconds, _SOONEST_S))
        spec = _TimerSpec(value=_TimeSpec(int(whole), int(fraction * 1e9) or int(whole == 0)))
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def take(self) -> bool:
        """Return whether it has gone off since the last call; afterwards it is not readable."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._fd, 8))
        return False

    def close(self) -> None:
        """Close the descriptor; it must not be watched any more. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# Processors.


def usable_processors() -> int:
    """Return on how many processors this process may run (taskset, Slurm, containers with cpusets)."""
    return len(os.sched_getaffinity(0))
