"""Builds an emulated network: namespaces, addresses, links by one of the backends, routes, hosts files."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final, TypeAlias

from netstorm.emulation.layout import HOME_DEVICE, Cable, Layout
from netstorm.emulation.links.kernel_links import KernelLinks, has_netem, kernel_obstacle
from netstorm.emulation.links.relay_links import RelayLinks
from netstorm.emulation.namespaces import HOSTS_FOLDER, batch, write_sysctl
from netstorm.errors import UsageError
from netstorm.topology.network import Rank

__all__ = ["BACKENDS", "Links", "available_congestion_controls", "build"]

Links: TypeAlias = RelayLinks | KernelLinks
BACKENDS: Final = ("auto", "netem", "relay")

_SYSCTLS: Final = {
    "net.ipv4.ip_forward": "1",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    "net.ipv6.conf.all.forwarding": "1",
    "net.ipv6.conf.default.accept_dad": "0",
    # Devices get no addresses by themselves, and ask for no router: that would be traffic on the links.
    "net.ipv6.conf.default.addr_gen_mode": "1",
    "net.ipv6.conf.default.router_solicitations": "0",
    "net.ipv4.tcp_no_metrics_save": "1",  # a connection must not begin with the metrics of another one
    # Super-packets of at least 8 kB at an RTT of 60 ms, not of 1 ms of the rate: a relay's work is by packet.
    "net.ipv4.tcp_tso_rtt_log": "14",
    "net.ipv4.tcp_wmem": "4096 65536 33554432",  # a rate of 500 Mbit/s over an RTT of 300 ms holds 19 MB
    "net.ipv4.tcp_rmem": "4096 131072 33554432",
}


def available_congestion_controls() -> list[str]:
    """Return the congestion controls that this kernel has."""
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def build(layout: Layout, *, backend: str, congestion: str) -> tuple[Links, str, str]:
    """Build a network.

    If it fails, the caller removes what was built so far, by its names.

    Returns:
        The links; why this backend, as text; how the congestion control is set: "sysctl" or "routes".

    Raises:
        UsageError: the kernel refuses a command, or lacks the backend or congestion control.
    """
    available = available_congestion_controls()
    if available and congestion not in available:
        raise UsageError(
            f"congestion control {congestion!r}: this kernel has {', '.join(available)} "
            f"(modprobe tcp_{congestion} may add it)"
        )
    names = [layout.namespace(rank) for rank in layout.network.ranks]
    batch("ip", None, [f"netns add {name}" for name in names])
    links, why = _links(layout, backend, names[0])
    pinned = True
    for rank, name in zip(layout.network.ranks, names, strict=True):
        for sysctl, value in _SYSCTLS.items():
            write_sysctl(name, sysctl, value)
        pinned &= write_sysctl(name, "net.ipv4.tcp_congestion_control", congestion)
        batch(
            "ip",
            name,
            [
                "link set lo up",
                f"link add {HOME_DEVICE} type bridge",
                f"address add {layout.address(rank)}/32 dev {HOME_DEVICE}",
                *(
                    [f"address add {layout.ipv6_address(rank)}/128 dev {HOME_DEVICE} nodad"]
                    if _has_ipv6()
                    else []
                ),
                f"link set {HOME_DEVICE} up",
            ],
        )
    links.make()
    _make_routes(layout, links, "" if pinned else f" congctl {congestion}")
    _write_hosts(layout)
    return links, why, "sysctl" if pinned else "routes"


def _links(layout: Layout, backend: str, a_namespace: str) -> tuple[Links, str]:
    if backend == "relay":
        return RelayLinks(layout), "relay, as asked for"
    netem = has_netem(a_namespace)
    obstacle = kernel_obstacle(layout, netem=netem)
    if obstacle is None:
        return KernelLinks(layout, with_netem=netem), "netem and HTB" if netem else "HTB: no link needs netem"
    if backend == "netem":
        raise UsageError(f"--backend netem: {obstacle}; use --backend relay")
    return RelayLinks(layout), f"relay, since {obstacle}"


def _has_ipv6() -> bool:
    """Return whether the kernel has IPv6."""
    return Path("/proc/sys/net/ipv6").is_dir()


def _make_routes(layout: Layout, links: Links, pin: str) -> None:
    for rank, routes in zip(layout.network.ranks, layout.routes(), strict=True):
        commands = []
        if _has_ipv6():
            for cable in layout.cables():
                if rank in (cable.low, cable.high):
                    address = f"{cable.link_local(rank)}/64"
                    commands.append(f"address add {address} dev {links.device(cable, rank)} nodad")
        # Neighbours first: the other routes go via them.
        for route in sorted(routes, key=lambda route: route.via != route.target):
            low, high = sorted((rank, route.via))
            cable = Cable(Rank(low), Rank(high))
            device = links.device(cable, rank)
            path = f"dev {device} src {layout.address(rank)}"
            if route.via != route.target:
                path = f"via {layout.address(route.via)} {path} onlink"
            commands.append(f"route replace {layout.address(route.target)}/32 {path}{pin}")
            if _has_ipv6():
                path = f"via {cable.link_local(route.via)} dev {device} src {layout.ipv6_address(rank)}"
                commands.append(f"route replace {layout.ipv6_address(route.target)}/128 {path}{pin}")
        batch("ip", layout.namespace(rank), commands)


def _write_hosts(layout: Layout) -> None:
    hostname = socket.gethostname()
    for rank in layout.network.ranks:
        folder = HOSTS_FOLDER / layout.namespace(rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(layout.hosts(rank, hostname), encoding="utf-8")
