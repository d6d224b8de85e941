"""Links made by the kernel's own queueing disciplines: see `netem` for the commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any, Final

from netstorm.emulation.layout import Cable, Layout
from netstorm.emulation.links.netem import needs_netem, shaping_commands, veth_commands
from netstorm.emulation.namespaces import batch
from netstorm.emulation.reports import Counters, LinkCounters
from netstorm.errors import UsageError
from netstorm.topology.network import Link, Rank, changed_link

__all__ = ["KernelLinks", "has_netem", "kernel_obstacle"]


def has_netem(namespace: str) -> bool:
    """Return whether the kernel has netem, by a try on the loopback device of one of our namespaces."""
    try:
        batch("tc", namespace, ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
    except UsageError:
        return False
    return True


def kernel_obstacle(layout: Layout, *, netem: bool) -> str | None:
    """Return why the kernel alone cannot emulate a network, as text; None: it can."""
    network = layout.network
    capped = [node.rank for node in network.nodes if node.egress is not None or node.ingress is not None]
    if capped:
        return f"rank {capped[0]} has an access cap, which spans its links"
    if not netem and (any(map(needs_netem, network.links)) or network.changes):
        return "this kernel has no netem"
    return None


class KernelLinks:
    """All links of a network as veth pairs with netem and HTB."""

    name: Final = "netem"

    def __init__(self, layout: Layout, *, with_netem: bool) -> None:
        """Plan the links; `make` makes them."""
        self._layout: Final = layout
        self._with_netem: Final = with_netem
        self._links: Final = {(link.source, link.target): link for link in layout.network.links}

    def device(self, cable: Cable, rank: Rank) -> str:
        """Return the name of a cable's device in a rank's namespace."""
        return cable.device(rank)

    def make(self) -> None:
        """Make the devices and their queues."""
        layout = self._layout
        commands: list[str] = []
        for cable in layout.cables():
            ends = (cable.low, cable.high)
            commands += veth_commands(
                (layout.namespace(ends[0]), layout.namespace(ends[1])),
                (self.device(cable, ends[0]), self.device(cable, ends[1])),
            )
        batch("ip", None, commands)
        for rank in layout.network.ranks:
            devices = [
                self.device(cable, rank) for cable in layout.cables() if rank in (cable.low, cable.high)
            ]
            batch("ip", layout.namespace(rank), [f"link set {device} up" for device in devices])
            shaping: list[str] = []
            for link in layout.network.links:
                if link.source == rank:
                    shaping += shaping_commands(link, self._device(link), with_netem=self._with_netem)
            batch("tc", layout.namespace(rank), shaping)

    def _device(self, link: Link) -> str:
        low, high = sorted((link.source, link.target))
        return self.device(Cable(low, high), link.source)

    def set(self, link: Link, values: Mapping[str, float]) -> None:
        """Give a direction new values: any of rate (bit/s), latency (s) and loss (a fraction)."""
        now = changed_link(self._links[link.source, link.target], values)
        if needs_netem(now) and not self._with_netem:
            raise UsageError(f"link {link}: latency and loss need netem, which this kernel lacks")
        self._links[link.source, link.target] = now
        commands = shaping_commands(now, self._device(now), change=True, with_netem=self._with_netem)
        batch("tc", self._layout.namespace(link.source), commands)

    def counters(self) -> Counters:
        """Return the traffic of all links.

        The drops of netem, the root, include those of the bounded queue below it: their difference is what
        was lost by chance.
        """
        links: dict[str, LinkCounters] = {}
        for rank in self._layout.network.ranks:
            namespace = self._layout.namespace(rank)
            done = subprocess.run(
                ["tc", "-n", namespace, "-s", "-j", "qdisc", "show"],
                capture_output=True,
                text=True,
                check=False,
            )
            queues = json.loads(done.stdout or "[]")
            by_device: dict[str, dict[str, Any]] = {}
            for queue in queues:
                by_device.setdefault(queue["dev"], {})[queue["kind"]] = queue
            for link in self._layout.network.links:
                if link.source == rank:
                    kinds = by_device.get(self._device(link), {})
                    fifo, netem = kinds.get("bfifo", {}), kinds.get("netem", {})
                    dropped = int(fifo.get("drops", 0))
                    links[f"{link.source}-{link.target}"] = {
                        "packets": int(fifo.get("packets", 0)),
                        "bytes": int(fifo.get("bytes", 0)),
                        "dropped": dropped,
                        "lost": max(0, int(netem.get("drops", 0)) - dropped) if netem else 0,
                    }
        return {"links": links, "relays": []}

    def ended_relay(self) -> int | None:
        """Return None: there are no relays."""
        return None

    def close(self) -> None:
        """Do nothing: the devices go with their namespaces."""
