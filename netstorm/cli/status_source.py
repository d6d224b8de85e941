"""Where a job's status comes from: the scheduler that the user means, and how its pages are reached.

Every command that watches a job has the same options for that, and reads with this code.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import shlex
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeAlias
from urllib.parse import quote

import msgspec
import psutil
import typer

from netstorm.addresses import host_port, is_loopback, plain_address, split_host_port
from netstorm.cli.support import check_job, split_address
from netstorm.errors import Unavailable, UsageError
from netstorm.observe.web import read_token
from netstorm.protocol.frames import clean
from netstorm.pslite.host_addresses import is_own_address
from netstorm.scheduler.status import JobStatus
from netstorm.settings import Settings

__all__ = [
    "CaOption",
    "JobOption",
    "PipedStatus",
    "SchedulerOption",
    "StatusSource",
    "TokenOption",
    "find",
    "reach",
]

SchedulerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the scheduler; https://HOST:PORT if it has a certificate. Default: "
        "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT if they are set, else the scheduler that runs on this "
        "machine.",
        show_default=False,
    ),
]
JobOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the job, if the scheduler has several."),
]
TokenOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the scheduler's token. Default: NETSTORM_WEB_TOKEN_FILE.",
        show_default=False,
    ),
]
CaOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificates (PEM) to trust instead of the system's. The scheduler is reached over HTTPS.",
        show_default=False,
    ),
]


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

    @property
    def has_token(self) -> bool:
        """Whether the scheduler shows its jobs to those alone who bear a token."""
        return self._access.token is not None

    def status(self, job: str | None = None) -> JobStatus:
        """Return the status of a job; None: of the chosen one, or of the one that began first.

        Raises:
            Unavailable: there is no answer, or it is not a scheduler's.
            UsageError: the scheduler shows the job to those alone who bear its token.
        """
        connection = self._access.connect(self.host, self.port)
        try:
            wanted = job or self.job
            query = "" if wanted is None else f"?job={quote(wanted)}"
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
            raise UsageError(f"{self}: it wants {which}: --token-file FILE")
        return decoded(body, f"{self}: answers {response.status}")

    def __str__(self) -> str:
        """Return HOST:PORT."""
        return host_port(self.host, self.port)


def decoded(body: bytes, prefix: str) -> JobStatus:
    """Return a status from its JSON; `Unavailable`, which begins with `prefix`, if it is none."""
    try:
        return clean(msgspec.json.decode(body, type=JobStatus))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        raise Unavailable(f"{prefix}, {body[:200].decode(errors='replace').strip()!r}") from None


class PipedStatus:
    """The job whose status a command prints, a line each, as `netstorm top --json` does.

    Args:
        command: as a shell reads its words. It is started at once, and ends with its job, or when nobody
            reads.

    Raises:
        UsageError: it cannot be started.
    """

    def __init__(self, command: str) -> None:
        self._text: Final = command
        try:
            words = shlex.split(command)
            if not words:
                raise ValueError("expected a command")  # noqa: TRY301 - as shlex's own
            self._process: Final = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--through {command!r}: {reason}") from None
        self._last = b""
        self._came: Final = threading.Event()
        threading.Thread(target=self._read, name="netstorm-status", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline(_MOST_BYTES)).endswith(b"\n"):
            self._last = line
            self._came.set()
        self._last = b""
        self._came.set()

    def status(self, _job: str | None = None) -> JobStatus:
        """Return the newest status.

        Raises:
            Unavailable: there is none within the time for an answer, or the command has ended.
        """
        if not self._came.wait(_ANSWER_TIMEOUT_S):
            raise Unavailable(f"{self._text} has printed nothing yet")
        if not (line := self._last):
            raise Unavailable(f"{self._text} has ended, and so has the job, probably")
        return decoded(line, self._text)


def find(
    address: str | None, job: str | None = None, *, token_file: Path | None = None, ca: Path | None = None
) -> tuple[StatusSource, JobStatus]:
    """Return the scheduler that the user means, and its first answer.

    Args:
        address: as for `reach`.
        job: one of its jobs; None: the only one.
        token_file: the file of its token; None: what NETSTORM_WEB_TOKEN_FILE says.
        ca: a file of certificates to trust instead of the system's; it is reached over HTTPS.

    Raises:
        UsageError: there is none, or there are several; the message says what to do.
    """
    source, status = reach(address, job, token_file=token_file, ca=ca)
    jobs = _jobs_of(status)
    if job is None and len(jobs) > 1:
        raise UsageError(f"{source} has {len(jobs)} jobs: {', '.join(jobs)}; say which: --job NAME")
    if status.jobs:
        source.job = job or jobs[0]  # not another job, when this one has ended
    if job is None or not status.jobs:
        return source, status
    try:
        return source, source.status()
    except Unavailable as error:
        raise UsageError(f"--job {job}: it has just ended, or {error}") from None


def _jobs_of(status: JobStatus) -> list[str]:
    """Return the names of all jobs of a scheduler, from its answer."""
    return [line.job for line in status.jobs] or [status.job]


def reach(
    address: str | None, job: str | None = None, *, token_file: Path | None = None, ca: Path | None = None
) -> tuple[StatusSource, JobStatus]:
    """Return the scheduler that the user means, and its first answer, whichever jobs it has.

    Args:
        address: HOST:PORT, of the job's scheduler or of its HTTP server. None: what DMLC_PS_ROOT_URI and
            DMLC_PS_ROOT_PORT say if one of them is set, or else the one scheduler that runs here (of several,
            the one that has the job).
        job: one that it must have; None: any.
        token_file, ca: as for `find`.

    Raises:
        UsageError: there is none, or there are several; the message says what to do.
    """
    try:
        source, status = _reach(address, job, token_file, ca)
    except _NoScheduler as error:
        # The user asked for a job: that it is unknown comes first, and where it was looked for after that.
        raise UsageError(str(error) if job is None else f"--job {job}: no such job: {error}") from None
    check_job(job, _jobs_of(status), f"at {source}")
    return source, status


class _NoScheduler(UsageError):
    """No scheduler was found, or none that has the job, or several."""


def _reach(
    address: str | None, job: str | None, token_file: Path | None, ca: Path | None
) -> tuple[StatusSource, JobStatus]:
    settings = Settings.from_environment(elastic="")  # of a job: how many it begins with is not known here
    https = address is not None and address.startswith("https://")
    access = HttpAccess.load(settings, token_file, ca, https=https)
    if address is not None:
        host, port = split_address(address, "--scheduler")
        return _at(host, port, f"--scheduler {address}", access)
    if {settings.source("scheduler_host"), settings.source("scheduler_port")} != {"default"}:
        host, port = settings.scheduler_host, settings.scheduler_port
        return _at(host, port, f"DMLC_PS_ROOT_URI={host}, DMLC_PS_ROOT_PORT={port}", access)
    here, elsewhere = _schedulers()
    found = [answered for process in here if (answered := _answer_of(process, access)) is not None]
    having = [each for each in found if job in {None, *_jobs_of(each[1])}]
    if len(having) == 1:
        return having[0]
    if len(found) == 1:
        return found[0]
    if having:
        jobs = ", ".join(f"{', '.join(_jobs_of(status))} at {source}" for source, status in having)
        raise UsageError(
            f"{len(having)} schedulers run here: {jobs}; say which: --scheduler {having[0][0]}, for example"
        )
    if found:
        jobs = ", ".join(f"{', '.join(_jobs_of(status))} at {source}" for source, status in found)
        raise _NoScheduler(f"there are: {jobs}; type --job {_jobs_of(found[0][1])[0]}, for example")
    if elsewhere:
        raise _NoScheduler(_hint(elsewhere))
    raise _NoScheduler(
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
    raise _NoScheduler(
        f"{meant}: no scheduler there shows a job ({'; '.join(problems)}). The scheduler's first lines say "
        "where it can be watched; for other machines it needs NETSTORM_HTTP_BIND=* and "
        "NETSTORM_WEB_TOKEN_FILE, and not NETSTORM_HTTP_PORT=0; one with NETSTORM_WEB_CERT is reached with "
        "--scheduler https://HOST:PORT"
    )


def _hint(elsewhere: list[int]) -> str:
    namespaces = "--net" if os.getuid() == 0 else "--user --preserve-credentials --net"  # of their own
    return (
        f"the scheduler with process id {elsewhere[0]} is in another network namespace, perhaps that of an "
        f"emulated network: nsenter {namespaces} --target {elsewhere[0]} netstorm top"
    )


def _is_here(host: str) -> bool:
    """Return whether a host is this machine, by an address other than loopback."""
    try:
        meant = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(map(is_own_address, meant)) and not any(map(is_loopback, meant))


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


# How commands reach a scheduler's pages: plain or encrypted, with a token or without.

_ANSWER_TIMEOUT_S: Final = 5.0
"""Longest wait for an answer: the scheduler's machine may be busy."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """What every request of one command has in common. Its text does not show the token."""

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
