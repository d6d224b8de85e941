"""Where a race takes place: an emulated network or, to try the benchmark itself, loopback."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from netstorm.topology.network import Network
from systems.base import Case
from systems.ports import NamespacePorts, loopback_port

__all__ = ["DROPPED", "Place", "emulated", "on_loopback"]


DROPPED = " dropped"
"""Behind a link's name: segments that found the queue full, or were lost by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A network that programs can be started on."""

    hosts: tuple[str, ...]
    """Address of each rank; empty: all on loopback."""
    free_port: Callable[[int], int]
    """Returns a TCP port that is free beside a rank."""
    command: Callable[[int, Sequence[str]], list[str]]
    """Makes a command run beside a rank."""
    carried: Callable[[], Mapping[str, int]]
    """Returns the bytes that each link has carried and, under its name and `DROPPED`, segments it has not."""
    start_changes: Callable[[], None]
    """Has the network's changes count from now on."""
    backend: str
    congestion: str

    def located(self, case: Case) -> Case:
        """Return a case with its ranks on this network."""
        return replace(case, hosts=self.hosts, free_port=self.free_port)


@contextlib.contextmanager
def emulated(network: Network, options: argparse.Namespace) -> Iterator[Place]:
    """Have the network emulated; everything of it is gone afterwards.

    Raises:
        NetStormError: it cannot be; says what is missing.
    """
    from netstorm.lab.emulation.namespaces import inside  # noqa: PLC0415 - loopback needs none of it
    from netstorm.lab.emulation.wan import Wan  # noqa: PLC0415

    wan = Wan.up(network, backend=options.backend, congestion=options.congestion, start_changes=False)
    with wan:

        def carried() -> dict[str, int]:
            links = wan.status()
            counts = {f"{link.source}→{link.target}": link.bytes for link in links}
            gone = {f"{link.source}→{link.target}{DROPPED}": link.dropped + link.lost for link in links}
            return counts | gone

        yield Place(
            hosts=tuple(wan.address(rank) for rank in network.ranks),
            free_port=NamespacePorts(lambda rank: inside(wan.namespace(network.ranks[rank]))),
            command=lambda rank, argv: wan.command(network.ranks[rank], argv),
            carried=carried,
            start_changes=wan.start_changes,
            backend=wan.backend,
            congestion=wan.congestion,
        )


@contextlib.contextmanager
def on_loopback(
    _network: Network | None = None, _options: argparse.Namespace | None = None
) -> Iterator[Place]:
    """Leave everything on 127.0.0.1, where links have no limits and no bytes are counted."""
    yield Place(
        hosts=(),
        free_port=loopback_port,
        command=lambda _rank, argv: list(argv),
        carried=dict,
        start_changes=lambda: None,
        backend="loopback: links are NOT emulated",
        congestion="the system's",
    )
