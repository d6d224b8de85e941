"""TCP ports for the jobs that benchmarks start: on loopback, and in the namespaces of an emulated network."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

__all__ = ["NamespacePorts", "loopback_port"]

_PORTS: Final = range(21_000, 32_000, 2)
"""Below what Linux gives to outgoing connections, so a port that is free stays free until the job starts."""


def loopback_port(_rank: int) -> int:
    """Return a TCP port of this machine that is free, any of many: other jobs take some at the same time."""
    return next(port for port in random.sample(_PORTS, len(_PORTS)) if _is_free(port) and _is_free(port + 1))


class NamespacePorts:
    """Ports in namespaces. Each is handed out once, and the one after it is free, too.

    A scheduler of NetStorm shows its status at the port after its own, and stays alive beside the system that
    gets the next port.
    """

    def __init__(self, inside: Callable[[int], AbstractContextManager[None]]) -> None:
        """Begin with all ports; `inside` puts this thread into a rank's namespace."""
        self._inside: Final = inside
        self._ports: Final[Iterator[int]] = iter(_PORTS)

    def __call__(self, rank: int) -> int:
        """Return a TCP port that nothing uses in a rank's namespace.

        Raises:
            RuntimeError: there is none left; says beside which rank.
        """
        with self._inside(rank):
            for port in self._ports:
                if _is_free(port) and _is_free(port + 1):
                    return port
        raise RuntimeError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1} beside rank {rank}")


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("", port))
        return True
    return False
