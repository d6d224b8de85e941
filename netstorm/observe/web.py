"""A web server: it serves a WSGI application over HTTP or HTTPS, in threads of its own.

It is Python's own server: the pages are small, few and rarely requested, and a framework would be the
largest part of the process. Whatever clients send, they occupy at most a few threads for a few seconds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Final, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from netstorm import clock
from netstorm.errors import SettingsError
from netstorm.observe.pages import Application
from netstorm.observe.web_refusals import WebRefusals
from netstorm.protocol.frames import printable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["WebServer"]

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 16
"""Connections at once: few people watch a job. One more closes the oldest of those that have not asked for
anything yet, or, if all have, the oldest.
"""

_MOST_THREADS: Final = 2 * _MOST_CONNECTIONS
"""Threads of clients, with those whose connection was closed but that still make a page. One more client is
hung up on.
"""

_MOST_REQUEST_BYTES: Final = 16 * 1024
"""Largest request: its line and all headers. Bodies are not read at all."""

_SILENCE_S: Final = 5.0
"""How long the server waits for a client's next byte, and for the end of a TLS handshake."""

_LONGEST_S: Final = 20.0
"""How long a connection may last, whatever comes over it: a client that sends a byte a second ends here."""

_JOIN_S: Final = 3.0
"""How long closing waits for a thread to end."""

_RETRY_S: Final = 0.2
"""The pause after a connection could not be accepted, for example because too many files are open."""

_Request: TypeAlias = "socket.socket | tuple[bytes, socket.socket]"
"""As `socketserver` types it; of a TCP server always a socket."""


class WebServer:
    """Serves an application until it is closed. Requests run in threads of their own."""

    def __init__(
        self,
        application: Application,
        host: str,
        ports: Iterable[int],
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
        refusals: WebRefusals | None = None,
    ) -> None:
        """Listen at the first of `ports` that is free.

        Args:
            host: address to listen on; * for every interface.
            ports: 0: any that is free.
            name: of the thread that accepts connections.
            tls: with the server's certificate; None: connections are not encrypted.
            refusals: what is refused is counted there.

        Raises:
            SettingsError: none of them can be listened on.
        """
        self._server: Final = _listen(host, ports, tls, refusals or WebRefusals())
        self._server.set_app(application)
        self.port: Final = int(self._server.socket.getsockname()[1])
        self._thread: Final = threading.Thread(target=self._server.accept_all, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and close all connections. Twice does no harm."""
        self._server.refuse_all()
        self._thread.join(_JOIN_S)
        self._server.end()


@dataclass(slots=True, eq=False)
class _Connection:
    """One client's connection."""

    client: str
    thread: threading.Thread
    ends: float
    """When it is closed, whatever its state."""
    has_asked: bool = False
    """Whether a whole request has come."""


class _Server(WSGIServer):
    """Python's server with bounds on connections, an immediate end, and no look-up of its own host name."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, refusals: WebRefusals) -> None:
        every = host == "*" and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if ":" in host or every else socket.AF_INET
        self.request_queue_size = 128  # a client that finds no room tries again a second later
        self.refusals: Final = refusals
        self._tls: Final = tls
        self._ending: Final = threading.Event()
        self._lock: Final = threading.Lock()
        self._open: Final[dict[_Request, _Connection]] = {}
        """The oldest first."""
        self._threads: Final[set[threading.Thread]] = set()
        """Of all clients, with those whose connection was closed to make room."""
        super().__init__(("" if host == "*" else host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, but do not look up this host's name as HTTPServer does: that may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.address_family == socket.AF_INET6:  # the empty host means all addresses, of both families
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, self.server_address[0] != "")
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def accept_all(self) -> None:
        while not self._ending.is_set():
            self.timeout = self._end_overdue()
            self.handle_request()
        self.server_close()

    def _end_overdue(self) -> float | None:
        """Close connections that have lasted too long; return in how many seconds the next one will have."""
        now = clock.monotonic()
        with self._lock:
            overdue = [request for request, connection in self._open.items() if connection.ends <= now]
            for request in overdue:
                self._hang_up(request, "slow")
            return min((connection.ends - now for connection in self._open.values()), default=None)

    def _hang_up(self, request: _Request, reason: str) -> None:
        """Close a connection, whose thread then ends by itself. The caller has the lock."""
        self.refusals.note(reason, self._open.pop(request).client)
        _shut(request)

    def refuse_all(self) -> None:
        """Have `accept_all` return."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection

    def end(self) -> None:
        """Close all connections. No new one is accepted any more."""
        with self._lock:
            for request in self._open:
                _shut(request)
            left = [thread for thread in self._threads if thread.ident is not None]
        for thread in left:
            thread.join(_JOIN_S)

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            accepted, address = super().get_request()
        except OSError:
            self._ending.wait(_RETRY_S)
            raise
        if self._tls is None:
            return accepted, address
        try:
            # The handshake waits for the client, so it happens on the client's thread.
            return self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address
        except (OSError, ValueError) as error:  # it has hung up already
            accepted.close()
            raise ConnectionError("a client has hung up") from error

    def process_request(self, request: _Request, client_address: object) -> None:
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="netstorm-web", daemon=True
        )
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                idle = (one for one, connection in self._open.items() if not connection.has_asked)
                self._hang_up(next(idle, next(iter(self._open))), "crowded")
            is_full = len(self._threads) >= _MOST_THREADS
            if not is_full:
                ends = clock.monotonic() + _LONGEST_S
                self._open[request] = _Connection(_text(client_address), thread, ends)
                self._threads.add(thread)
        if is_full:
            self.refusals.note("full", _text(client_address))
            self.shutdown_request(request)
            return
        try:
            thread.start()
        except RuntimeError:
            self._forget(request, thread)
            raise

    def asks(self, request: _Request) -> None:
        """Note that a whole request has come: the client does not make room for another one."""
        with self._lock:
            connection = self._open.get(request)
            if connection is not None:
                connection.has_asked = True

    def _serve(self, request: _Request, client_address: object) -> None:
        try:
            if isinstance(request, ssl.SSLSocket):
                request.settimeout(_SILENCE_S)
                self._shake_hands(request, client_address)
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - the client caused it, or has gone
            self.handle_error(request, client_address)
        finally:
            self._forget(request, threading.current_thread())
            self.shutdown_request(request)

    def _shake_hands(self, request: ssl.SSLSocket, client_address: object) -> None:
        try:
            request.do_handshake()
        except OSError:
            self.refusals.note("handshake", _text(client_address))
            raise

    def _forget(self, request: _Request, thread: threading.Thread) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._threads.discard(thread)

    def handle_error(self, request: _Request, client_address: object) -> None:
        _log.debug("a client at %s", client_address, exc_info=True)


class _RequestReader(io.BufferedReader):
    """Reads the line and the headers of a request, and no more than they may have."""

    _left = _MOST_REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return a line.

        Raises:
            HTTPException: the request is too large.
        """
        most = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        line = super().readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise HTTPException(f"more than {_MOST_REQUEST_BYTES} bytes")
        return line


class _Handler(WSGIRequestHandler):
    """Serves one request. It logs requests only when debugging, and waits for no client for long."""

    timeout = _SILENCE_S
    server_version = "NetStorm"
    sys_version = ""
    rbufsize = 0
    server: _Server

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.rfile, io.RawIOBase)  # as its buffer has no size
        self.rfile = _RequestReader(self.rfile)

    def handle(self) -> None:
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
        try:
            super().handle()
        except HTTPException:  # of the first line; `parse_request` answers those of headers
            self.send_error(414)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Say what is wrong with a request. Those that are whole are answered by the application."""
        self.server.refusals.note(f"http_{int(code)}", _text(self.client_address))
        super().send_error(code, message, explain)

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        if is_whole:
            self.server.asks(self.request)
        return is_whole

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        _log.debug("%s: %s", self.address_string(), printable(format % args))


def _listen(host: str, ports: Iterable[int], tls: ssl.SSLContext | None, refusals: WebRefusals) -> _Server:
    tried, reason = [], "no port was given"
    for port in ports:
        tried.append(str(port))
        try:
            return _Server(host, port, tls, refusals)
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)  # errors of the name service have numbers of their own
            reason = os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
    raise SettingsError(f"cannot listen at {host or '*'}, TCP port {' or '.join(tried)}: {reason}")


def _text(address: object) -> str:
    return str(address[0]) if isinstance(address, tuple) else str(address)


def _shut(request: _Request) -> None:
    if not isinstance(request, socket.socket):
        return
    with contextlib.suppress(OSError):
        # Of an SSL socket too: its own method would let its thread go on in plain text.
        socket.socket.shutdown(request, socket.SHUT_RDWR)
