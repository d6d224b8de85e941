"""What a scheduler's process runs: the machine of one job, or of several, as the settings say."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import netstorm
from netstorm import clock
from netstorm.errors import UsageError
from netstorm.observe.counters import Counters
from netstorm.pslite.machine import Machine
from netstorm.scheduler.job_phase import Outcome
from netstorm.scheduler.jobs.first_policy import Preparation, described_nodes, prepare
from netstorm.scheduler.jobs.job_settings import settings_of
from netstorm.scheduler.jobs.job_slot import Resumed
from netstorm.scheduler.jobs.several_jobs import SeveralJobs
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.policies.initial_policy import first_policy, initial_assumptions
from netstorm.scheduler.process.state_file import StateFile, boot_identity
from netstorm.settings import Settings

__all__ = ["Hosted", "Plan", "naming_jobs", "plan", "serve_several"]

_log = logging.getLogger(__name__)

Post: TypeAlias = Callable[[Callable[[float], None]], None]
"""Has something called on the machine's thread, with the time."""


class Hosted(Machine, Protocol):
    """The machine of one job, or of several. `SchedulerMachine` says what the attributes are."""

    outcome: Outcome | None
    on_over: Callable[[Outcome], None] | None
    on_form: Callable[[FormationRequest], None] | None

    @property
    def counters(self) -> Counters:
        """What is counted."""

    def stop(self, reason: str, now: float) -> None:
        """End because this process is to end."""

    def formed(self, answer: FormationResult, now: float) -> None:
        """Take what has come of a formation."""

    def snapshots(self, now: float) -> tuple[Snapshot, ...]:
        """Return everything that people and programs may want to know, job by job."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be served."""

    whom: str
    """"job 'alexnet'", or that there are several."""
    about: str
    """The rest of the first line that the user sees."""
    make: Callable[[Counters], Hosted]
    """Makes the machine."""
    close: Callable[[], None] = lambda: None
    """To be called in the end."""


def plan(settings: Settings) -> Plan:
    """Return what will be served, checked before anything listens.

    Raises:
        UsageError: settings that contradict each other, a wrong network file.
    """
    return _one_job(settings) if settings.jobs == 1 else _several(settings)


def _one_job(settings: Settings) -> Plan:
    assumption = initial_assumptions(settings)
    policy = first_policy(assumption)
    state = StateFile(Path(settings.state_dir), settings.job) if settings.state_dir else None

    def make(counters: Counters) -> SchedulerMachine:
        return SchedulerMachine(
            SchedulerOptions.from_settings(settings, release=netstorm.__version__, boot=boot_identity()),
            policy,
            now=clock.monotonic(),
            counters=counters,
            assumed=assumption if settings.awareness else None,
            planned=assumption,
            write=None if state is None else state.write,
            past=None if state is None else state.past,
        )

    return Plan(
        f"job {settings.job!r}",
        f"waiting for {settings.num_workers} nodes; network: "
        f"{settings.network_file or 'all links assumed equal'}; {policy.reason or settings.topology}"
        if state is None or state.past is None
        else f"which goes on: {len(state.past.members)} nodes, as {state.path} says",
        make,
        (lambda: None) if state is None else state.close,
    )


def _several(settings: Settings) -> Plan:
    if settings.source("job") != "default":
        raise UsageError(
            f"NETSTORM_JOB={settings.job} (--job) at a scheduler of several jobs (--jobs, NETSTORM_JOBS="
            f"{settings.jobs}): expected none, since the nodes say which job is theirs"
        )
    described = described_nodes(settings)
    if settings.source("num_workers") != "default" and described not in (0, settings.num_workers):
        initial_assumptions(settings)  # says that the two contradict each other

    logs = _Logs(Path(settings.state_dir)) if settings.state_dir else None
    resumed = [] if logs is None else logs.resumed(settings, described)

    def make(counters: Counters) -> SeveralJobs:
        machine = SeveralJobs(
            settings,
            release=netstorm.__version__,
            now=clock.monotonic(),
            described=described,
            counters=counters,
            boot=boot_identity(),
            open_log=None if logs is None else logs.open,
        )
        machine.resume(resumed, clock.monotonic())
        return machine

    return Plan(
        f"{settings.jobs} jobs" if settings.jobs else "any number of jobs",
        f"at most {settings.most_jobs} at once, waiting for nodes; network: "
        f"{settings.network_file or 'all links assumed equal'}"
        + (f"; going on with {len(resumed)} jobs" if resumed else ""),
        make,
        (lambda: None) if logs is None else logs.close,
    )


class _Logs:
    """The logs of a scheduler of several jobs, a file each. It must be closed."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"NETSTORM_STATE_DIR={str(folder)!r}: {error.strerror}; it must be a folder in which files "
                "can be written"
            ) from None
        self._folder = folder
        self._files: dict[Path, StateFile] = {}

    def open(self, job: str) -> StateFile:
        """Open the log of a job that has none open; see `StateFile`."""
        file = StateFile(self._folder, job)
        self._files[file.path] = file
        return file

    def resumed(self, settings: Settings, described: int) -> list[Resumed]:
        """Return the jobs that logs tell of. A log that cannot be used is left, and whoever asks for a job of
        that name hears why.
        """
        jobs = []
        for path in sorted(self._folder.glob("*.log")):
            try:
                file = self.open(path.stem)
                past = file.past
                if past is None:
                    file.close()
                    continue
                began = past.began
                own = settings_of(settings, began.job, len(past.members), began.said, described=described)
                jobs.append(Resumed(file, past, own, initial_assumptions(own)))
            except UsageError as error:
                _log.error("%s", error)
        return jobs

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            file.close()


def serve_several(machine: Hosted, post: Post, say: Callable[[str], None]) -> None:
    """Give a machine of several jobs what that of one does without; others are left as they are.

    First policies are formed on threads of their own, so that nobody waits for another job's; `say` is
    called with a line for the user whenever a job ends.
    """
    if not isinstance(machine, SeveralJobs):
        return

    def work(question: Preparation) -> None:
        answer = prepare(question)
        post(lambda now: machine.prepared(answer, now))

    machine.on_prepare = lambda question: threading.Thread(
        target=work, args=(question,), name=f"netstorm-prepare-{question.settings.job}", daemon=True
    ).start()
    machine.on_job_over = lambda outcome: say(f"netstorm scheduler: {outcome.text}")


@contextlib.contextmanager
def naming_jobs(machine: Hosted) -> Iterator[None]:
    """Have the log say which of several jobs each line is about."""
    if not isinstance(machine, SeveralJobs):
        yield
        return
    factory = logging.getLogRecordFactory()

    def record(*args: Any, **fields: Any) -> logging.LogRecord:
        made = factory(*args, **fields)
        name = f"job {machine.acting!r}"
        if machine.acting and made.name.startswith("netstorm.") and name not in made.getMessage():
            made.msg = f"{name}: {made.msg}"  # a job's name has no %
        return made

    logging.setLogRecordFactory(record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
