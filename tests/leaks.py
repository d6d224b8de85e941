"""What a test may leave behind: nothing. Two censuses find threads, processes and ZeroMQ contexts."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 20.0
"""How long a thread or child that is already ending may take to be gone, on a busy machine."""


@dataclass(frozen=True)
class Census:
    """What was alive at a moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]
    files: int

    @classmethod
    def take(cls) -> Census:
        return cls(frozenset(_threads()), frozenset(_children()), _open_files())

    def leaked_since(self) -> list[str]:
        """Return what is alive now and was not then, in words, and end what can be ended."""
        return [*self._leaked_threads(), *self._leaked_children(), *self._leaked_contexts()]

    def _leaked_threads(self) -> list[str]:
        leaked = []
        for thread in _threads() - self.threads:
            thread.join(GRACE_S)
            if thread.is_alive():
                leaked.append(f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}")
        return leaked

    def _leaked_children(self) -> list[str]:
        deadline = time.monotonic() + GRACE_S
        while (new := _children() - self.children) and time.monotonic() < deadline:
            time.sleep(0.01)  # not psutil's wait, which would take the exit status from whoever asks for it
        leaked = [f"process {child.pid}: {_command_line(child)}" for child in new]
        for child in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return leaked

    def _leaked_contexts(self) -> list[str]:
        # Walking all objects takes tens of ms beside MXNet; sockets hold files, so most tests are spared it.
        if "zmq" not in sys.modules or _open_files() <= self.files:
            return []
        gc.collect()
        leaked = _open_contexts()
        for context in leaked:
            context.destroy(linger=0)
        return [f"ZeroMQ context {context!r}" for context in leaked]


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _threads() -> set[threading.Thread]:
    # A dummy stands for a thread that Python did not start, such as MXNet's workers, and stays for ever.
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _children() -> set[psutil.Process]:
    tracker = getattr(
        multiprocessing.resource_tracker._resource_tracker, "_pid", None
    )  # lives as long as we do
    found = set()
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return {
        child
        for child in found
        if child.pid != tracker and _status(child) not in {psutil.STATUS_ZOMBIE, None}
    }


def _descendants(pid: int) -> list[int]:
    """Return the numbers of a process's children, and of theirs.

    The kernel lists a thread's children. psutil reads the entry of every process of the machine instead: 3 ms
    before each test and 3 ms after it.
    """
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found += [int(child) for child in thread.read_text().split()]
    return found + [further for child in found for further in _descendants(child)]


def _status(child: psutil.Process) -> str | None:
    try:
        return str(child.status())
    except psutil.NoSuchProcess:
        return None


def _command_line(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return "gone"


def _open_contexts() -> list[Any]:
    import zmq

    return [thing for thing in gc.get_objects() if type(thing) is zmq.Context and not thing.closed]
