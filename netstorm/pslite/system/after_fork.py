"""What a forked child does with the sockets that it inherits from a process with a van: closes them.

It could not use them, and keeping them would keep connections open for a parent that has died. Python's and
ZeroMQ's objects are left alone: what they hold (locks, threads) did not survive the fork. libzmq does not say
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
    """Something that is of no use in a forked child."""

    def abandon(self) -> None:
        """In the child: give up what was inherited, without a word to anybody outside."""


_heirs: Final[WeakSet[Abandonable]] = WeakSet()


def abandon_after_fork(heir: Abandonable) -> None:
    """Have `heir.abandon` called in every child that this process forks, as long as `heir` lives."""
    _heirs.add(heir)


def _abandon_all() -> None:
    for heir in list(_heirs):
        heir.abandon()
    _heirs.clear()


os.register_at_fork(after_in_child=_abandon_all)


def close_inherited(port: int, remotes: set[tuple[str, int]]) -> None:
    """Close TCP sockets that listen on `port`, were accepted there, or are connected to one of `remotes`."""
    for entry in list(_OWN_DESCRIPTORS.iterdir()):
        if _is_ours(int(entry.name), port, remotes):
            os.close(int(entry.name))


def _is_ours(descriptor: int, port: int, remotes: set[tuple[str, int]]) -> bool:
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
