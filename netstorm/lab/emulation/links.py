"""Builds an emulated network, with links by the kernel's queueing disciplines or by relays, which carry
packets between TUN devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from netstorm import clock
from netstorm.errors import UsageError
from netstorm.lab.emulation.layout import (
    HOME_DEVICE,
    MTU,
    Cable,
    NetworkLayout,
    needs_netem,
    shaping_commands,
    veth_commands,
)
from netstorm.lab.emulation.messages import EmulatedLinkCounters, RelayAnswer, RelayUse, WanCounters
from netstorm.lab.emulation.namespaces import (
    HOSTS_FOLDER,
    batch,
    detach_standard_streams,
    open_tun,
    raise_priority,
    write_sysctl,
)
from netstorm.lab.emulation.shaping import LARGEST, PriorityShaper, Shaper, destination, source
from netstorm.pslite.system import TimerFd
from netstorm.topology.network import Link, Rank, changed_link

__all__ = ["BACKENDS", "QUEUES", "Links", "available_congestion_controls", "build", "kernel_obstacle"]


# Links made by the kernel's own queueing disciplines: see `netem` for the commands.


def has_netem(namespace: str) -> bool:
    """Return whether the kernel has netem, by a try on the loopback device of one of our namespaces."""
    try:
        batch("tc", namespace, ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
    except UsageError:
        return False
    return True


def kernel_obstacle(layout: NetworkLayout, *, netem: bool) -> str | None:
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

    def __init__(self, layout: NetworkLayout, *, with_netem: bool) -> None:
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

    def counters(self) -> WanCounters:
        """Return the traffic of all links.

        The drops of netem, the root, include those of the bounded queue below it: their difference is what
        was lost by chance.
        """
        links: dict[str, EmulatedLinkCounters] = {}
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


# Links emulated by relays: a TUN device at each end, and processes that carry packets between them.

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

    def __init__(self, layout: NetworkLayout, queues: str = "fifo") -> None:
        """Plan the links; `make` makes them. `queues`: one of `QUEUES`."""
        self._shaper: Final = PriorityShaper if queues == "dscp" else Shaper
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
                shaper=self._shaper(rate=link.rate, latency=link.latency, loss=link.loss, random=Random()),
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

    def counters(self) -> WanCounters:
        """Return the traffic of all links and the processor time of the relays."""
        links: dict[str, EmulatedLinkCounters] = {}
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


# Builds an emulated network: namespaces, addresses, links by one of the backends, routes, hosts files.

Links: TypeAlias = RelayLinks | KernelLinks
BACKENDS: Final = ("auto", "netem", "relay")
QUEUES: Final = ("fifo", "dscp")

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


def build(
    layout: NetworkLayout, *, backend: str, congestion: str, queues: str = "fifo"
) -> tuple[Links, str, str]:
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
    links, why = _links(layout, backend, names[0], queues)
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


def _links(layout: NetworkLayout, backend: str, a_namespace: str, queues: str) -> tuple[Links, str]:
    if queues == "dscp":
        if backend == "netem":
            raise UsageError("--queues dscp with --backend netem: only the relay has queues by code point")
        return RelayLinks(layout, queues), "relay, which has queues by code point"
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


def _make_routes(layout: NetworkLayout, links: Links, pin: str) -> None:
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


def _write_hosts(layout: NetworkLayout) -> None:
    hostname = socket.gethostname()
    for rank in layout.network.ranks:
        folder = HOSTS_FOLDER / layout.namespace(rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(layout.hosts(rank, hostname), encoding="utf-8")


# The relay: a loop that carries packets between TUN devices, with the rates, latencies and losses of links.
#
# `Shaper`s decide when a packet arrives; here are the reads, the writes and the timer. One read moves a whole
# super-packet, whose bytes are passed on unchanged.

_GRAIN_S: Final = 0.0004
"""Packets that are due within this time are written together, which costs half of it in precision."""
_NEVER: Final = 1e18


@dataclass(slots=True, eq=False)
class Cap:
    """An access cap of a node, and for each packet in its queue its next direction."""

    addresses: frozenset[bytes]
    """The node's, of IPv4 and IPv6. Packets that it forwards for other nodes do not count, as in planning."""
    shaper: Shaper
    goes_to: deque[Direction] = field(default_factory=deque)

    def offer(self, packet: bytes, now: float, direction: Direction) -> None:
        """Add a packet that arrives now, and continues to `direction`."""
        before = len(self.shaper.queue)
        self.shaper.offer(packet, now)
        self.goes_to.extend([direction] * (len(self.shaper.queue) - before))


@dataclass(slots=True, eq=False)
class Direction:
    """One direction of a link, and its devices."""

    key: str
    """SOURCE-TARGET, for the control channel."""
    reads: int
    writes: int
    shaper: Shaper
    egress: Cap | None = None
    ingress: Cap | None = None
    failed: int = 0
    """Packets that the device refused: it was down, or had no memory."""

    def receive(self, packet: bytes, now: float) -> None:
        """Add a packet from the source's device."""
        if self.egress is not None and source(packet) in self.egress.addresses:
            self.egress.offer(packet, now, self)
        else:
            self.shaper.offer(packet, now)

    def deliver(self, packet: bytes) -> None:
        """Write a packet to the target's device."""
        try:
            os.write(self.writes, packet)
        except OSError:
            self.failed += 1


class Relay:
    """Carries packets until its control channel is closed. One thread; never blocks but in its poll."""

    def __init__(self, directions: Sequence[Direction], control: socket.socket) -> None:
        """Begin without packets; the devices and the SEQPACKET control channel must not block."""
        self._by_descriptor: Final = {direction.reads: direction for direction in directions}
        self._by_key: Final = {direction.key: direction for direction in directions}
        self._control: Final = control
        self._poll: Final = select.epoll()
        self._timer: Final = TimerFd()
        self._straight: Final = [direction for direction in directions if direction.ingress is None]
        self._capped: Final = [direction for direction in directions if direction.ingress is not None]
        self._egress: Final = list({id(one.egress): one.egress for one in directions if one.egress}.values())
        self._ingress: Final = list(
            {id(one.ingress): one.ingress for one in directions if one.ingress}.values()
        )
        self._prioritised: Final = [
            direction.shaper for direction in directions if isinstance(direction.shaper, PriorityShaper)
        ]
        self._armed_for = 0.0
        for descriptor in (*self._by_descriptor, control.fileno(), self._timer.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)

    def run(self) -> None:
        """Carry packets until the control channel is closed at its other end."""
        now = clock.monotonic
        by_descriptor = self._by_descriptor
        # One buffer, and a copy of each packet: cheaper than 64 KiB of new memory each time.
        buffer = bytearray(LARGEST)
        into, view, read = [buffer], memoryview(buffer), os.readv
        control, timer = self._control.fileno(), self._timer.fileno()
        while True:
            for descriptor, _ in self._poll.poll():
                direction = by_descriptor.get(descriptor)
                if direction is not None:
                    time = now()
                    receive = direction.shaper.offer if direction.egress is None else direction.receive
                    receive(bytes(view[: read(descriptor, into)]), time)
                elif descriptor == timer:
                    self._timer.take()
                    self._armed_for = 0.0
                elif descriptor == control and not self._answer_control():
                    return
            self._deliver(now())

    def _deliver(self, time: float) -> None:
        """Write what is due, and set the timer for what is due next."""
        limit = time + _GRAIN_S / 2
        soonest = _NEVER
        write = os.write
        for cap in self._egress:
            soonest = min(soonest, _drain_cap(cap, limit, onwards=True))
        for shaper in self._prioritised:
            soonest = min(soonest, shaper.advance(limit))
        for direction in self._straight:
            queue = direction.shaper.queue
            while queue:
                due = queue[0][0]
                if due > limit:
                    soonest = min(due, soonest)
                    break
                try:
                    write(direction.writes, queue.popleft()[1])
                except OSError:
                    direction.failed += 1
        for direction in self._capped:
            soonest = min(soonest, _drain_link(direction, limit))
        for cap in self._ingress:
            soonest = min(soonest, _drain_cap(cap, limit, onwards=False))
        soonest -= _GRAIN_S / 2  # waking up takes about as long
        if soonest < _NEVER / 2 and not 0.0 < self._armed_for <= soonest:
            self._armed_for = max(soonest, time + _GRAIN_S)
            self._timer.arm(self._armed_for - time)

    def _answer_control(self) -> bool:
        """Handle a request of the control channel; return False if the channel is closed."""
        try:
            text = self._control.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not text:
            return False
        request = json.loads(text)
        if "set" in request:
            self._by_key[request["link"]].shaper.change(clock.monotonic(), **request["set"])
        else:
            self._control.send(json.dumps(self._counters()).encode())
        return True

    def _counters(self) -> RelayAnswer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        links: dict[str, EmulatedLinkCounters] = {}
        for key, direction in self._by_key.items():
            shaper = direction.shaper
            links[key] = {
                "packets": shaper.carried,
                "bytes": shaper.wire_bytes,
                "dropped": shaper.dropped + direction.failed,
                "lost": shaper.lost,
            }
        return {"pid": os.getpid(), "cpu_s": used.ru_utime + used.ru_stime, "links": links}


def _drain_cap(cap: Cap, limit: float, *, onwards: bool) -> float:
    """Move due packets out of an access cap, to their link or device; return when the next is due."""
    queue = cap.shaper.queue
    while queue and queue[0][0] <= limit:
        due, packet, _ = queue.popleft()
        direction = cap.goes_to.popleft()
        if onwards:
            direction.shaper.offer(packet, due)
        else:
            direction.deliver(packet)
    return queue[0][0] if queue else _NEVER


def _drain_link(direction: Direction, limit: float) -> float:
    """Move due packets out of a link to a node with an ingress cap; return when the next is due."""
    queue = direction.shaper.queue
    cap = direction.ingress
    while queue and queue[0][0] <= limit:
        due, packet, _ = queue.popleft()
        if cap is not None and destination(packet) in cap.addresses:
            cap.offer(packet, due, direction)
        else:
            direction.deliver(packet)
    return queue[0][0] if queue else _NEVER
