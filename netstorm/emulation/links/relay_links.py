"""Links emulated by relays: a TUN device at each end, and processes that carry packets between them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from netstorm.emulation.layout import MTU, Cable, Layout
from netstorm.emulation.links.relay import Cap, Direction, Relay
from netstorm.emulation.links.shaping import Shaper
from netstorm.emulation.namespaces import batch, open_tun
from netstorm.emulation.process_setup import detach_standard_streams, raise_priority
from netstorm.emulation.reports import Counters, LinkCounters, RelayAnswer, RelayUse
from netstorm.errors import UsageError
from netstorm.topology.network import Link, Rank

__all__ = ["RelayLinks"]

_SHARED_RATE: Final = 4e9
"""Sum of all rates in bit/s above which two relays share the links: about what one core carries."""
_ANSWER_S: Final = 5.0
_QUEUE_PACKETS: Final = 1000
"""Queue of a TUN device towards the relay: it fills only while the relay does not run."""


@dataclass(slots=True)
class _Child:
    pid: int
    control: socket.socket
    keys: frozenset[str]


class RelayLinks:
    """All links of a network, carried by one or two relay processes."""

    name: Final = "relay"

    def __init__(self, layout: Layout) -> None:
        """Plan the links; `make` makes them."""
        self._layout: Final = layout
        self._children: Final[list[_Child]] = []

    def device(self, cable: Cable, rank: Rank) -> str:
        """Return the name of a cable's device in a rank's namespace."""
        return cable.device(rank)

    def make(self) -> None:
        """Make the devices, and start the relays."""
        network = self._layout.network
        links = {(link.source, link.target): link for link in network.links}
        ends: dict[tuple[Rank, Rank], int] = {}
        try:
            for cable in self._layout.cables():
                for here, there in ((cable.low, cable.high), (cable.high, cable.low)):
                    ends[here, there] = open_tun(self._layout.namespace(here), self.device(cable, here))
            for rank in network.ranks:
                devices = [
                    self.device(cable, rank)
                    for cable in self._layout.cables()
                    if rank in (cable.low, cable.high)
                ]
                batch(
                    "ip",
                    self._layout.namespace(rank),
                    [f"link set {name} mtu {MTU} txqueuelen {_QUEUE_PACKETS} up" for name in devices],
                )
            for group in self._groups():
                self._start([(links[key], ends[key], ends[key[1], key[0]]) for key in group if key in links])
        finally:
            for descriptor in ends.values():
                os.close(descriptor)

    def _groups(self) -> list[list[tuple[Rank, Rank]]]:
        """Return the directions of each relay. Links that share an access cap need the same relay: with caps,
        one.
        """
        network = self._layout.network
        cables = self._layout.cables()
        capped = any(node.egress or node.ingress for node in network.nodes)
        total = sum(link.rate for link in network.links)
        parts = [cables] if capped or total <= _SHARED_RATE else [cables[::2], cables[1::2]]
        return [
            [pair for one in part for pair in ((one.low, one.high), (one.high, one.low))]
            for part in parts
            if part
        ]

    def _start(self, links: Sequence[tuple[Link, int, int]]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_S)
        theirs.setblocking(False)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)  # a relay ends with its control channel
                ours.close()
                detach_standard_streams()
                for child in self._children:
                    child.control.close()
                raise_priority()
                Relay(self._directions(links), theirs).run()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        keys = frozenset(f"{link.source}-{link.target}" for link, _, _ in links)
        self._children.append(_Child(pid, ours, keys))

    def _directions(self, links: Sequence[tuple[Link, int, int]]) -> list[Direction]:
        caps: dict[tuple[Rank, bool], Cap] = {}
        for node in self._layout.network.nodes:
            for outwards, rate in ((True, node.egress), (False, node.ingress)):
                if rate is not None:
                    ipv6 = socket.inet_pton(socket.AF_INET6, self._layout.ipv6_address(node.rank))
                    addresses = frozenset({socket.inet_aton(self._layout.address(node.rank)), ipv6})
                    shaper = Shaper(rate=rate, latency=0.0, loss=0.0, random=Random())
                    caps[node.rank, outwards] = Cap(addresses, shaper)
        return [
            Direction(
                key=f"{link.source}-{link.target}",
                reads=reads,
                writes=writes,
                shaper=Shaper(rate=link.rate, latency=link.latency, loss=link.loss, random=Random()),
                egress=caps.get((link.source, True)),
                ingress=caps.get((link.target, False)),
            )
            for link, reads, writes in links
        ]

    def set(self, link: Link, values: Mapping[str, float]) -> None:
        """Give a direction new values: any of rate (bit/s), latency (s) and loss (a fraction)."""
        key = f"{link.source}-{link.target}"
        for child in self._children:
            if key in child.keys:
                child.control.send(json.dumps({"link": key, "set": values}).encode())

    def counters(self) -> Counters:
        """Return the traffic of all links and the processor time of the relays."""
        links: dict[str, LinkCounters] = {}
        relays: list[RelayUse] = []
        for child in self._children:
            child.control.send(b"{}")
            try:
                answer: RelayAnswer = json.loads(child.control.recv(1 << 22))
            except (TimeoutError, ValueError) as error:
                raise UsageError(f"the relay (process {child.pid}) does not answer") from error
            links.update(answer["links"])
            relays.append({"pid": answer["pid"], "cpu_s": answer["cpu_s"]})
        return {"links": links, "relays": relays}

    def ended_relay(self) -> int | None:
        """Return the process id of a relay that has ended unexpectedly; None: all run."""
        for child in self._children:
            pid, _ = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._children.remove(child)
                return pid
        return None

    def close(self) -> None:
        """End the relays, which removes their devices. Twice does no harm."""
        for child in self._children:
            child.control.close()
        for child in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        self._children.clear()
