"""Commands for links of the kernel: veth pairs, HTB for the rate, netem for latency and loss. Pure.

At the sending end netem adds latency and loss; its child HTB sends at the rate, from a bounded queue. A link
without latency and loss needs HTB alone. Segmentation offload is off, or netem would lose 64 KiB at a time.
"""

from __future__ import annotations

from typing import Final

from netstorm.emulation.layout import MTU
from netstorm.emulation.links.shaping import buffer_bytes
from netstorm.topology.network import Link

__all__ = ["needs_netem", "shaping_commands", "veth_commands"]

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
