"""The dashboard's web server: the page, and what is new of a job, as server-sent events.

One task polls the scheduler for all viewers together: a status a second and job while somebody looks, else
one in five seconds, so that the curves have no gap when somebody comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from netstorm.addresses import bracketed
from netstorm.dashboard.history import History, Update
from netstorm.dashboard.page import POLICY, STATIC
from netstorm.dashboard.recording import JobRecord
from netstorm.errors import NetStormError, SettingsError
from netstorm.observe.web import is_own_host
from netstorm.scheduler.status import JobStatus

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Feed", "live_app", "open_socket", "replay_app", "serve"]

_EVERY_S: Final = 1.0
"""A policy change is seen within 2 s: the scheduler's answer may be 0.5 s old."""
_IDLE_EVERY_S: Final = 5.0
_MOST_WAITING: Final = 8
"""Messages for a viewer that does not read; then its connection is closed, and its browser opens another."""
_MOST_VIEWERS: Final = 64
"""Connections, but for `_MOST_SILENT`."""
_MOST_SILENT: Final = 32
"""Connections that have not asked for anything yet; one more closes the oldest of them."""
_SILENCE_S: Final = 5.0
"""How long one may be silent."""
_MOST_JOBS: Final = 64
"""Jobs whose curves are kept; the one that was looked at least lately goes."""


class _Viewer:
    """One open page."""

    def __init__(self, job: str | None) -> None:
        self.job = job
        self.messages: Final[asyncio.Queue[bytes | None]] = asyncio.Queue(_MOST_WAITING)
        self.knows_all = False

    def send(self, update: Update) -> None:
        """Queue a message; without room, the end."""
        if self.messages.full():
            self.end()
        else:
            self.messages.put_nowait(b"data: " + msgspec.json.encode(update) + b"\n\n")

    def end(self) -> None:
        while not self.messages.empty():
            self.messages.get_nowait()
        self.messages.put_nowait(None)


class Feed:
    """What a scheduler says, for all viewers.

    Args:
        read: returns the status of a job, or of the one that began first; it may block.
    """

    def __init__(self, read: Callable[[str | None], JobStatus]) -> None:
        self._read: Final = read
        self._viewers: Final[list[_Viewer]] = []
        self._histories: Final[dict[str, History]] = {}
        self._woken: Final = asyncio.Event()
        self._over = False

    async def run(self) -> None:
        """Poll until `end` is called."""
        while not self._over:
            self._woken.clear()
            for job in {viewer.job for viewer in self._viewers} or {None}:
                await self._poll(job)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _EVERY_S if self._viewers else _IDLE_EVERY_S)
        for viewer in self._viewers:
            viewer.end()

    def end(self) -> None:
        """Let `run` return, and every stream end. Any thread of the loop, or a handler of signals."""
        self._over = True
        self._woken.set()

    async def stream(self, job: str | None) -> AsyncIterator[bytes]:
        """Yield the messages for one page until its browser hangs up."""
        viewer = _Viewer(job)
        self._viewers.append(viewer)
        self._woken.set()
        try:
            yield b"retry: 1000\n\n"
            while not self._over and (message := await viewer.messages.get()) is not None:
                yield message
        finally:
            self._viewers.remove(viewer)

    async def _poll(self, job: str | None) -> None:
        try:
            history, update = await asyncio.to_thread(self._ask, job)
        except NetStormError as error:
            for viewer in self._viewers:
                if viewer.job == job:
                    self._tell(viewer, self._histories.get(job or ""), Update(lost=str(error)))
            return
        assert history.last is not None
        for viewer in self._viewers:
            if viewer.job == job:
                if history.last.jobs:
                    viewer.job = history.last.job  # not another job when this one has ended
                self._tell(viewer, history, update)

    def _ask(self, job: str | None) -> tuple[History, Update]:
        """Read a job's status, and enter it in its history. Runs on a thread: both may take a second."""
        status = self._read(job)
        name = status.job if status.jobs else ""
        history = self._histories.pop(name, None) or History()
        self._histories[name] = history  # the last one now
        for old in list(self._histories)[:-_MOST_JOBS]:
            del self._histories[old]
        return history, history.add(status)

    def _tell(self, viewer: _Viewer, history: History | None, update: Update) -> None:
        if not viewer.knows_all and history is not None:
            viewer.send(msgspec.structs.replace(history.everything(), lost=update.lost))
            viewer.knows_all = True
        else:
            viewer.send(update)


def live_app(feed: Feed, guard: PageGuard) -> Starlette:
    """Return the application that shows what a scheduler says."""

    async def events(request: Request) -> Response:
        stream = feed.stream(request.query_params.get("job"))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def no_recording(_: Request) -> Response:
        return Response(status_code=204)

    return _app(guard, Route("/events", events), Route("/recording.json", no_recording))


def replay_app(records: Mapping[str, JobRecord], guard: PageGuard) -> Starlette:
    """Return the application that shows a recording."""
    data = msgspec.json.encode(records)

    async def recording(_: Request) -> Response:
        return Response(data, media_type="application/json")

    return _app(guard, Route("/recording.json", recording))


def _app(guard: PageGuard, *routes: Route) -> Starlette:
    files = Mount("/", StaticFiles(directory=STATIC, html=True))
    return Starlette(routes=[*routes, files], middleware=[Middleware(guard.around)])


class PageGuard:
    """Who may see the page: whoever has the token, if there is one, and asks under a name of this machine.

    Args:
        token: in the link that is printed, and then in a cookie; None: whoever reaches the port, as with the
            scheduler's own pages.
        names: of this machine, besides addresses and localhost.
    """

    def __init__(self, token: str | None, names: Collection[str] = ()) -> None:
        self._token: Final = token
        self._names: Final = frozenset({*(name.lower() for name in names), os.uname().nodename.lower()})

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers those who may not see the page itself."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return

            async def with_policy(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], *_HEADERS]
                await send(message)

            answer = self._answer(Request(scope))
            await (app if answer is None else answer)(scope, receive, with_policy)

        return guarded

    def _answer(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused, or redirected; None: it is served."""
        if not is_own_host(request.headers.get("host", "localhost"), self._names):
            return _refusal("this is another host: ask by its address, or by localhost\n", 421)
        if self._token is None:
            return None
        cookie = f"netstorm-{request.url.port or 0}"  # cookies are the host's, not the port's
        if self._is_right(request.query_params.get("token", "")):
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(
                cookie, self._token, httponly=True, samesite="lax", secure=request.url.scheme == "https"
            )
            return redirect
        if self._is_right(request.cookies.get(cookie, "")):
            return None
        return _refusal("this page needs the link that netstorm dashboard has printed\n", 401)

    def _is_right(self, given: str) -> bool:
        # The time of a comparison must not tell how many characters were right.
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _refusal(text: str, status: int) -> Response:
    """Return the last answer over a connection: it makes room for those who may see the page."""
    return PlainTextResponse(text, status, headers={"connection": "close"})


_HEADERS: Final = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),  # the first address has the token
    (b"cache-control", b"no-store"),
]


_PORT: Final = 8787
"""Dask's dashboard's, which its users know."""


def open_socket(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens.

    Args:
        port: 0: any free one; None: 8787, or any free one if that is taken.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    if port is None:
        with contextlib.suppress(SettingsError):
            return open_socket(host, _PORT)
        port = 0
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"cannot listen at {bracketed(host)}:{port}: {reason}") from None


def serve(
    listener: socket.socket,
    make: Callable[[], tuple[Starlette, Feed | None]],
    *,
    certificate: str | None = None,
    key: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        listener: see `open_socket`.
        make: returns the application, and what it shows if that is live; called in the event loop.
        certificate, key: files in PEM form; None: connections are not encrypted.
    """

    async def run() -> None:
        app, feed = make()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=_PageConnection,
            limit_concurrency=_MOST_VIEWERS + _MOST_SILENT,
            lifespan="off",
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        server = _PageServer(config, asyncio.get_running_loop(), feed)
        polling = asyncio.create_task(feed.run()) if feed is not None else None
        try:
            await server.serve([listener])
        finally:
            if feed is not None and polling is not None:
                feed.end()
                await polling

    asyncio.run(run())


class _PageConnection(H11Protocol):
    """Keeps nobody out by being silent: Uvicorn waits for ever for a connection's first request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = self.loop.time()
        silent = [one for one in self.connections if isinstance(one, _PageConnection) and one.is_silent]
        if len(silent) > _MOST_SILENT:
            min(silent, key=lambda one: one.began).transport.abort()
        self.loop.call_later(_SILENCE_S, self._end_silence)

    @property
    def is_silent(self) -> bool:
        """Whether it is open, and no request has come."""
        has_asked: object = self.cycle  # None until then, though its type does not say so
        return has_asked is None and not self.transport.is_closing()

    def _end_silence(self) -> None:
        if self.is_silent:
            self.transport.abort()


class _PageServer(uvicorn.Server):
    """Ends the streams when a signal asks it to end; it would wait for their viewers to hang up."""

    def __init__(self, config: uvicorn.Config, loop: asyncio.AbstractEventLoop, feed: Feed | None) -> None:
        super().__init__(config)
        self._loop: Final = loop
        self._feed: Final = feed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
        self.force_exit = sig == signal.SIGINT and self.force_exit
        if self._feed is not None:
            self._loop.call_soon_threadsafe(self._feed.end)
