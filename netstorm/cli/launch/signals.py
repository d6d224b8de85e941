"""Turns the signals that concern a job into bytes on a descriptor, which a poll can wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["signals_to_descriptor"]


@contextmanager
def signals_to_descriptor() -> Iterator[int]:
    """Yield a descriptor that gets the number of each signal; restore the handlers at the end."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    before_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        # A signal that is ignored stays ignored: nohup, or a shell that runs us in the background, wants
        # that.
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _do_nothing)
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(woken)
        os.close(wake)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal: the wake-up descriptor already has its number."""
