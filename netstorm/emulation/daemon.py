"""The warden: the process that makes an emulated network, keeps it, and takes it away again.

It lives as long as the network. It is told to end by SIGTERM, by SIGINT, through its control socket, or by
the end of its standard input, which whoever started it holds: killed by SIGKILL, they take the network with
them. If the warden itself is killed that way, its relays end, and the next start removes what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from netstorm import clock
from netstorm.emulation.build import Links, build
from netstorm.emulation.layout import Layout
from netstorm.emulation.namespaces import remove
from netstorm.emulation.process import let_go
from netstorm.emulation.state import KEEP, Claim, socket_path
from netstorm.errors import NetStormError, UsageError
from netstorm.topology.networks.elements import Change, Rank
from netstorm.topology.networks.file import dump_network, parse_network

__all__ = ["main"]

_REQUEST_S: Final = 2.0
"""For a client to say what it wants; nobody else can be served meanwhile."""
_LOOK_S: Final = 1.0
"""How often relays are looked after."""


class _Stopped(Exception):
    """A signal came."""


def main() -> None:
    """Read an order, make the network, say so, and keep it to its end."""
    os.setsid()
    order = json.loads(sys.stdin.buffer.readline())
    layout = Layout(name=order["name"], network=parse_network(order["network"]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    links: list[Links] = []
    try:
        claim = Claim(layout.name)
    except NetStormError as error:
        _tell(error=str(error))
        return
    try:
        made, why, pinned = build(layout, backend=order["backend"], congestion=order["congestion"])
        links.append(made)
        warden = _Warden(layout, made, why=why, pinned=pinned, order=order, claim=claim)
        _tell(ready=True)
        warden.serve()
    except _Stopped:
        pass
    except (NetStormError, OSError) as error:
        _tell(error=str(error))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        remove([layout.namespace(rank) for rank in layout.network.ranks])
        for one in links:
            one.close()
        claim.release()


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signals call it
    raise _Stopped


def _tell(**answer: object) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class _Warden:
    def __init__(
        self, layout: Layout, links: Links, *, why: str, pinned: str, order: dict[str, Any], claim: Claim
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
        self._facts: Final = {
            "name": layout.name,
            "pid": os.getpid(),
            "backend": links.name,
            "backend_why": why,
            "congestion": order["congestion"],
            "pinned_by": pinned,
            "namespaces": [layout.namespace(rank) for rank in layout.network.ranks],
        }
        claim.write(**self._facts, network=dump_network(layout.network))

    def serve(self) -> None:
        """Answer requests and apply changes until it is over."""
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
                let_go()
            if self._listener.fileno() in events and not self._answer():
                return
            dead = self._links.dead()
            if dead is not None:
                raise UsageError(f"the relay (process {dead}) has died, and the network with it")

    def _wait_ms(self) -> float:
        wait = _LOOK_S
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
        after = replace(before, **values)  # type: ignore[arg-type]  # it checks them
        self._links.set(before, values)
        self._now[before.source, before.target] = after

    def _answer(self) -> bool:
        """Serve one request; return False if it was the last."""
        client, _ = self._listener.accept()
        goes_on = True
        with client, contextlib.suppress(OSError):
            client.settimeout(_REQUEST_S)
            request = json.loads(_read_all(client))
            try:
                answer = self._do(request)
                goes_on = request["do"] != "down"
            except NetStormError as error:
                answer = {"error": str(error)}
            client.sendall(json.dumps(answer).encode())
        return goes_on

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "set":
                self._set(
                    request["source"],
                    request["target"],
                    request.get("rate"),
                    request.get("latency"),
                    request.get("loss"),
                )
                return {}
            case "start":
                if self._began is None:
                    self._began = clock.monotonic()
                return {}
            case "status":
                return self._status()
            case "down":
                return {}
            case other:
                raise UsageError(f"request {other!r}: expected set, start, status or down")

    def _status(self) -> dict[str, Any]:
        counted = self._links.counters()
        links = []
        for link in self._now.values():
            counters = counted["links"].get(f"{link.source}-{link.target}", {})
            values = {"rate": link.rate, "latency": link.latency, "loss": link.loss}
            links.append({"source": link.source, "target": link.target, **values, **counters})
        since = None if self._began is None else clock.monotonic() - self._began
        return {
            **self._facts,
            "relays": counted["relays"],
            "changes_for_s": since,
            "changes_ahead": len(self._changes),
            "links": links,
        }


def _read_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
