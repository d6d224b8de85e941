"""Where running jobs can be looked at: /status.json and /metrics, beside the scheduler's own thread."""

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
from netstorm.errors import SettingsError, Unavailable, WaitTimeout
from netstorm.observe.pages import Page, QueryPage, metrics_page, pages
from netstorm.observe.web import WebServer
from netstorm.pslite.process.driver import Driver
from netstorm.scheduler.observe.metrics import metrics, metrics_of_several
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.observe.status import JobStatus, describe, line_of
from netstorm.scheduler.process.hosted import Hosted
from netstorm.settings import Settings

__all__ = ["Watch", "open_watch"]

_log = logging.getLogger(__name__)

_FRESH_S: Final = 0.5
"""However many ask, the scheduler's thread takes a snapshot no more often than this."""

_ANSWER_S: Final = 2.0
"""How long that thread may take until those who ask are told that it does not answer."""

_HELP: Final = """\
NetStorm: {jobs}.
  /status.json   everything that is known of the job{choice}
  /metrics       the same for Prometheus
In a terminal: netstorm top --scheduler {http}
"""


class Watch:
    """Serves the status of all jobs until it is closed.

    Attributes:
        address: HOST:PORT at which it can be read.
        wanted: the port that the settings ask for.
    """

    def __init__(self, settings: Settings, driver: Driver[Hosted]) -> None:
        """Listen.

        Raises:
            SettingsError: the address cannot be listened on.
        """
        self._driver: Final = driver
        self._lock: Final = threading.Lock()
        self._made: tuple[float, list[JobStatus]] | None = None
        self._several: Final = settings.jobs != 1
        self._scheduler: Final = f"{settings.scheduler_host}:{driver.port}"
        application = pages(
            {
                "/": Page("text/plain; charset=utf-8", self._help),
                "/status.json": QueryPage(
                    "application/json", lambda query: msgspec.json.encode(self.status(query.get("job")))
                ),
                "/metrics": metrics_page(self._metrics, _add_process),
            }
        )
        self.wanted: Final = settings.http_port if settings.http_port > 0 else driver.port + 1
        host = settings.http_bind
        self._server: Final = WebServer(application, host, (self.wanted, 0), name="netstorm-watch")
        shown = settings.scheduler_host if host == "*" else host
        self.address: Final = f"[{shown}]:{self.port}" if ":" in shown else f"{shown}:{self.port}"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def status(self, job: str | None = None) -> JobStatus:
        """Return how a job is doing, or was a moment ago. Any thread but the scheduler's own.

        Args:
            job: its name; None: the only one, or the one that has been here longest.

        Raises:
            Closed: all is over.
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
        with self._lock:  # of those who ask together, one asks the scheduler
            now = clock.monotonic()
            if self._made is None or now - self._made[0] > _FRESH_S:
                wall = clock.wall()
                made = [
                    describe(snapshot, time=wall, scheduler=self._scheduler, http=self.address)
                    for snapshot in self._snapshots()
                ]
                if self._several:
                    lines = tuple(map(line_of, made))
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
        jobs = ", ".join(f"job {one.job!r}, phase {one.phase}" for one in self._statuses())
        choice = "; of several: /status.json?job=NAME" if self._several else ""
        return _HELP.format(jobs=jobs or "no job is here", choice=choice, http=self.address).encode()


def open_watch(settings: Settings, driver: Driver[Hosted]) -> Watch | None:
    """Return what a job can be looked at by, if it is wanted and possible: a job does not fail for this."""
    if settings.http_port == 0:
        return None
    try:
        watch = Watch(settings, driver)
    except SettingsError as error:
        _log.warning(
            "nobody can watch this job: %s; NETSTORM_HTTP_BIND must be an address of this machine, or *",
            error,
        )
        return None
    if settings.http_port > 0 and watch.port != settings.http_port:
        _log.warning("NETSTORM_HTTP_PORT=%d is taken: port %d it is", settings.http_port, watch.port)
    return watch


def _add_process(registry: CollectorRegistry) -> None:
    """Processor time, memory and files of this process, under the names that every client library uses."""
    ProcessCollector(registry=registry)
