"""An emulated WAN, from the outside: make it, run programs in it, change it, take it away."""

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

from netstorm.emulation.build import BACKENDS
from netstorm.emulation.layout import Layout, checked_name
from netstorm.emulation.rights import require_rights
from netstorm.emulation.state import KEEP, read_state, remove_stale, running, socket_path
from netstorm.errors import UsageError
from netstorm.settings import child_environment
from netstorm.topology.networks.elements import Rank
from netstorm.topology.networks.file import dump_network, parse_network
from netstorm.topology.networks.network import Network

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

__all__ = ["LinkStatus", "Wan"]

_UP_S: Final = 60.0
_DOWN_S: Final = 30.0
_ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
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
    """Segments that found the queue full."""
    lost: int = 0
    """Segments lost by chance."""


class Wan:
    """A network of namespaces on this machine. A context manager: everything it made is gone after `down`.

    Example:
        >>> with Wan.up(load_network("examples/networks/internet2.yaml")) as wan:
        ...     subprocess.run(wan.command(0, ["ping", "-c", "3", "r8"]))
    """

    def __init__(self, layout: Layout, facts: dict[str, Any], warden: subprocess.Popen[bytes] | None) -> None:
        """Use `up` or `attach`."""
        self.name: Final = layout.name
        self.network: Final = layout.network
        """As given: later changes are not in it (`status` has them)."""
        self.backend: Final = str(facts["backend"])
        """"netem" or "relay"."""
        self.backend_why: Final = str(facts["backend_why"])
        """Why this one, for a person."""
        self.congestion: Final = str(facts["congestion"])
        """The congestion control of every namespace."""
        self.pid: Final = int(facts["pid"])
        """Of the process that keeps it."""
        self._layout: Final = layout
        self._warden = warden

    @classmethod
    def up(
        cls,
        network: Network,
        *,
        name: str = "",
        backend: str = "auto",
        congestion: str = "bbr",
        start_changes: bool = True,
        detached: bool = False,
    ) -> Wan:
        """Make a network, and return when programs can run in it.

        Args:
            network: what to emulate. IP routes join all pairs over the fewest hops, whatever its `routing`.
            name: by which others find it; empty: one that is free.
            backend: "netem" (the kernel's), "relay" (ours), or "auto": netem if the kernel has it.
            congestion: the TCP congestion control of all namespaces.
            start_changes: the network's changes count from now on; else from `start_changes` on.
            detached: it outlives this process; else it ends with it, even if that is killed.

        Raises:
            MissingRights: says what is missing, and how to get it.
            UsageError: the name is taken, or the kernel has not what was asked for.
        """
        if backend not in BACKENDS:
            raise UsageError(f"back end {backend!r}: expected one of {', '.join(BACKENDS)}")
        require_rights()
        layout = Layout(name=checked_name(name or _free_name()), network=network)
        order = {
            "name": layout.name,
            "network": dump_network(network),
            "backend": backend,
            "congestion": congestion,
            "start_changes": start_changes,
        }
        warden = _start_warden(order)
        try:
            _wait_until_ready(warden)
            facts = read_state(layout.name)
        except BaseException:
            _end(warden)
            raise
        if detached:
            assert warden.stdin is not None
            warden.stdin.write(KEEP)
            warden.stdin.close()
            warden.returncode = 0  # it is nobody's child to wait for: keeps Popen from warning of that
            return cls(layout, facts, None)
        return cls(layout, facts, warden)

    @classmethod
    def attach(cls, name: str) -> Wan:
        """Return a network that is up, which another process has made.

        Raises:
            UsageError: there is none of that name; says which there are.
        """
        facts = read_state(name)
        network = parse_network(str(facts["network"]), f"the emulated network {name!r}")
        return cls(Layout(name=name, network=network), facts, None)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away."""
        self.down()

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a rank; r0, r1, … are its name in every namespace."""
        return self._layout.address(Rank(rank))

    def namespace(self, rank: int) -> str:
        """Return a rank's namespace, as `ip netns` knows it."""
        self.address(rank)  # for its check
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
            UsageError: there is no such link, or no link may have such values.
        """
        self._ask(do="set", source=source, target=target, rate=rate, latency=latency, loss=loss)

    def start_changes(self) -> None:
        """Have the network's changes count from now on; nothing if they do already."""
        self._ask(do="start")

    def facts(self) -> dict[str, Any]:
        """Return everything that the warden tells, for JSON: back end, congestion control, relays, links."""
        return self._ask(do="status")

    def status(self) -> tuple[LinkStatus, ...]:
        """Return each direction of each link, in order of their ends."""
        return tuple(LinkStatus(**link) for link in self.facts()["links"])

    def down(self) -> None:
        """Take everything away, with what still runs in it and the process that keeps it. Twice does no harm.

        Raises:
            UsageError: that process does not end in time.
        """
        if self._warden is not None:
            warden, self._warden = self._warden, None
            _end(warden)
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


@contextlib.contextmanager
def _process(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yield what waits so many seconds for a process, nobody's child, to end; it returns whether it has."""
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


def _start_warden(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [child_environment().get("PYTHONPATH")])])
    warden = subprocess.Popen(
        [sys.executable, "-m", "netstorm.emulation.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(None, PYTHONPATH=path),
        cwd="/",
    )
    assert warden.stdin is not None
    warden.stdin.write(json.dumps(order).encode() + b"\n")
    warden.stdin.flush()
    return warden


def _wait_until_ready(warden: subprocess.Popen[bytes]) -> None:
    answers = cast("IO[bytes]", warden.stdout)
    line = answers.readline()
    answer = json.loads(line) if line else {"error": "its process ended without a word"}
    answers.close()
    if "error" in answer:
        raise UsageError(f"cannot emulate the network: {answer['error']}")


def _end(warden: subprocess.Popen[bytes]) -> None:
    assert warden.stdin is not None
    with contextlib.suppress(OSError):
        warden.stdin.close()
    try:
        warden.wait(_DOWN_S)
    except subprocess.TimeoutExpired:
        warden.kill()
        warden.wait()
        remove_stale()
