"""The layout of an emulated network: names, addresses, devices, routes, hosts files, and the commands that
make links of the kernel's queueing disciplines. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from netstorm.errors import UsageError
from netstorm.lab.emulation.shaping import buffer_bytes
from netstorm.topology.network import Link, Network, Rank, next_hops

__all__ = [
    "HOME_DEVICE",
    "MTU",
    "PREFIX",
    "Cable",
    "NetworkLayout",
    "Route",
    "checked_name",
    "needs_netem",
    "shaping_commands",
    "veth_commands",
]


# The layout of an emulated network: names, addresses, devices, routes and hosts files.
#
# Each rank has a network namespace with an address of IPv4 and one of IPv6, on a bridge device without ports
# (not on `lo`: some libraries, such as Gloo, use 127.0.0.1 if the address is on `lo`). Each link is a
# device in each of its two namespaces; routes to every rank point at the device towards it.

PREFIX: Final = "netstorm-"
"""Prefix of all our namespaces, by which the leftovers of a crash are recognised."""
HOME_DEVICE: Final = "wan0"
MTU: Final = 1500

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.]{0,31}")
_MOST_RANKS: Final = 254 * 256


@dataclass(frozen=True, slots=True)
class Cable:
    """Two ranks with a link between them, in one direction or both; `low` < `high`."""

    low: Rank
    high: Rank

    def device(self, rank: Rank) -> str:
        """Return the device's name at an end, which names the other end. At most 15 characters."""
        return f"to-r{self.high if rank == self.low else self.low}"

    def link_local(self, rank: Rank) -> str:
        """Return the IPv6 address of the device at an end, by which the other end names it as a next hop: a
        namespace does not answer for addresses of its other devices.
        """
        return "fe80::1" if rank == self.low else "fe80::2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A rank's route to `target`."""

    target: Rank
    via: Rank
    """The next neighbour; the target itself if it is linked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLayout:
    """The names, addresses and routes of one emulated network."""

    name: str
    network: Network

    def namespace(self, rank: Rank) -> str:
        """Return the name of a rank's namespace, as `ip netns` knows it."""
        return f"{PREFIX}{self.name}-r{rank}"

    def address(self, rank: Rank) -> str:
        """Return a rank's IPv4 address. Networks are isolated: two of them may use the same addresses."""
        if not 0 <= rank < min(self.network.size, _MOST_RANKS):
            raise UsageError(f"rank {rank}: the emulated network has ranks 0 to {self.network.size - 1}")
        return f"10.78.{rank // 254}.{rank % 254 + 1}"

    def ipv6_address(self, rank: Rank) -> str:
        """Return a rank's IPv6 address, of a private network (RFC 4193)."""
        self.address(rank)  # checks the rank
        return f"fd4e:5354::{rank + 1:x}"

    def cables(self) -> tuple[Cable, ...]:
        """Return all pairs of ranks with a link, in order."""
        pairs = {
            (min(link.source, link.target), max(link.source, link.target)) for link in self.network.links
        }
        return tuple(Cable(Rank(low), Rank(high)) for low, high in sorted(pairs))

    def routes(self) -> tuple[tuple[Route, ...], ...]:
        """Return each rank's routes: fewest hops, as `Network.route` has them under underlay routing."""
        targets: list[list[Rank]] = [[] for _ in self.network.nodes]
        for link in self.network.links:
            targets[link.source].append(link.target)
        hops = next_hops(targets)
        return tuple(
            tuple(
                Route(target=target, via=Rank(hops[target][rank]))
                for target in self.network.ranks
                if target != rank and hops[target][rank] >= 0
            )
            for rank in self.network.ranks
        )

    def hosts(self, rank: Rank, hostname: str) -> str:
        """Return the hosts file of a rank's namespace: names of all ranks, and the machine's own name for it.

        The name r3 comes first in its line, so that the address resolves back to it. r3v6 is the one of IPv6;
        r3 has none, since programs would prefer it. The machine's name means this rank: libraries that
        announce the address of their host name (Gloo, MPI) then announce this one.
        """
        lines = ["127.0.0.1 localhost"]
        for node in self.network.nodes:
            names = [f"r{node.rank}"]
            if node.rank == rank and hostname not in {"", "localhost"}:
                names.append(hostname)
            lines.append(f"{self.address(node.rank)} {' '.join(names)}")
            lines.append(f"{self.ipv6_address(node.rank)} r{node.rank}v6")
        return "\n".join(lines) + "\n"


def checked_name(name: str) -> str:
    """Return `name` if it is allowed as the name of an emulated network.

    Raises:
        UsageError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the name {name!r} of an emulated network: expected at most 32 of a-z, 0-9, _ and ., "
            "a letter or digit first"
        )
    return name


# Commands for links of the kernel: veth pairs, HTB for the rate, netem for latency and loss.
#
# At the sending end netem adds latency and loss; its child HTB sends at the rate, from a bounded queue. A
# link without latency and loss needs HTB alone. Segmentation offload is off, or netem would lose 64 KiB at
# a time.

_BURST: Final = 16_000
"""Bytes that HTB may send at once: 1 ms at 128 Mbit/s."""
_SPARE_PACKETS: Final = 1000


def needs_netem(link: Link) -> bool:
    """Return whether HTB alone cannot emulate a link."""
    return link.latency > 0 or link.loss > 0


def veth_commands(namespaces: tuple[str, str], devices: tuple[str, str]) -> list[str]:
    """Return `ip` commands that connect two namespaces by a pair of devices."""
    ends = [
        f"name {device} netns {namespace} mtu {MTU} gso_max_segs 1"
        for namespace, device in zip(namespaces, devices, strict=True)
    ]
    return [f"link add {ends[0]} type veth peer {ends[1]}"]


def shaping_commands(link: Link, device: str, *, change: bool = False, with_netem: bool = True) -> list[str]:
    """Return `tc` commands that give a device, at the sending end, the link's rate, latency and loss.

    Args:
        link: the values.
        device: name at the sending end.
        change: change existing queues, which keep their packets.
        with_netem: False if the kernel lacks it; then the link must not need it.
    """
    verb = "change" if change else "add"
    rate = f"rate {link.rate:.0f}bit ceil {link.rate:.0f}bit burst {_BURST} cburst {_BURST}"
    commands = []
    parent = "root"
    if with_netem:
        in_flight = int(link.rate / 8 * link.latency / MTU) + _SPARE_PACKETS
        values = f"delay {link.latency * 1e6:.0f}us loss {link.loss * 100:.7f}% limit {in_flight}"
        commands.append(f"qdisc {verb} dev {device} root handle 1: netem {values}")
        parent = "parent 1:1"
    if not change:
        commands.append(f"qdisc add dev {device} {parent} handle 2: htb default 1")
    commands.append(f"class {verb} dev {device} parent 2: classid 2:1 htb {rate}")
    commands.append(f"qdisc {verb} dev {device} parent 2:1 handle 3: bfifo limit {buffer_bytes(link.rate)}")
    return commands
