"""`netstorm top`: a live view of a running job."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import shutil
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import msgspec
import psutil
import typer

from netstorm.addresses import host_port, is_loopback, plain_address, split_host_port
from netstorm.cli.support import exit_on_usage_error, split_address
from netstorm.errors import Unavailable, UsageError
from netstorm.observe.web import read_token
from netstorm.protocol.frames import clean
from netstorm.scheduler.status import JobStatus
from netstorm.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["find_scheduler", "top"]


_EVERY_S: Final = 1.0
_WIDE: Final = 200
"""Columns of output that no terminal shows, unless COLUMNS says otherwise."""
_TRIES: Final = 3
"""Attempts without an answer, after which the job counts as ended."""


def top(
    *,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the scheduler; https://HOST:PORT if it has a certificate. Default: "
            "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT if they are set, else the scheduler that runs on this "
            "machine.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the job, if the scheduler has several."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the scheduler's token. Default: NETSTORM_WEB_TOKEN_FILE.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificates (PEM) to trust instead of the system's. The scheduler is reached over HTTPS.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON each second.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the present state, and exit.")] = False,
) -> None:
    """Show a running job: nodes, links, trees, times, and why the policy changed.

    The view is updated each second, until Ctrl-C or the end of the job. The fields of the JSON are
    described in docs/guides/watching-a-job.md.

    The exit code is 0, or 2 if there is no job to watch, or it may not be seen.
    """
    with exit_on_usage_error():
        source, status = find(scheduler, job, token_file=token_file, ca=ca)
        if as_json:
            _repeat(source, status, _print_json, once=once)
        else:
            _show(source, status, once=once)


def _show(source: StatusSource, status: JobStatus, *, once: bool) -> None:
    from rich.console import Console

    from netstorm.cli.top_view import view
    from netstorm.scheduler.bound import RoundBounds

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: nothing is to be cut
        console.width = shutil.get_terminal_size((_WIDE, 0)).columns
    if once or not console.is_terminal:
        bounds = RoundBounds()
        _repeat(
            source, status, lambda now: console.print(view(now, console.width, bounds.of(now))), once=once
        )
    else:
        _live(console, source, status)


def _live(console: Console, source: StatusSource, status: JobStatus) -> None:
    """Show the view on a screen of its own; what was shown last stays when the job has ended."""
    from rich.live import Live

    from netstorm.cli.top_view import view
    from netstorm.scheduler.bound import RoundBounds

    last, bounds = status, RoundBounds()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(now: JobStatus) -> None:
            nonlocal last
            last = now
            live.update(view(now, console.width, bounds.of(now)), refresh=True)

        ended = _repeat(source, status, show, once=False)
    if ended:
        console.print(view(last, console.width, bounds.of(last)))
        console.print(f"{source} answers no more: the job has probably ended.", highlight=False)


def _print_json(status: JobStatus) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(status).decode())


def _repeat(
    source: StatusSource, status: JobStatus, show: Callable[[JobStatus], None], *, once: bool
) -> bool:
    """Show the status each second. Return whether the job ended; if not, Ctrl-C did."""
    from netstorm import clock

    failed = 0
    try:
        show(status)
        while not once and failed < _TRIES:
            clock.sleep(_EVERY_S)
            try:
                status = source.status()
            except Unavailable:
                failed += 1
            else:
                failed = 0
                show(status)
    except KeyboardInterrupt:
        return False
    return not once


# Finds the scheduler that the user means, and reads a job's status from it over HTTP.

_MOST_BYTES: Final = 64 * 2**20
"""Largest answer that is read: the server may not be a scheduler."""


class StatusSource:
    """A scheduler's HTTP address."""

    def __init__(self, host: str, port: int, access: HttpAccess) -> None:
        self.host: Final = host
        self.port: Final = port
        self._access: Final = access
        self.job: str | None = None
        """Name of the job to ask for; None: the one that began first."""

    def status(self) -> JobStatus:
        """Return the status of the chosen job, or of the one that began first.

        Raises:
            Unavailable: there is no answer, or it is not a scheduler's.
            UsageError: the scheduler shows the job to those alone who bear its token.
        """
        connection = self._access.connect(self.host, self.port)
        try:
            query = "" if self.job is None else f"?job={quote(self.job)}"
            connection.request("GET", f"/status.json{query}", headers=self._access.headers)
            response = connection.getresponse()
            body = response.read(_MOST_BYTES)
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"{self}: its certificate is not trusted: {error.verify_message}; --ca FILE names the "
                "certificates that are, and the address must be one that the certificate names"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(f"{self}: {reason}") from None
        finally:
            connection.close()
        if response.status == http.client.UNAUTHORIZED:
            which = "a token" if self._access.token is None else "another token than the given one"
            raise UsageError(f"{self}: it wants {which}: netstorm top --token-file FILE")
        try:
            return clean(msgspec.json.decode(body, type=JobStatus))
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            text = body[:200].decode(errors="replace").strip()
            raise Unavailable(f"{self}: answers {response.status}, {text!r}") from None

    def __str__(self) -> str:
        """Return HOST:PORT."""
        return host_port(self.host, self.port)


def find(
    address: str | None, job: str | None = None, *, token_file: Path | None = None, ca: Path | None = None
) -> tuple[StatusSource, JobStatus]:
    """Return the scheduler that the user means, and its first answer.

    Args:
        address: as for `find_scheduler`.
        job: one of its jobs; None: the only one.
        token_file: the file of its token; None: what NETSTORM_WEB_TOKEN_FILE says.
        ca: a file of certificates to trust instead of the system's; it is reached over HTTPS.

    Raises:
        UsageError: there is none, or there are several; the message says what to do.
    """
    settings = Settings.from_environment()
    https = address is not None and address.startswith("https://")
    source, status = find_scheduler(address, settings, HttpAccess.load(settings, token_file, ca, https=https))
    jobs = [line.job for line in status.jobs] or [status.job]
    names = ", ".join(jobs)
    if job is None:
        if len(jobs) > 1:
            raise UsageError(f"{source} has {len(jobs)} jobs: {names}; say which: netstorm top --job NAME")
        if status.jobs:
            source.job = jobs[0]  # not another job, when this one has ended
        return source, status
    if job not in jobs:
        raise UsageError(f"--job {job}: no such job at {source}; there are: {names}")
    if not status.jobs:
        return source, status
    source.job = job
    try:
        return source, source.status()
    except Unavailable as error:
        raise UsageError(f"--job {job}: it has just ended, or {error}") from None


def find_scheduler(
    address: str | None, settings: Settings, access: HttpAccess
) -> tuple[StatusSource, JobStatus]:
    """Return the scheduler that the user means, and its first answer.

    Args:
        address: HOST:PORT, of the job's scheduler or of its HTTP server. None: what DMLC_PS_ROOT_URI and
            DMLC_PS_ROOT_PORT say if one of them is set, or else the one scheduler that runs here.
        settings: of this process.
        access: how its pages are reached.

    Raises:
        UsageError: there is none, or there are several; the message says what to do.
    """
    if address is not None:
        host, port = split_address(address, "--scheduler")
        return _at(host, port, f"--scheduler {address}", access)
    if {settings.source("scheduler_host"), settings.source("scheduler_port")} != {"default"}:
        host, port = settings.scheduler_host, settings.scheduler_port
        return _at(host, port, f"DMLC_PS_ROOT_URI={host}, DMLC_PS_ROOT_PORT={port}", access)
    here, elsewhere = _schedulers()
    found = [answered for process in here if (answered := _answer_of(process, access)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        jobs = ", ".join(f"{status.job!r} at {source}" for source, status in found)
        raise UsageError(
            f"{len(found)} schedulers run here: {jobs}; say which: netstorm top --scheduler HOST:PORT"
        )
    if elsewhere:
        raise UsageError(_hint(elsewhere))
    raise UsageError(
        "no job of yours runs on this machine; say where its scheduler is: netstorm top --scheduler "
        "HOST:PORT (its first lines say it), or set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
    )


def _at(host: str, port: int, meant: str, access: HttpAccess) -> tuple[StatusSource, JobStatus]:
    """Return the scheduler that listens on this port, for nodes or for HTTP."""
    problems = []
    # By default the HTTP port is the one after the nodes' port, which speaks another protocol.
    places = [(host, port + 1), (host, port)]
    if _is_here(host):  # by default, HTTP listens on the loopback interface only
        places += [("127.0.0.1", port + 1), ("::1", port + 1)]
    for place, tried in places:
        source = StatusSource(place, tried, access)
        try:
            status = source.status()
        except Unavailable as error:
            problems.append(str(error))
            continue
        if any(_port_of(shown) == port for shown in (status.scheduler, status.http)) or tried == port:
            return source, status
        problems.append(f"{source}: that is the scheduler at {status.scheduler}")
    elsewhere = _schedulers()[1] if is_loopback(host) else []
    if elsewhere:
        problems.append(_hint(elsewhere))
    raise UsageError(
        f"{meant}: no scheduler there shows a job ({'; '.join(problems)}). The scheduler's first lines say "
        "where it can be watched; for other machines it needs NETSTORM_HTTP_BIND=* and "
        "NETSTORM_WEB_TOKEN_FILE, and not NETSTORM_HTTP_PORT=0; one with NETSTORM_WEB_CERT is reached with "
        "--scheduler https://HOST:PORT"
    )


def _hint(elsewhere: list[int]) -> str:
    return (
        f"the scheduler with process id {elsewhere[0]} is in another network namespace, perhaps that of an "
        f"emulated network: nsenter --net --target {elsewhere[0]} netstorm top"
    )


def _is_here(host: str) -> bool:
    """Return whether a host is this machine, by an address other than loopback."""
    try:
        meant = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(meant & own) and not any(map(is_loopback, meant))


def _port_of(address: str) -> int:
    with contextlib.suppress(ValueError):  # it has none, or is not a scheduler
        return split_host_port(address)[1]
    return 0


def _schedulers() -> tuple[list[psutil.Process], list[int]]:
    """Return the schedulers of this user on this machine, and the process ids of those in other network
    namespaces.
    """
    here, elsewhere = [], []
    for process in psutil.process_iter(["cmdline", "uids"]):
        uids = process.info["uids"]
        if uids is None or uids.real != os.getuid() or not _is_scheduler(process.info["cmdline"] or []):
            continue
        if _network_of(process.pid) == _network_of(os.getpid()):
            here.append(process)
        else:
            elsewhere.append(process.pid)
    return here, elsewhere


def _answer_of(process: psutil.Process, access: HttpAccess) -> tuple[StatusSource, JobStatus] | None:
    """Return the HTTP address of a scheduler of this machine, and its status; None: it has none."""
    for host, port in _listening(process):
        source = StatusSource(host, port, access)
        with contextlib.suppress(Unavailable):
            return source, source.status()
    return None


def _network_of(pid: int) -> str:
    """Return the name of a process's network namespace; empty if it cannot be read."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _is_scheduler(words: list[str]) -> bool:
    """Return whether a command line is `netstorm scheduler`'s, or `python -m netstorm scheduler`'s."""
    for word, following in itertools.pairwise(words):
        if following == "scheduler" and word.rpartition("/")[2] == "netstorm":
            return True
    return False


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Return where a process listens, the highest port first: usually the HTTP port."""
    try:
        ask = process.net_connections if hasattr(process, "net_connections") else process.connections
        connections = ask(kind="tcp")
    except (psutil.Error, OSError):
        return []
    found = {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}
    every = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104 -- read, not bound
    return sorted(
        ((every.get(address.ip, plain_address(address.ip)), address.port) for address in found),
        key=lambda place: -place[1],
    )


# How `netstorm top` reaches a scheduler's pages: plain or encrypted, with a token or without.

_ANSWER_TIMEOUT_S: Final = 5.0
"""Longest wait for an answer: the scheduler's machine may be busy."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """What every request of one `netstorm top` has in common. Its text does not show the token."""

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def load(cls, settings: Settings, token_file: Path | None, ca: Path | None, *, https: bool) -> HttpAccess:
        """Return the access that options and settings describe.

        Args:
            settings: name the token's file if there is no option.
            token_file: the option --token-file.
            ca: the option --ca: the certificates that are trusted instead of the system's; it means HTTPS.
            https: whether the address says HTTPS.

        Raises:
            UsageError: a file cannot be used.
        """
        token = None
        if token_file is not None:
            token = read_token(token_file, "--token-file")
        elif settings.web_token_file:
            token = read_token(Path(settings.web_token_file), "NETSTORM_WEB_TOKEN_FILE")
        return cls(token, _tls(ca) if https or ca is not None else None)

    def connect(self, host: str, port: int) -> http.client.HTTPConnection:
        """Return a connection, which is opened with the first request."""
        if self.tls is None:
            return http.client.HTTPConnection(host, port, timeout=_ANSWER_TIMEOUT_S)
        return http.client.HTTPSConnection(host, port, timeout=_ANSWER_TIMEOUT_S, context=self.tls)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


def _tls(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        problem = error.reason or str(error)
    except OSError as error:
        problem = error.strerror or str(error)
    raise UsageError(f"--ca {str(ca)!r}: {problem}; expected a file with certificates in PEM form")
