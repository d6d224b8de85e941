"""An emulated WAN: how to bring it up, run programs in it, change it, and take it down."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, cast

from netstorm.errors import UsageError
from netstorm.lab.emulation.layout import NetworkLayout, checked_name
from netstorm.lab.emulation.links import BACKENDS, QUEUES
from netstorm.lab.emulation.messages import LinkReport, NetworkDescription, NetworkReport, Order
from netstorm.lab.emulation.namespaces import (
    KEEP,
    check_requirements,
    read_entry,
    remove_stale,
    running,
    socket_path,
)
from netstorm.settings import child_environment
from netstorm.topology.files import dump_network, parse_network
from netstorm.topology.network import Network, Rank

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

__all__ = ["EmulatedLinkStatus", "Wan"]

_DOWN_S: Final = 30.0
_ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedLinkStatus:
    """One direction of a link, as it is now, and what it has carried so far."""

    source: Rank
    target: Rank
    rate: float
    """Bit/s, IP and TCP headers and a frame of 14 bytes a packet included."""
    latency: float
    """Seconds, one way."""
    loss: float
    """Fraction of segments."""
    packets: int = 0
    """Segments carried."""
    bytes: int = 0
    """Of those, on the wire."""
    dropped: int = 0
    """Segments for which the queue had no room."""
    lost: int = 0
    """Segments lost by chance."""


class Wan:
    """A network of namespaces on this machine. A context manager: its end calls `down`.

    Example:
        >>> with Wan.up(load_network("examples/networks/internet2.yaml")) as wan:
        ...     subprocess.run(wan.command(0, ["ping", "-c", "3", "r8"]))
    """

    def __init__(
        self, layout: NetworkLayout, entry: NetworkDescription, daemon: subprocess.Popen[bytes] | None
    ) -> None:
        """Use `up` or `attach`."""
        self.name: Final = layout.name
        self.network: Final = layout.network
        """As given; `status` has later changes."""
        self.backend: Final = str(entry["backend"])
        """"netem" or "relay"."""
        self.backend_why: Final = str(entry["backend_why"])
        """Why this backend, as text."""
        self.congestion: Final = str(entry["congestion"])
        """The congestion control of every namespace."""
        self.pid: Final = int(entry["pid"])
        """Process id of its daemon."""
        self._layout: Final = layout
        self._daemon = daemon

    @classmethod
    def up(
        cls,
        network: Network,
        *,
        name: str = "",
        backend: str = "auto",
        congestion: str = "bbr",
        queues: str = "fifo",
        start_changes: bool = True,
        detached: bool = False,
    ) -> Wan:
        """Make a network, and return when programs can run in it.

        Args:
            network: what to emulate. IP routes connect all pairs over the fewest hops, whatever its
                `routing`.
            name: for `attach`; empty: a free name.
            backend: "netem" (the kernel's), "relay" (NetStorm's), or "auto": netem if the kernel has it.
            congestion: the TCP congestion control of all namespaces.
            queues: "fifo", or "dscp": strict priorities by code point, and unimportant packets are dropped
                while a queue is short, as in MLT's switches.
            start_changes: the times of the network's changes count from now; else from `start_changes`.
            detached: the network outlives this process; else it ends with it, even if the process is killed.

        Raises:
            UnmetRequirements: says what is missing, and how to get it.
            UsageError: the name is taken, or the kernel lacks the backend or congestion control.
        """
        if backend not in BACKENDS:
            raise UsageError(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
        if queues not in QUEUES:
            raise UsageError(f"queues {queues!r}: expected one of {', '.join(QUEUES)}")
        check_requirements()
        layout = NetworkLayout(name=checked_name(name or _free_name()), network=network)
        order: Order = {
            "name": layout.name,
            "network": dump_network(network),
            "backend": backend,
            "congestion": congestion,
            "queues": queues,
            "start_changes": start_changes,
        }
        daemon = _start_daemon(order)
        try:
            _wait_until_ready(daemon)
            entry = read_entry(layout.name)
        except BaseException:
            _end(daemon)
            raise
        if detached:
            assert daemon.stdin is not None
            daemon.stdin.write(KEEP)
            daemon.stdin.close()
            daemon.returncode = 0  # nobody waits for it: this keeps Popen from warning
            return cls(layout, entry, None)
        return cls(layout, entry, daemon)

    @classmethod
    def attach(cls, name: str) -> Wan:
        """Return a network that another process has brought up.

        Raises:
            UsageError: none of that name is up; says which are.
        """
        entry = read_entry(name)
        network = parse_network(str(entry["network"]), f"the emulated network {name!r}")
        return cls(NetworkLayout(name=name, network=network), entry, None)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the network down."""
        self.down()

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a rank; r0, r1, … are its name in every namespace."""
        return self._layout.address(Rank(rank))

    def ipv6_address(self, rank: int) -> str:
        """Return the IPv6 address of a rank; r0v6, r1v6, … are its name in every namespace."""
        return self._layout.ipv6_address(Rank(rank))

    def namespace(self, rank: int) -> str:
        """Return a rank's namespace, as `ip netns` knows it."""
        self.address(rank)  # checks the rank
        return self._layout.namespace(Rank(rank))

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` in a rank's namespace, with its own hosts file."""
        return ["ip", "netns", "exec", self.namespace(rank), *argv]

    def set(
        self,
        source: int,
        target: int,
        *,
        rate: float | None = None,
        latency: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change one direction of a link at once: bit/s, seconds one way, a fraction of segments.

        Raises:
            UsageError: there is no such link, or a value is not allowed.
        """
        self._ask(do="set", source=source, target=target, rate=rate, latency=latency, loss=loss)

    def start_changes(self) -> None:
        """Count the times of the network's changes from now, unless they already count."""
        self._ask(do="start")

    def report(self) -> NetworkReport:
        """Return the state of the network, for JSON: backend, congestion control, relays, links."""
        return cast("NetworkReport", self._ask(do="status"))

    def status(self) -> tuple[EmulatedLinkStatus, ...]:
        """Return each direction of each link, in order of their ends."""
        return tuple(_link_status(link) for link in self.report()["links"])

    def down(self) -> None:
        """Remove the network, the processes that run in it, and its daemon. Twice does no harm.

        Raises:
            UsageError: the daemon does not end in time.
        """
        if self._daemon is not None:
            daemon, self._daemon = self._daemon, None
            _end(daemon)
        elif self.name in running():
            with _process(self.pid) as ended:
                with contextlib.suppress(UsageError):
                    self._ask(do="down")
                if not ended(_DOWN_S):
                    raise UsageError(
                        f"the emulated network {self.name!r} does not end: kill process {self.pid}"
                    )
        remove_stale()

    def _ask(self, **request: object) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_ANSWER_S)
            try:
                client.connect(str(socket_path(self.name)))
                client.sendall(json.dumps(request).encode())
                client.shutdown(socket.SHUT_WR)
                answer = json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")) or b"{}")
            except (FileNotFoundError, ConnectionError):
                raise UsageError(f"the emulated network {self.name!r} is not up any more") from None
        if "error" in answer:
            raise UsageError(answer["error"])
        return cast("dict[str, Any]", answer)


def _link_status(link: LinkReport) -> EmulatedLinkStatus:
    values: dict[str, Any] = {**link}
    values.update(source=Rank(link["source"]), target=Rank(link["target"]))
    return EmulatedLinkStatus(**values)


@contextlib.contextmanager
def _process(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits up to so many seconds for a process to end, and returns whether it has.

    The process need not be a child of this one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda _: True
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield lambda seconds: bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def _free_name() -> str:
    taken = set(running())
    number = 0
    while f"{os.getpid()}.{number}" in taken:
        number += 1
    return f"{os.getpid()}.{number}"


def _start_daemon(order: Order) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [child_environment().get("PYTHONPATH")])])
    daemon = subprocess.Popen(
        [sys.executable, "-m", "netstorm.lab.emulation.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(None, PYTHONPATH=path),
        cwd="/",
    )
    assert daemon.stdin is not None
    daemon.stdin.write(json.dumps(order).encode() + b"\n")
    daemon.stdin.flush()
    return daemon


def _wait_until_ready(daemon: subprocess.Popen[bytes]) -> None:
    answers = cast("IO[bytes]", daemon.stdout)
    line = answers.readline()
    answer = json.loads(line) if line else {"error": "its daemon ended without an answer"}
    answers.close()
    if "error" in answer:
        raise UsageError(f"cannot emulate the network: {answer['error']}")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    assert daemon.stdin is not None
    with contextlib.suppress(OSError):
        daemon.stdin.close()
    try:
        daemon.wait(_DOWN_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
        remove_stale()
