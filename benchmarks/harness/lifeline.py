"""Ends a child process when the one that started it is gone, whatever the child is doing."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator

__all__ = ["commands_from_stdin", "die_with_stdin"]

EXIT_ORPHANED = 3
GRACE_S = 5.0
"""How long a child may take to end by itself once its standard input is closed."""


def commands_from_stdin() -> queue.SimpleQueue[str | None]:
    """Return a queue of the lines of standard input; at the end None, and `GRACE_S` to go."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in _lines():
            lines.put(line)
        lines.put(None)
        time.sleep(GRACE_S)
        _end_children()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=read, name="lifeline", daemon=True).start()
    return lines


def die_with_stdin() -> None:
    """End this process as soon as its standard input is closed; for one that takes no commands."""

    def wait() -> None:
        for _line in _lines():
            pass
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _end_children() -> None:
    """Kill what a system has started for itself, and which would outlive this process."""
    import psutil  # noqa: PLC0415 - 10 ms of a processor at each start

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _lines() -> Iterator[str]:
    # Not sys.stdin: Python's shutdown aborts if a daemon thread holds the lock of sys.stdin.
    rest = b""
    while got := os.read(0, 4096):
        *lines, rest = (rest + got).split(b"\n")
        for line in lines:
            yield line.decode()
