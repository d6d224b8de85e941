"""Closes the sockets that a forked child inherits from a process with a van.

The child cannot use them, and keeping them would keep connections open for a parent that has died. Python's
and ZeroMQ's objects are left alone: their locks and threads did not survive the fork. libzmq does not tell
which descriptors are its own, so they are recognised by their addresses.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ["Abandonable", "abandon_after_fork", "close_inherited"]

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
