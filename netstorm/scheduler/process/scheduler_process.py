"""The scheduler's process: it drives the state machine with sockets, threads, signals and clocks.

Beside it, on threads of its own, the status server: /status.json and /metrics of running jobs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
from prometheus_client.metrics_core import Metric

from netstorm import clock
from netstorm.addresses import host_port
from netstorm.errors import Closed, PeerError, SettingsError, Unavailable, UsageError, WaitTimeout
from netstorm.observe.log import Counters, configure_logging
from netstorm.observe.private_files import write_private
from netstorm.observe.web import (
    Page,
    QueryPage,
    WebAccess,
    WebRefusals,
    WebServer,
    metrics_page,
    pages,
    web_access,
)
from netstorm.pslite.admission import job_key_of, log_if_plain, serves_others
from netstorm.pslite.host_addresses import listening_host
from netstorm.pslite.io_thread import Driver, start_driver
from netstorm.pslite.sntp_socket import SntpServer, packet_key
from netstorm.scheduler.build_status import build_status, job_line, metrics, metrics_of_several
from netstorm.scheduler.launched_ranks import LONGEST_LINE, read_rank_ended
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.policies import FormationResult
from netstorm.scheduler.process.formation_client import FormationClient
from netstorm.scheduler.process.hosted import (
    HostedMachine,
    HostingPlan,
    connect_several_jobs,
    naming_jobs,
    plan_hosting,
)
from netstorm.scheduler.snapshot import JobSnapshot, Outcome
from netstorm.scheduler.status import JobStatus
from netstorm.settings import Settings, foreign_variable

__all__ = ["Launcher", "RunningScheduler", "StatusServer", "run_scheduler", "start_on_threads"]


# The scheduler's process: it drives the state machine with sockets, threads, signals and clocks.

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.2
"""How long it takes at most to notice a signal."""

_LINGER_S: Final = 2.0
"""How long the last messages may take to leave."""

_STDIN: Final = 0
"""`sys.stdin` may be something else: a process that multiprocessing has forked has /dev/null there."""

_MOST_WORDS: Final = 65536
"""Bytes of the launcher's lines that are read at once: what a pipe holds."""

_PORT_TRIES: Final = 20
"""Attempts to find a port: one that the system chose for TCP may be taken in UDP."""


def run_scheduler(
    settings: Settings,
    *,
    any_port: bool = False,
    ready_file: Path | None = None,
    print_line: Callable[[str], None] = print,
    launcher: Launcher | None = None,
    beside_ranks: bool = False,
) -> int:
    """Run the scheduler of one job, or of several, to its end. Call it on the main thread.

    Args:
        settings: of the scheduler.
        any_port: listen on a port that the system chooses, not on `settings.scheduler_port`.
        ready_file: written once nodes can connect: HOST:PORT.
        print_line: prints a line for the user. Progress (who is waited for) goes to the log.
        launcher: the launcher that has started this process, and the ranks; None: somebody else has.
        beside_ranks: whoever has started this process sees to its end, with SIGINT if it must. SIGTERM is for
            the ranks, which all processes of a job get from Slurm or Kubernetes, and has no effect here: the
            ranks need the scheduler until they have agreed on what to do, and have left. Without a `launcher`
            standard input is a pipe, which is closed when rank 0 has ended.

    Returns:
        The exit code: 0 if all jobs ended well, 1 if one failed, 128 + the signal that stopped it.

    Raises:
        UsageError: no job can begin: settings that contradict each other, a wrong network file, a port
            that is taken, a ready file that cannot be written.
    """
    with _logging(settings), _signals(beside_ranks=beside_ranks) as signals, contextlib.ExitStack() as stack:
        _remove(ready_file)
        access = web_access(settings) if settings.http_port else None  # before nodes come: it may refuse
        plan = plan_hosting(settings)
        stack.callback(plan.close)
        running = start_on_threads(settings, plan, print_line, any_port=any_port)
        stack.callback(running.close)
        stack.enter_context(naming_jobs(running.driver.machine))
        address = host_port(settings.scheduler_host, running.driver.port)
        _write(ready_file, f"{address}\n")
        encrypted = "not encrypted" if job_key_of(settings) is None else "encrypted"
        print_line(f"netstorm scheduler: {plan.title} at {address}, {encrypted}; {plan.details}")
        log_if_plain(settings, _bind_host(settings), _log)
        _log.debug("time at UDP port %d; %s", running.sntp.port, plan.planning)
        status_server = open_status_server(settings, running.driver, access)
        if status_server is not None:
            stack.callback(status_server.close)
            print_line(f"netstorm scheduler: watch it with: {status_server.command}")
            _send_metrics(status_server.metrics, stack)
        if launcher is not None:
            stack.callback(_listen_to(launcher, running.driver))
        elif beside_ranks:
            stack.callback(_end_without_rank_0(running.driver))
        outcome = running.wait(signals)
    if launcher is None or outcome.exit_code == 0:  # of a failure it says the same, as its last line
        print_line(f"netstorm scheduler: {outcome.text}")
    if launcher is not None:
        launcher.on_outcome(outcome)
    return 128 + signals[0] if signals and outcome.exit_code else outcome.exit_code


def _send_metrics(collect: Callable[[], Iterator[Metric]], stack: contextlib.ExitStack) -> None:
    """Send metrics to a collector until the stack's end, if the environment names one."""
    if not any(map(foreign_variable, _COLLECTOR)):
        return
    try:
        from netstorm.observe.otlp import OtlpPusher  # noqa: PLC0415 - an extra, which few jobs need

        stack.callback(OtlpPusher(collect).close)
    except ImportError:
        _log.warning("%s is set: to send metrics, pip install 'netstorm[otel]'", " or ".join(_COLLECTOR))
    except SettingsError as error:
        _log.warning("no metrics are sent: %s", error)


_COLLECTOR: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The launcher that has started this process: what it says, and what it is told."""

    words: int
    """Descriptor from which its lines are read: which ranks have ended."""
    on_came: Callable[[int], None]
    """Called with each rank that comes before that."""
    on_begun: Callable[[], None]
    """Called when all nodes have joined."""
    on_outcome: Callable[[Outcome], None]
    """Called with how it went."""


def _listen_to(launcher: Launcher, driver: Driver[HostedMachine]) -> Callable[[], None]:
    """Let the job hear what the launcher says; return a function that ends that."""
    machine, words = driver.machine, launcher.words
    if not isinstance(machine, SchedulerMachine):  # it started no rank of another scheduler's jobs
        return lambda: None
    machine.on_came, machine.on_begun = launcher.on_came, launcher.on_begun
    received = b""

    def read() -> None:
        nonlocal received
        data = os.read(words, _MOST_WORDS)
        if not data:
            driver.thread.unwatch(words)
        *lines, received = (received + data).split(b"\n")
        received = received[-LONGEST_LINE:]
        for line in lines:
            try:
                machine.rank_ended(read_rank_ended(line), clock.monotonic())
            except PeerError as error:
                _log.warning("%s", error)

    driver.thread.watch(words, read)
    return lambda: driver.thread.unwatch(words)


def _end_without_rank_0(driver: Driver[HostedMachine]) -> Callable[[], None]:
    """End a job that has not begun when rank 0 has ended, which holds the other end of standard input.

    Nobody else might: a job that no rank has joined would wait for all of them.
    """
    machine, source = driver.machine, _STDIN
    if not isinstance(machine, SchedulerMachine):
        return lambda: None
    begun = False

    def note() -> None:
        nonlocal begun
        begun = True

    def read() -> None:
        if os.read(source, _MOST_WORDS):
            return
        driver.thread.unwatch(source)
        if not begun:
            reason = "rank 0, which started the scheduler, has ended before all nodes had joined"
            machine.stop(reason, clock.monotonic())

    machine.on_begun = note
    driver.thread.watch(source, read)
    return lambda: driver.thread.unwatch(source)


@dataclass(frozen=True, slots=True)
class RunningScheduler:
    """A running scheduler, with everything that must be closed."""

    driver: Driver[HostedMachine]
    sntp: SntpServer
    formation: FormationClient
    over: threading.Event

    def wait(self, signals: list[int]) -> Outcome:
        """Wait for the end. The first signal ends all jobs; the second ends the process at once."""
        stopping = False
        while not self.over.wait(_SLICE_S):
            error = self.driver.thread.error
            if error is not None:
                return Outcome(1, f"the I/O thread has died: {error!r}")
            if len(signals) > 1:
                return Outcome(1, f"stopped by a second {signal.Signals(signals[1]).name}")
            if signals and not stopping:
                stopping = True
                self._stop(f"the scheduler was stopped by {signal.Signals(signals[0]).name}")
        outcome = self.driver.machine.outcome
        assert outcome is not None
        return outcome

    def _stop(self, reason: str) -> None:
        with contextlib.suppress(Closed):  # the I/O thread has just died; `wait` says why
            self.driver.thread.post(lambda now: self.driver.machine.stop(reason, now))

    def close(self) -> None:
        """Let the last messages leave, and close everything."""
        self.formation.close()
        self.sntp.stop(self.driver.thread)
        self.driver.thread.close(linger_s=_LINGER_S)


def _bind_host(settings: Settings) -> str:
    return listening_host(settings.bind_host, settings.scheduler_host, for_others=serves_others(settings))


def start_on_threads(
    settings: Settings,
    plan: HostingPlan,
    print_line: Callable[[str], None],
    *,
    any_port: bool,
    reserved: int = 0,
) -> RunningScheduler:
    """Start a scheduler on threads of this process, and return it. It must be closed.

    Args:
        settings: of the scheduler.
        plan: what it serves.
        print_line: called with a line for the user whenever one of several jobs ends.
        any_port: listen on a port that the system chooses.
        reserved: most connections that may wait for nodes of jobs to come.

    Raises:
        SettingsError: the address cannot be listened on, or there is no key for it.
    """
    counters = Counters()
    # The host's time at the start, monotonic from then on: steps of its clock would look like slow links.
    origin_ns = clock.wall_ns() - clock.monotonic_ns()
    bind_host = _bind_host(settings)
    key = packet_key(settings)
    over = threading.Event()
    formation = FormationClient()

    def make_machine(port: int) -> HostedMachine:
        machine = plan.make_machine(counters, port)
        machine.on_over = lambda _: over.set()
        machine.on_form = formation.submit
        return machine

    def listen() -> RunningScheduler:
        driver = start_driver(
            make_machine,
            settings=settings,
            counters=counters,
            bind_host=bind_host,
            port=0 if any_port else settings.scheduler_port,
            rank=-1,
            ordered=lambda _: True,
            stamp=lambda: origin_ns + clock.monotonic_ns(),
            name="netstorm-scheduler",
            reserved=reserved,
        )
        try:
            sntp = SntpServer(
                bind_host,
                settings.sntp_port or driver.port,
                now=lambda: (origin_ns + clock.monotonic_ns()) / 1e9,
                counters=counters,
                key=key,
            )
        except BaseException:
            driver.thread.close()
            raise
        sntp.start(driver.thread)

        def post(function: Callable[[float], None]) -> None:
            with contextlib.suppress(Closed):  # the scheduler has ended
                driver.thread.post(function)

        def deliver(answer: FormationResult) -> None:
            post(lambda now: driver.machine.policy_formed(answer, now))

        formation.deliver = deliver
        connect_several_jobs(driver.machine, post, print_line)
        return RunningScheduler(driver, sntp, formation, over)

    for _ in range(_PORT_TRIES if any_port and not settings.sntp_port else 0):
        with contextlib.suppress(SettingsError):
            return listen()
    return listen()


@contextlib.contextmanager
def _logging(settings: Settings) -> Iterator[None]:
    """Log the scheduler's lines from level info on, even if others are not: waiting must not be silent."""
    configure_logging(settings)
    logger = logging.getLogger("netstorm.scheduler")
    before = logger.level
    logger.setLevel(min(logging.INFO, logging.getLogger("netstorm").getEffectiveLevel()))
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _signals(*, beside_ranks: bool) -> Iterator[list[int]]:
    """Collect the numbers of the signals that ask this process to end."""
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT or not beside_ranks:
            caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(ready_file: Path | None) -> None:
    """Remove the file of an earlier scheduler: a launcher must not take its address for this one's."""
    if ready_file is not None:
        with _naming(ready_file):
            ready_file.unlink(missing_ok=True)


def _write(ready_file: Path | None, text: str) -> None:
    """Write the file so that it is complete whenever it exists."""
    if ready_file is not None:
        with _naming(ready_file):
            draft = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
            write_private(draft, text.encode())
            draft.replace(ready_file)


@contextlib.contextmanager
def _naming(ready_file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--ready-file {str(ready_file)!r}: {error.strerror}; it must be a file that can be written"
        ) from None


# The status server: /status.json and /metrics of running jobs, on threads beside the scheduler's own.

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
                "/metrics": metrics_page(self.metrics, refusals),
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

    def metrics(self) -> Iterator[Metric]:
        """Return all metrics; see `status` for who may ask and the errors."""
        if not self._several:
            return metrics(self.status())
        return metrics_of_several(self._statuses(), self._driver.machine.counters.snapshot())

    def close(self) -> None:
        """Stop serving. Twice does no harm."""
        self._server.close()

    def _snapshots(self) -> tuple[JobSnapshot, ...]:
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
