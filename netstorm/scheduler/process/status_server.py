"""The status server: /status.json and /metrics of running jobs, on threads beside the scheduler's own."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from netstorm import clock
from netstorm.addresses import host_port
from netstorm.errors import SettingsError, Unavailable, WaitTimeout
from netstorm.observe.web import Page, QueryPage, WebAccess, WebRefusals, WebServer, metrics_page, pages
from netstorm.pslite.io_thread import Driver
from netstorm.scheduler.observe.build_status import build_status, job_line
from netstorm.scheduler.observe.metrics import metrics, metrics_of_several
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.observe.status import JobStatus
from netstorm.scheduler.process.hosted import HostedMachine
from netstorm.settings import Settings

__all__ = ["StatusServer", "open_status_server"]

_log = logging.getLogger(__name__)

_FRESH_S: Final = 0.5
"""The scheduler's thread takes snapshots no more often than this, however many clients ask."""

_ANSWER_S: Final = 2.0
"""How long that thread may take. After that clients are told that the scheduler does not answer."""

_HELP: Final = """\
NetStorm: {jobs}.
  /status.json   everything that is known of the job{choice}
  /metrics       the same for Prometheus
In a terminal: {command}
"""


class StatusServer:
    """Serves the status of all jobs until it is closed.

    Attributes:
        address: HOST:PORT at which it listens.
        command: shows the job in a terminal of this machine.
    """

    def __init__(self, settings: Settings, driver: Driver[HostedMachine], access: WebAccess) -> None:
        """Listen.

        Args:
            settings: the scheduler's.
            driver: its I/O thread.
            access: who may see the pages.

        Raises:
            SettingsError: the address cannot be listened on.
        """
        self._driver: Final = driver
        self._lock: Final = threading.Lock()
        self._made: tuple[float, list[JobStatus]] | None = None
        self._several: Final = settings.jobs != 1
        self._scheduler: Final = host_port(settings.scheduler_host, driver.port)
        refusals = WebRefusals()
        application = pages(
            {
                "/": Page("text/plain; charset=utf-8", self._help),
                "/status.json": QueryPage(
                    "application/json", lambda query: msgspec.json.encode(self.status(query.get("job")))
                ),
                "/metrics": metrics_page(self._metrics, _add_process, refusals.register),
            }
        )
        application = access.guard(application, refusals)
        wanted_port = settings.http_port if settings.http_port > 0 else driver.port + 1
        host = settings.http_bind
        self._server: Final = WebServer(
            application,
            host,
            (wanted_port, 0),
            name="netstorm-status",
            tls=access.tls,
            refusals=refusals,
        )
        shown = settings.scheduler_host if host == "*" else host
        self.address: Final = host_port(shown, self.port)
        self.command: Final = (
            f"netstorm top --scheduler {'' if access.tls is None else 'https://'}{self.address}"
            f"{'' if access.token is None else f' --token-file {settings.web_token_file}'}"
        )

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self._server.port

    def status(self, job: str | None = None) -> JobStatus:
        """Return the status of a job, or what it was a moment ago. Any thread but the scheduler's own.

        Args:
            job: its name; None: the only one, or the one that has been here longest.

        Raises:
            Closed: the scheduler has ended.
            WaitTimeout: the scheduler's thread does not answer.
            Unavailable: no such job is here.
        """
        every = self._statuses()
        for status in every if job is None else reversed(every):
            if job in (None, status.job):
                return status
        here = ", ".join(status.job for status in every)
        raise Unavailable(
            f"no job {job!r} is here; there are: {here}" if here and job else "no job is here at present"
        )

    def _statuses(self) -> list[JobStatus]:
        with self._lock:  # of clients that ask at once, only one makes the scheduler answer
            now = clock.monotonic()
            if self._made is None or now - self._made[0] > _FRESH_S:
                wall = clock.wall()
                made = [
                    build_status(snapshot, time=wall, scheduler=self._scheduler, http=self.address)
                    for snapshot in self._snapshots()
                ]
                if self._several:
                    lines = tuple(map(job_line, made))
                    made = [msgspec.structs.replace(status, jobs=lines) for status in made]
                self._made = (now, made)
            return self._made[1]

    def _metrics(self) -> Iterator[Metric]:
        if not self._several:
            return metrics(self.status())
        return metrics_of_several(self._statuses(), self._driver.machine.counters.snapshot())

    def close(self) -> None:
        """Stop serving. Twice does no harm."""
        self._server.close()

    def _snapshots(self) -> tuple[Snapshot, ...]:
        future = self._driver.thread.call(self._driver.machine.snapshots)
        try:
            return future.result(_ANSWER_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise WaitTimeout(f"the scheduler has not answered for {_ANSWER_S:g} s") from None

    def _help(self) -> bytes:
        jobs = ", ".join(f"job {status.job!r}, phase {status.phase}" for status in self._statuses())
        choice = "; of several: /status.json?job=NAME" if self._several else ""
        return _HELP.format(jobs=jobs or "no job is here", choice=choice, command=self.command).encode()


def open_status_server(
    settings: Settings, driver: Driver[HostedMachine], access: WebAccess | None
) -> StatusServer | None:
    """Return a status server if there is access to one and it can listen: a job does not fail for this."""
    if access is None:
        return None
    try:
        server = StatusServer(settings, driver, access)
    except SettingsError as error:
        _log.warning(
            "nobody can watch this job: %s; NETSTORM_HTTP_BIND must be an address of this machine, or *",
            error,
        )
        return None
    if settings.http_port > 0 and server.port != settings.http_port:
        _log.warning(
            "NETSTORM_HTTP_PORT=%d is taken: port %d is used instead", settings.http_port, server.port
        )
    return server


def _add_process(registry: CollectorRegistry) -> None:
    """Add processor time, memory and files of this process, under the names that client libraries use."""
    ProcessCollector(registry=registry)
