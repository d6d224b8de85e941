"""Datagrams between simulated processes, on a network that loses, doubles, delays and changes them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from netstorm.lab.simulation.memory_network import MemoryNetwork
from netstorm.pslite.datagram.lanes import Packet

__all__ = ["MemoryPackets", "PacketFaults", "PacketNetwork"]

_FLOWS: Final = 1 << 41
"""Flow numbers from here on are those of packets. They are even, as those of data that leaves an opener."""

_RECORDED: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketFaults:
    """What happens to packets, each with a probability of its own."""

    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    """One byte changes."""
    late: float = 0.0
    """It comes up to `late_s` later than those that left after it."""
    late_s: float = 0.05


class PacketNetwork:
    """All packets of one cluster.

    Attributes:
        faults: may be changed at any time.
        lost: packets that did not arrive.
        recorded: the last packets that did, as somebody on the way sees them.
    """

    def __init__(self, network: MemoryNetwork, faults: PacketFaults | None = None, *, seed: int = 0) -> None:
        """Begin without sockets."""
        self.faults = faults or PacketFaults()
        self.lost = 0
        self.recorded: Final[deque[bytes]] = deque(maxlen=_RECORDED)
        self._network: Final = network
        self._random: Final = random.Random(f"packets {seed}")
        self._sockets: Final[dict[tuple[str, int], MemoryPackets]] = {}
        self._flows: Final[dict[tuple[str, str], int]] = {}

    def open(self, host: str, channels: int, wake: Callable[[], None]) -> MemoryPackets:
        """Return sockets at a host; `wake` is called whenever something has come."""
        first = 30_000 + len(self._sockets)
        made = MemoryPackets(self, host, tuple(range(first, first + channels)), wake)
        self._sockets.update(dict.fromkeys(((host, port) for port in made.ports), made))
        return made

    def sockets(self) -> list[MemoryPackets]:
        """Return those of all processes."""
        return list(dict.fromkeys(self._sockets.values()))

    def send(self, source: str, port: int, target: tuple[str, int], data: bytes) -> None:
        """Deliver a packet later, twice, or not at all, as the faults decide."""
        chance, faults = self._random, self.faults
        if chance.random() < faults.loss or self._network.is_cut(source, target[0]):
            self.lost += 1
            return
        for _ in range(2 if chance.random() < faults.duplicate else 1):
            if chance.random() < faults.corrupt:
                place = chance.randrange(len(data))
                data = data[:place] + bytes((data[place] ^ chance.randrange(1, 256),)) + data[place + 1 :]
            self._carry(source, port, target, data, chance.random() < faults.late)

    def _carry(self, source: str, port: int, target: tuple[str, int], data: bytes, late: bool) -> None:  # noqa: FBT001
        flow = self._flows.setdefault((source, target[0]), _FLOWS + 2 * len(self._flows))
        extra_s = self._random.uniform(0, self.faults.late_s) if late else 0.0

        def arrive() -> None:
            sockets = self._sockets.get(target)
            if sockets is not None:
                self.recorded.append(data)
                sockets.deliver(Packet(target[1] - sockets.ports[0], data, source, port))

        def arrived() -> None:
            self._network.timeline.after(extra_s, arrive)

        self._network.link_model.carry(flow, source, target[0], len(data) + 28, arrived)


class MemoryPackets:
    """The sockets of one simulated process's lanes.

    Attributes:
        ports: those of its channels.
        marks: code points of the packets that were sent, and how many had each.
    """

    def __init__(
        self, network: PacketNetwork, host: str, ports: tuple[int, ...], wake: Callable[[], None]
    ) -> None:
        """See `PacketNetwork.open`."""
        self.ports = ports
        self.marks: Final[dict[int, int]] = {}
        self._network: Final = network
        self._host: Final = host
        self._wake: Final = wake
        self._arrived: list[Packet] = []

    def transmit(self, channel: int, packet: bytes, host: str, port: int, dscp: int) -> None:
        """Send a packet."""
        self.marks[dscp] = self.marks.get(dscp, 0) + 1
        self._network.send(self._host, self.ports[channel], (host, port), packet)

    def take(self) -> list[Packet]:
        """Return what has come since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def deliver(self, packet: Packet) -> None:
        """Receive a packet from the network."""
        self._arrived.append(packet)
        self._wake()
