"""The shell around the scheduler's state machine: sockets, threads, signals, the time, the end."""

from __future__ import annotations

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

from netstorm import clock
from netstorm.errors import Closed, SettingsError, UsageError
from netstorm.observe.counters import Counters
from netstorm.observe.log import configure_logging
from netstorm.pslite.clock.sntp_socket import SntpServer
from netstorm.pslite.process.driver import Driver, start_driver
from netstorm.pslite.system.addresses import resolve
from netstorm.scheduler.job_phase import Outcome
from netstorm.scheduler.policies.formation import FormationResult
from netstorm.scheduler.process.formation_client import Former
from netstorm.scheduler.process.hosted import Hosted, Plan, naming_jobs, plan, serve_several
from netstorm.scheduler.process.status_server import open_watch
from netstorm.settings import Settings

__all__ = ["run_scheduler"]

_SLICE_S: Final = 0.2
"""How long a signal may wait to be noticed."""

_LINGER_S: Final = 2.0
"""How long last words may take to leave."""

_PORT_TRIES: Final = 20
"""A port that the system chose for TCP may be taken in UDP."""


def run_scheduler(
    settings: Settings,
    *,
    any_port: bool = False,
    ready_file: Path | None = None,
    say: Callable[[str], None] = print,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> int:
    """Run the scheduler of one job, or of several, to its end. Call it on the main thread.

    Args:
        any_port: listen on a port that the system chooses, not on `settings.scheduler_port`.
        ready_file: written once nodes can connect: HOST:PORT.
        say: prints a line for the user. What is live (who is waited for) goes to the log.
        on_outcome: called with how it went, for programs.

    Returns:
        The exit code: 0 if all jobs ended well, 1 if one failed, 128 + the signal that stopped it.

    Raises:
        UsageError: no job can begin: settings that contradict each other, a wrong network file, a port
            that is taken, a ready file that cannot be written.
    """
    with _logging(settings), _signals() as signals, contextlib.ExitStack() as stack:
        _forget(ready_file)
        planned = plan(settings)
        stack.callback(planned.close)
        running = _start(settings, planned, say, any_port=any_port)
        stack.callback(running.close)
        stack.enter_context(naming_jobs(running.driver.machine))
        host = settings.scheduler_host
        _write(ready_file, f"{host}:{running.driver.port}\n")
        say(
            f"netstorm scheduler: {planned.whom} at {host}:{running.driver.port} (time at UDP port "
            f"{running.sntp.port}), {planned.about}"
        )
        watch = open_watch(settings, running.driver)
        if watch is not None:
            stack.callback(watch.close)
            say(f"netstorm scheduler: watch it with: netstorm top --scheduler {watch.address}")
        outcome = running.wait(signals)
    say(f"netstorm scheduler: {outcome.text}")
    if on_outcome is not None:
        on_outcome(outcome)
    return 128 + signals[0] if signals and outcome.exit_code else outcome.exit_code


@dataclass(frozen=True, slots=True)
class _Running:
    """Everything that must be closed."""

    driver: Driver[Hosted]
    sntp: SntpServer
    former: Former
    over: threading.Event

    def wait(self, signals: list[int]) -> Outcome:
        """Wait for the job's end. The first signal ends the job, the second does not even wait for that."""
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
        with contextlib.suppress(Closed):  # then it has just died, and `wait` will say of what
            self.driver.thread.post(lambda now: self.driver.machine.stop(reason, now))

    def close(self) -> None:
        """Let last words leave, and close everything."""
        self.former.close()
        self.sntp.stop(self.driver.thread)
        self.driver.thread.close(linger_s=_LINGER_S)


def _start(settings: Settings, planned: Plan, say: Callable[[str], None], *, any_port: bool) -> _Running:
    counters = Counters()
    # Set to the host's time once, and monotonic from then on: no step of that clock may look like slow links.
    origin_ns = clock.wall_ns() - clock.monotonic_ns()
    bind_host = settings.bind_host or resolve(settings.scheduler_host, "DMLC_PS_ROOT_URI")
    over = threading.Event()
    former = Former()

    def make_machine(_: int) -> Hosted:
        machine = planned.make(counters)
        machine.on_over = lambda _: over.set()
        machine.on_form = former.ask
        return machine

    def listen() -> _Running:
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
        )
        try:
            sntp = SntpServer(
                bind_host,
                settings.sntp_port or driver.port,
                now=lambda: (origin_ns + clock.monotonic_ns()) / 1e9,
                counters=counters,
            )
        except BaseException:
            driver.thread.close()
            raise
        sntp.start(driver.thread)

        def post(function: Callable[[float], None]) -> None:
            with contextlib.suppress(Closed):  # all has ended meanwhile
                driver.thread.post(function)

        def answered(answer: FormationResult) -> None:
            post(lambda now: driver.machine.formed(answer, now))

        former.deliver = answered
        serve_several(driver.machine, post, say)
        return _Running(driver, sntp, former, over)

    for _ in range(_PORT_TRIES if any_port and not settings.sntp_port else 0):
        with contextlib.suppress(SettingsError):
            return listen()
    return listen()


@contextlib.contextmanager
def _logging(settings: Settings) -> Iterator[None]:
    """Show what the scheduler logs from level info on, whatever the rest does: waiting is never silent."""
    configure_logging(settings)
    logger = logging.getLogger("netstorm.scheduler")
    before = logger.level
    logger.setLevel(min(logging.INFO, logging.getLogger("netstorm").getEffectiveLevel()))
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of the signals that ask this process to end."""
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forget(ready_file: Path | None) -> None:
    """Remove what a scheduler before us has left: a launcher must not take its address for ours."""
    if ready_file is not None:
        with _naming(ready_file):
            ready_file.unlink(missing_ok=True)


def _write(ready_file: Path | None, text: str) -> None:
    """Write a file that is complete whenever it is there."""
    if ready_file is not None:
        with _naming(ready_file):
            draft = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
            draft.write_text(text)
            draft.replace(ready_file)


@contextlib.contextmanager
def _naming(ready_file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--ready-file {str(ready_file)!r}: {error.strerror}; it must be a file that can be written"
        ) from None
