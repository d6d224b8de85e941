"""A web server: it serves a WSGI application over HTTP, in threads of its own.

It is Python's own server: the pages are small, few and rarely requested, and a framework would be the
largest part of the process. Whatever clients send, they occupy at most a few threads for a few seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from netstorm.errors import SettingsError
from netstorm.observe.pages import Application

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["WebServer"]

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 16
"""Connections at once. One more closes the oldest: few people watch a job."""

_SILENCE_S: Final = 5.0
"""How long the server waits for a client's next byte."""

_JOIN_S: Final = 3.0
"""How long closing waits for a thread to end."""

_RETRY_S: Final = 0.2
"""The pause after a connection could not be accepted, for example because too many files are open."""

_Request: TypeAlias = "socket.socket | tuple[bytes, socket.socket]"
"""As `socketserver` types it; of a TCP server always a socket."""


class WebServer:
    """Serves an application until it is closed. Requests run in threads of their own."""

    def __init__(self, application: Application, host: str, ports: Iterable[int], *, name: str) -> None:
        """Listen at the first of `ports` that is free.

        Args:
            host: address to listen on; * for every interface.
            ports: 0: any that is free.
            name: of the thread that accepts connections.

        Raises:
            SettingsError: none of them can be listened on.
        """
        self._server: Final = _listen(host, ports)
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
        self._server.end()
        self._thread.join(_JOIN_S)


class _Server(WSGIServer):
    """Python's server with a bound on connections, an immediate end, and no look-up of its own host name."""

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.request_queue_size = 128  # a client that finds no room tries again a second later
        self._ending: Final = threading.Event()
        self._lock: Final = threading.Lock()
        self._open: Final[dict[_Request, threading.Thread]] = {}
        """Connections, the oldest first, and the threads that serve them."""
        super().__init__(("" if host == "*" else host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, but do not look up this host's name as HTTPServer does: that may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def accept_all(self) -> None:
        while not self._ending.is_set():
            self.handle_request()
        self.server_close()

    def end(self) -> None:
        self._ending.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        with self._lock:
            left = list(self._open.items())
        for request, thread in left:
            _shut(request)
            thread.join(_JOIN_S)

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            self._ending.wait(_RETRY_S)
            raise

    def process_request(self, request: _Request, client_address: object) -> None:
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="netstorm-web", daemon=True
        )
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]  # its thread ends by itself now
                _shut(oldest)
            self._open[request] = thread
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._open.pop(request, None)
            raise

    def _serve(self, request: _Request, client_address: object) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - the client caused it, or has gone
            self.handle_error(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        _log.debug("a client at %s", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    """Logs requests only when debugging, and waits for no client for long."""

    timeout = _SILENCE_S
    server_version = "NetStorm"
    sys_version = ""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        _log.debug("%s: %s", self.address_string(), format % args)


def _listen(host: str, ports: Iterable[int]) -> _Server:
    tried, reason = [], "no port was given"
    for port in ports:
        tried.append(str(port))
        try:
            return _Server(host, port)
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)  # errors of the name service have numbers of their own
            reason = os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
    raise SettingsError(f"cannot listen at {host or '*'}, TCP port {' or '.join(tried)}: {reason}")


def _shut(request: _Request) -> None:
    if not isinstance(request, socket.socket):
        return
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
