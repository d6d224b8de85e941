"""What comes over HTTP: requests to the pages of a process, and the status that those read who watch."""

from __future__ import annotations

import functools
import io
import json
import socket
from collections.abc import Hashable
from typing import Any, Final

import msgspec
from rich.console import Console

from decoders.wire import PACK_ERRORS
from netstorm.cli.top_view import view
from netstorm.dashboard.history import History
from netstorm.dashboard.page import report
from netstorm.dashboard.recording import JobRecord
from netstorm.errors import Unavailable, UsageError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.decoders import FuzzTarget, of_words, structured
from netstorm.observe.web import Page, QueryPage, WebRefusals, _Handler, metrics_page, pages
from netstorm.scheduler.build_status import build_status
from netstorm.scheduler.status import JobStatus

__all__ = ["TARGETS"]

_STATUS: Final = msgspec.json.Decoder(JobStatus)


class _Server:
    base_environ: Final[dict[str, str]] = {"SERVER_NAME": "a", "SERVER_PORT": "1", "SCRIPT_NAME": ""}
    refusals: Final = WebRefusals()

    def asks(self, _request: object) -> None:
        """See the server: it counts connections that ask for something."""

    def get_app(self) -> Any:
        """Return an application with pages like the scheduler's."""

        def status(query: Any) -> bytes:
            if "job" in query:
                raise Unavailable(f"no job {query['job']!r} is here")
            return b"{}"

        return pages(
            {
                "/": Page("text/plain; charset=utf-8", lambda: b"help"),
                "/status.json": QueryPage("application/json", status),
                "/metrics": metrics_page(list, self.refusals),
            }
        )


def _decode_request(data: bytes) -> Hashable:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        _Handler(here, ("127.0.0.1", 1), _Server())  # type: ignore[arg-type] # as much as is used
        here.shutdown(socket.SHUT_WR)
        return there.recv(16)


_ASKS_FOR_METRICS: Final = (
    b"GET /metrics?name[]=a HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text; version=1.0.0\r\n"
    b"Accept-Encoding: gzip\r\n\r\n"
)
_POSTS: Final = (
    b"POST /status.json HTTP/1.1\r\nContent-Length: 3\r\nContent-Type: a\r\nExpect: 100-continue\r\n\r\nabc"
)
_REQUESTS: Final = (
    b"GET /status.json?job=a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD / HTTP/1.0\r\n\r\n",
    _ASKS_FOR_METRICS,
    _POSTS,
)
_WORDS: Final = (
    *(
        b"%00 %FF % .. // & ; + , q= name[]= gzip ?job= application/openmetrics-text ;version= \x16\x03\x01 "
        b"Host: Accept: Content-Length:"
    ).split(),
    *(b"GET ", b"HEAD ", b"POST ", b"PRI * HTTP/2.0", b" HTTP/1.1\r\n", b" HTTP/0.9", b"\r\n", b"Bearer "),
    *(b"Transfer-Encoding: chunked\r\n", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"),
)


def _decode_status(data: bytes) -> Hashable:
    try:
        status = _STATUS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "no status"  # netstorm top says so
    console = Console(file=io.StringIO(), width=100, height=40)
    console.print(view(status, 100))
    history = History()
    history.add(status)
    report({status.job: JobRecord(frames=[], points=history.points, events=history.events, policies=[])})
    return status.phase, len(status.nodes), len(status.links)


@functools.cache
def _statuses() -> list[bytes]:
    """Return the status of a simulated job."""
    cluster = SimulatedCluster(3, seed=1, awareness=True, update_time_s=1.0).join()
    found = []
    for _ in range(2):
        cluster.allreduce("w", [[1.0] * 300_000] * 3)
        snapshot = cluster.scheduler.machine.snapshots(cluster.scheduler.now())[0]
        found.append(msgspec.json.encode(build_status(snapshot, time=1.0, scheduler="a:1", http="a:2")))
    return found


TARGETS: Final = (
    FuzzTarget(
        name="requests",
        decode=_decode_request,
        allowed=(),
        seeds=lambda: list(_REQUESTS),
        mutate=of_words(_WORDS),
    ),
    FuzzTarget(
        name="statuses",
        decode=_decode_status,
        allowed=(UsageError,),
        seeds=_statuses,
        mutate=structured(json.loads, lambda value: json.dumps(value).encode(), PACK_ERRORS),
    ),
)
