"""The web server of a process: its pages, who may see them, and what it refuses."""

from __future__ import annotations

import contextlib
import hmac
import io
import logging
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from netstorm import clock
from netstorm.addresses import is_address, is_loopback, plain_address
from netstorm.errors import NetStormError, SettingsError
from netstorm.observe.private_files import is_readable_by_others
from netstorm.protocol.frames import printable
from netstorm.settings import Settings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from typing_extensions import Self

__all__ = [
    "Page",
    "QueryPage",
    "WebAccess",
    "WebRefusals",
    "WebServer",
    "is_own_host",
    "metrics_page",
    "pages",
    "read_token",
    "web_access",
    "with_token",
]


# A web server: it serves a WSGI application over HTTP or HTTPS, in threads of its own.
#
# It is Python's own server: the pages are small, few and rarely requested, and a framework would be the
# largest part of the process. Whatever clients send, they occupy at most a few threads for a few seconds.

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
class _WebConnection:
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
        self._open: Final[dict[_Request, _WebConnection]] = {}
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
                self._open[request] = _WebConnection(_text(client_address), thread, ends)
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


# The pages of a web server, by path, made when requested. One kind serves metrics to Prometheus.

Application: TypeAlias = "WSGIApplication"
"""See PEP 3333. `wsgiref.types` is Python 3.11's."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that is made anew for each request."""

    content_type: str
    make: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class QueryPage:
    """A page that depends on the query in its address."""

    content_type: str
    make: Callable[[Mapping[str, str]], bytes]


def pages(by_path: Mapping[str, Page | QueryPage | Application]) -> Application:
    """Return the application that serves these pages, and error pages where it cannot."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        def answer(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> list[bytes]:
            headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
            start_response(status, [*headers, ("Cache-Control", "no-store")])
            return [] if environ.get("REQUEST_METHOD") == "HEAD" else [body]

        page = by_path.get(environ.get("PATH_INFO", ""))
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            return answer("405 Method Not Allowed", b"GET or HEAD\n")
        if page is None:
            return answer("404 Not Found", f"there is: {' '.join(sorted(by_path))}\n".encode())
        try:
            if isinstance(page, Page):
                return answer("200 OK", page.make(), page.content_type)
            if isinstance(page, QueryPage):
                query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
                return answer("200 OK", page.make(query), page.content_type)
            return page(environ, start_response)
        except NetStormError as error:
            return answer("503 Service Unavailable", f"no answer from the job: {error}\n".encode())
        except Exception:  # noqa: BLE001 - the client may have caused it; others must not suffer
            _log.warning("while making a page", exc_info=True)
            return answer("500 Internal Server Error", b"this page cannot be made; the log says why\n")

    return application


def metrics_page(collect: Callable[[], Iterable[Metric]], refusals: WebRefusals) -> Application:
    """Return the page of metrics, in the format that Prometheus requests, with processor time, memory and
    files of this process.

    Args:
        collect: makes the metrics, for each request.
        refusals: are among them.
    """
    registry = CollectorRegistry()
    registry.register(_Collected(collect))
    ProcessCollector(registry=registry)
    refusals.register(registry)
    made: Application = make_wsgi_app(registry)
    return made


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: otherwise the registry would collect the metrics when it registers this."""
        return ()


_EVERY_S: Final = 60.0
"""Least time between two log lines of one reason: whoever guesses tokens cannot fill the disk."""


class WebRefusals:
    """Counts and logs what a web server refuses. Any thread may use it. Reasons are the program's own words,
    so they are few.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._counts: Final[dict[str, int]] = {}
        self._logged: Final[dict[str, tuple[float, int]]] = {}
        """By reason: when it was logged last, and the count of that time."""

    def note(self, reason: str, client: str) -> None:
        """Record a refusal.

        Args:
            reason: one word, a label in /metrics.
            client: its address, for a person.
        """
        now = clock.monotonic()
        with self._lock:
            count = self._counts[reason] = self._counts.get(reason, 0) + 1
            at, before = self._logged.get(reason, (-_EVERY_S, 0))
            if now - at < _EVERY_S:
                return
            self._logged[reason] = (now, count)
        more = f" (and {count - before - 1} others since the last such line)" if count - before > 1 else ""
        _log.warning("web pages: refused a client at %s: %s%s", plain_address(client), reason, more)

    def counts(self) -> dict[str, int]:
        """Return how many there were, by reason."""
        with self._lock:
            return dict(self._counts)

    def register(self, registry: CollectorRegistry) -> None:
        """Add the counts to a page of metrics."""
        registry.register(_Counts(self))


class _Counts(Collector):
    def __init__(self, refusals: WebRefusals) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "netstorm_web_refused", "clients of the web pages that were refused", labels=["reason"]
        )
        for reason, count in self._refusals.counts().items():
            family.add_metric([reason], count)
        yield family


# Who may see the web pages of a process: addresses, the bearer token, and TLS.
#
# Pages that only this machine can reach need nothing. All others need a token, so that whoever reaches a port
# sees nothing of a job. The token is in a file, because command lines and variables can be read by others.

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")
"""The characters of a bearer token (RFC 6750, section 2.1). 16 random ones are beyond guessing."""

_MOST_BYTES: Final = 1024

_REFUSED: Final = (
    b"this page needs the job's token: netstorm top --token-file FILE, or a header "
    b'"Authorization: Bearer TOKEN"\n'
)


_PORT: Final = re.compile(r":\d*$")

_OTHER_HOST: Final = (
    b"this is another host: ask for this page by its address, by localhost, or by the name in "
    b"NETSTORM_HTTP_BIND, DMLC_PS_ROOT_URI or DMLC_NODE_HOST; or give it a token "
    b"(NETSTORM_WEB_TOKEN_FILE)\n"
)


@dataclass(frozen=True, slots=True)
class WebAccess:
    """Who may see the pages of one web server. Its text does not show the token."""

    token: str | None = field(default=None, repr=False)
    """What every request must bear; None: nothing."""
    tls: ssl.SSLContext | None = None
    """Encrypts connections; None: they are plain."""
    names: frozenset[str] = frozenset()
    """Under which pages without a token may be asked for, besides addresses and localhost."""

    @property
    def scheme(self) -> str:
        """How an address begins: http or https."""
        return "http" if self.tls is None else "https"

    def guard(self, application: Application, refusals: WebRefusals) -> Application:
        """Return the application for those who may see it; others are counted."""
        if self.token is None:
            return with_known_host(application, self.names, refusals)
        return with_token(application, self.token, refusals)


def web_access(settings: Settings) -> WebAccess:
    """Return who may see the web pages of a process, and load the files for that.

    Raises:
        SettingsError: everybody could see them, a file cannot be used, or a certificate is missing.
    """
    token = None
    if settings.web_token_file:
        token = read_token(Path(settings.web_token_file), "NETSTORM_WEB_TOKEN_FILE")
    if settings.web_key and not settings.web_cert:
        raise SettingsError(
            f"NETSTORM_WEB_KEY={settings.web_key} without NETSTORM_WEB_CERT: expected the certificate, too"
        )
    tls = _tls(settings.web_cert, settings.web_key or None) if settings.web_cert else None
    if not is_loopback(settings.http_bind):
        if token is None and settings.security != "off":
            raise SettingsError(
                f"NETSTORM_HTTP_BIND={settings.http_bind} would show the job to whoever reaches the port: "
                "give NETSTORM_WEB_TOKEN_FILE a file with a token, or set NETSTORM_SECURITY=off behind a VPN"
            )
        if token is not None and tls is None:
            _log.warning(
                "NETSTORM_HTTP_BIND=%s without NETSTORM_WEB_CERT: the token travels in plain text, and "
                "whoever is on its way can read it",
                settings.http_bind,
            )
    names = (settings.http_bind, settings.scheduler_host, settings.node_host, os.uname().nodename)
    return WebAccess(token, tls, frozenset(name.lower() for name in names if name))


def read_token(path: Path, source: str) -> str:
    """Return the token of a file: its only line. It may be a pipe.

    Args:
        path: of the file.
        source: the option or variable that names it, for messages.

    Raises:
        SettingsError: it cannot be read, others can read it, or it has no token. The text shows none of the
            contents.
    """
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise SettingsError(f"{source}={str(path)!r}: cannot read the token: {error.strerror}") from None
    if is_readable_by_others(state):
        raise SettingsError(
            f"{source}={str(path)!r}: mode {stat.S_IMODE(state.st_mode):04o} lets others read the token: "
            f"expected 0600 (or 0440, of root, with a group of this process): `chmod 600 {path}`, and make a "
            "new token if others may have read this one"
        )
    text = content.decode("ascii", errors="replace").strip()
    if _TOKEN.fullmatch(text) is None:
        raise SettingsError(
            f"{source}={str(path)!r}: expected one line with a token of 16 to 512 letters, digits and "
            f".~+/_-; `(umask 077; openssl rand -hex 32 > {path})` makes one"
        )
    return text


def with_token(application: Application, token: str, refusals: WebRefusals) -> Application:
    """Return an application that answers 401 to requests that do not bear the token (RFC 6750)."""
    wanted = token.encode()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        # The time of a comparison must not tell how many characters were right.
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), wanted)
        if is_right and scheme.lower() == "bearer":
            return application(environ, start_response)
        refusals.note("wrong_token" if given else "no_token", environ.get("REMOTE_ADDR", ""))
        headers = [
            ("WWW-Authenticate", 'Bearer realm="NetStorm"'),
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(_REFUSED))),
            ("Cache-Control", "no-store"),
        ]
        start_response("401 Unauthorized", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [_REFUSED]

    return guarded


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Return whether a request's `Host` is one of this process's names, an address, or localhost.

    A browser asks for the name that a page elsewhere gives it, even if that name leads here (DNS rebinding),
    and lets that page read the answer. An address, or localhost, is nobody else's name.
    """
    host = _PORT.sub("", header.strip().lower())
    return host == "localhost" or host in names or is_address(host.strip("[]"))


def with_known_host(application: Application, names: frozenset[str], refusals: WebRefusals) -> Application:
    """Return an application that answers 421 to requests for a name that is not this process's."""

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_own_host(environ.get("HTTP_HOST", "localhost"), names):
            return application(environ, start_response)
        refusals.note("wrong_host", environ.get("REMOTE_ADDR", ""))
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(_OTHER_HOST))),
            ("Cache-Control", "no-store"),
        ]
        start_response("421 Misdirected Request", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [_OTHER_HOST]

    return guarded


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    names = f"NETSTORM_WEB_CERT={certificate!r}" + (f", NETSTORM_WEB_KEY={key!r}" if key else "")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise SettingsError(
            f"{names}: {error.reason or error}; expected a certificate and its private key, which is not "
            "encrypted, in PEM form"
        ) from None
    except OSError as error:
        raise SettingsError(f"{names}: {error.strerror}") from None
    return context


def _no_password() -> str:
    """Stand for the question that OpenSSL would ask on the terminal about an encrypted key."""
    return ""
