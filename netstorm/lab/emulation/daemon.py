"""The daemon of an emulated network: it builds the network, serves requests about it, and removes it.

It lives as long as the network. It ends at SIGTERM, at SIGINT, on a request through its control socket, or at
the end of its standard input, which the process that started it holds: if that process is killed, the network
goes with it. If the daemon itself is killed, its relays end, and the next start removes what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import Final

from netstorm import clock
from netstorm.errors import NetStormError, UsageError
from netstorm.lab.emulation.layout import NetworkLayout
from netstorm.lab.emulation.links import Links, build
from netstorm.lab.emulation.messages import (
    MOST_BYTES,
    Down,
    EmulatedLinkCounters,
    LinkReport,
    NetworkDescription,
    NetworkReport,
    Order,
    Request,
    SetLink,
    Start,
    Status,
    parse_request,
)
from netstorm.lab.emulation.namespaces import KEEP, NameClaim, detach_standard_streams, remove, socket_path
from netstorm.topology.files import dump_network, parse_network
from netstorm.topology.network import Change, Rank, changed_link

__all__ = ["main"]

_REQUEST_S: Final = 2.0
"""Time for a client to send its request; other clients wait meanwhile."""
_RELAY_CHECK_S: Final = 1.0
"""Time between two checks that the relays live."""
_NO_TRAFFIC: Final[EmulatedLinkCounters] = {"packets": 0, "bytes": 0, "dropped": 0, "lost": 0}


class _Stopped(Exception):
    """A signal has asked the daemon to end."""


def main() -> None:
    """Read an `Order`, build the network, report that it is ready, and serve requests until its end."""
    os.setsid()
    order: Order = json.loads(sys.stdin.buffer.readline())
    layout = NetworkLayout(name=order["name"], network=parse_network(order["network"]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    links: list[Links] = []
    try:
        claim = NameClaim(layout.name)
    except NetStormError as error:
        _answer_starter(error=str(error))
        return
    try:
        made, why, pinned = build(
            layout, backend=order["backend"], congestion=order["congestion"], queues=order["queues"]
        )
        links.append(made)
        daemon = _Daemon(layout, made, why=why, pinned=pinned, order=order, claim=claim)
        _answer_starter(ready=True)
        daemon.serve()
    except _Stopped:
        pass
    except (NetStormError, OSError) as error:
        _answer_starter(error=str(error))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        remove([layout.namespace(rank) for rank in layout.network.ranks])
        for built in links:
            built.close()
        claim.release()


def _stop(*_: object) -> None:
    raise _Stopped


def _answer_starter(**answer: object) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class _Daemon:
    def __init__(
        self, layout: NetworkLayout, links: Links, *, why: str, pinned: str, order: Order, claim: NameClaim
    ) -> None:
        self._layout: Final = layout
        self._links: Final = links
        self._now: Final = {(link.source, link.target): link for link in layout.network.links}
        self._changes: Final[list[Change]] = list(layout.network.changes)
        self._began: float | None = clock.monotonic() if order["start_changes"] else None
        self._listener: Final = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path = socket_path(layout.name)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(16)
        self._description: Final[NetworkDescription] = {
            "name": layout.name,
            "pid": os.getpid(),
            "backend": links.name,
            "backend_why": why,
            "congestion": order["congestion"],
            "pinned_by": pinned,
            "namespaces": [layout.namespace(rank) for rank in layout.network.ranks],
        }
        claim.write({**self._description, "network": dump_network(layout.network)})

    def serve(self) -> None:
        """Answer requests and apply changes until the network shall end."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            self._apply_changes()
            events = dict(poll.poll(self._wait_ms()))
            if 0 in events:
                if os.read(0, 4096) != KEEP:
                    return
                poll.unregister(0)
                detach_standard_streams()
            if self._listener.fileno() in events and not self._answer():
                return
            ended = self._links.ended_relay()
            if ended is not None:
                raise UsageError(f"the relay (process {ended}) has died, and the network with it")

    def _wait_ms(self) -> float:
        wait = _RELAY_CHECK_S
        if self._began is not None and self._changes:
            wait = min(wait, self._began + self._changes[0].at - clock.monotonic())
        return max(0.0, wait) * 1000

    def _apply_changes(self) -> None:
        while self._began is not None and self._changes:
            change = self._changes[0]
            if clock.monotonic() < self._began + change.at:
                return
            del self._changes[0]
            self._set(change.source, change.target, change.rate, change.latency, change.loss)

    def _set(
        self, source: int, target: int, rate: float | None, latency: float | None, loss: float | None
    ) -> None:
        before = self._now.get((Rank(source), Rank(target)))
        if before is None:
            raise UsageError(f"the emulated network has no link {source}→{target}")
        given = {"rate": rate, "latency": latency, "loss": loss}
        values = {name: value for name, value in given.items() if value is not None}
        after = changed_link(before, values)
        self._links.set(before, values)
        self._now[before.source, before.target] = after

    def _answer(self) -> bool:
        """Answer one request; return False if it asks for the end of the network."""
        client, _ = self._listener.accept()
        goes_on = True
        with client, contextlib.suppress(OSError):
            client.settimeout(_REQUEST_S)
            try:
                request = parse_request(_read_all(client))
                answer: object = self._handle(request)
                goes_on = not isinstance(request, Down)
            except NetStormError as error:
                answer = {"error": str(error)}
            client.sendall(json.dumps(answer).encode())
        return goes_on

    def _handle(self, request: Request) -> object:
        match request:
            case SetLink():
                self._set(request.source, request.target, request.rate, request.latency, request.loss)
                return {}
            case Start():
                if self._began is None:
                    self._began = clock.monotonic()
                return {}
            case Status():
                return self._report()
            case Down():
                return {}

    def _report(self) -> NetworkReport:
        counted = self._links.counters()
        links: list[LinkReport] = [
            {
                "source": link.source,
                "target": link.target,
                "rate": link.rate,
                "latency": link.latency,
                "loss": link.loss,
                **counted["links"].get(f"{link.source}-{link.target}", _NO_TRAFFIC),
            }
            for link in self._now.values()
        ]
        since = None if self._began is None else clock.monotonic() - self._began
        return {
            **self._description,
            "relays": counted["relays"],
            "changes_for_s": since,
            "changes_ahead": len(self._changes),
            "links": links,
        }


def _read_all(client: socket.socket) -> bytes:
    data = b""
    while len(data) <= MOST_BYTES and (part := client.recv(1 << 16)):
        data += part
    return data


if __name__ == "__main__":
    main()
