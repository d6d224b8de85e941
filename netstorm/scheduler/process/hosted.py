"""The machine that a scheduler's process hosts, that of one job or of several; and its replay logs' files."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import netstorm
from netstorm import clock
from netstorm.addresses import is_loopback
from netstorm.errors import UsageError
from netstorm.observe.log import Counters
from netstorm.observe.private_files import open_private
from netstorm.pslite.admission import scheduler_secret_of
from netstorm.pslite.machine import Machine
from netstorm.pslite.system import usable_processors
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import FormationRequest, FormationResult, first_policy, initial_assumptions
from netstorm.scheduler.replay_log import MAGIC, Record, ReplayedJob, encode, read
from netstorm.scheduler.several_jobs import (
    FirstPolicyRequest,
    LoggedJob,
    SeveralJobs,
    form_first_policy,
    job_settings,
    network_file_nodes,
)
from netstorm.scheduler.snapshot import JobSnapshot, Outcome
from netstorm.scheduler.standby import PeerInquiry, StandbyMachine
from netstorm.settings import Settings

__all__ = [
    "HostedMachine",
    "HostingPlan",
    "StateFile",
    "boot_identity",
    "connect_several_jobs",
    "naming_jobs",
    "plan_hosting",
]


# The machine that a scheduler's process hosts: that of one job or of several, as the settings say.

Post: TypeAlias = Callable[[Callable[[float], None]], None]
"""Calls a function on the machine's thread, with the time."""


class HostedMachine(Machine, Protocol):
    """The machine of one job, or of several. `SchedulerMachine` says what the attributes are."""

    on_over: Callable[[Outcome], None] | None
    on_form: Callable[[FormationRequest], None] | None

    @property
    def outcome(self) -> Outcome | None:
        """How it went; None until it is over."""

    @property
    def counters(self) -> Counters:
        """The counters of the process."""

    def stop(self, reason: str, now: float) -> None:
        """End because this process must end."""

    def policy_formed(self, answer: FormationResult, now: float) -> None:
        """Receive the result of a formation."""

    def snapshots(self, now: float) -> tuple[JobSnapshot, ...]:
        """Return a snapshot of each job."""


@dataclass(frozen=True, slots=True)
class HostingPlan:
    """What the process will serve."""

    title: str
    """"job 'alexnet'", or how many jobs."""
    details: str
    """The rest of the first line that the user sees."""
    planning: str
    """What its trees are planned for, for the log."""
    make_machine: Callable[[Counters, int], HostedMachine]
    """Makes it, given the port at which nodes reach it."""
    close: Callable[[], None] = lambda: None
    """To be called at the end."""


def plan_hosting(settings: Settings) -> HostingPlan:
    """Return what the process will serve. All settings are checked, before anything listens.

    Raises:
        UsageError: settings that contradict each other, a wrong network file.
    """
    if settings.standby or settings.recover_peers:
        return _standby(settings)
    return _one_job(settings) if settings.jobs == 1 else _several_jobs(settings)


def _standby(settings: Settings) -> HostingPlan:
    peers = settings.recover_addresses
    kind = "scheduler that recovers a job (--recover)" if peers else "standby (--standby)"
    if settings.jobs != 1:
        raise UsageError(
            f"a {kind} of several jobs (NETSTORM_JOBS={settings.jobs}): expected one, since it takes over one"
        )
    host = settings.scheduler_host
    if is_loopback(host) and not all(is_loopback(peer) for peer, _ in peers):
        raise UsageError(
            f"DMLC_PS_ROOT_URI={host} (--host): nodes at {settings.recover_peers} cannot reach this "
            "scheduler there: expected the address of this machine at which they can"
        )
    assumption, secret = initial_assumptions(settings), scheduler_secret_of(settings)

    def make_machine(counters: Counters, port: int) -> StandbyMachine:
        options = SchedulerOptions.from_settings(
            settings,
            release=netstorm.__version__,
            boot=boot_identity(),
            processors=usable_processors(),
            secret=secret,
        )
        now = clock.monotonic()
        return StandbyMachine(
            options,
            now=now,
            counters=counters,
            assumed=assumption if settings.awareness else None,
            planned=assumption,
            inquiry=PeerInquiry(peers, (host, port), options, now) if peers else None,
        )

    if peers:
        title, details = f"recovering job {settings.job!r}", f"asking the nodes at {settings.recover_peers}"
    else:
        title = f"standby of job {settings.job!r}"
        details = "which waits until a majority of the nodes have lost the scheduler before it"
    return HostingPlan(title=title, details=details, planning=_network(settings), make_machine=make_machine)


def _one_job(settings: Settings) -> HostingPlan:
    assumption, secret = initial_assumptions(settings), scheduler_secret_of(settings)
    policy = first_policy(assumption)
    state = StateFile(Path(settings.state_dir), settings.job) if settings.state_dir else None
    replayed = None if state is None else state.replayed
    if state is not None and replayed is not None:
        _check_same_job(settings, state, replayed)

    def make_machine(counters: Counters, _: int) -> SchedulerMachine:
        return SchedulerMachine(
            SchedulerOptions.from_settings(
                settings,
                release=netstorm.__version__,
                boot=boot_identity(),
                processors=usable_processors(),
                secret=secret,
            ),
            policy,
            now=clock.monotonic(),
            counters=counters,
            assumed=assumption if settings.awareness else None,
            planned=assumption,
            write=None if state is None else state.write,
            replayed=replayed,
        )

    return HostingPlan(
        title=f"job {settings.job!r}",
        details=(
            f"waiting for {settings.num_workers} nodes"
            if state is None or replayed is None
            else f"which goes on: {len(replayed.members)} nodes, as {state.path} says"
        ),
        planning=f"{_network(settings)}; {policy.reason or settings.topology}",
        make_machine=make_machine,
        close=(lambda: None) if state is None else state.close,
    )


def _network(settings: Settings) -> str:
    return f"network: {settings.network_file or 'all links assumed equal'}"


def _check_same_job(settings: Settings, state: StateFile, replayed: ReplayedJob) -> None:
    """Check that the settings are those of the job in a log.

    Raises:
        UsageError: they are of another job, or one of another size.
    """
    found, expected = (replayed.began.job, len(replayed.members)), (settings.job, settings.places)
    if found != expected:
        state.close()
        raise UsageError(
            f"{state.path} is the log of job {found[0]!r} with {found[1]} ranks, but this scheduler is of "
            f"job {expected[0]!r} with {expected[1]}: give the same NETSTORM_JOB, DMLC_NUM_WORKER and "
            "NETSTORM_ELASTIC as before, or remove the file if that job is over"
        )


def _several_jobs(settings: Settings) -> HostingPlan:
    if settings.source("job") != "default":
        raise UsageError(
            f"NETSTORM_JOB={settings.job} (--job) at a scheduler of several jobs (--jobs, NETSTORM_JOBS="
            f"{settings.jobs}): expected none, since the nodes say which job is theirs"
        )
    network_nodes = network_file_nodes(settings)
    if settings.source("num_workers") != "default" and network_nodes not in (0, settings.num_workers):
        initial_assumptions(settings)  # raises the error that says that the two contradict each other

    secret = scheduler_secret_of(settings)
    logs = JobLogs(Path(settings.state_dir)) if settings.state_dir else None
    resumed = [] if logs is None else logs.resumed(settings, network_nodes)

    def make_machine(counters: Counters, _: int) -> SeveralJobs:
        machine = SeveralJobs(
            settings,
            release=netstorm.__version__,
            now=clock.monotonic(),
            network_nodes=network_nodes,
            counters=counters,
            boot=boot_identity(),
            processors=usable_processors(),
            open_log=None if logs is None else logs.open,
            secret=secret,
        )
        machine.resume(resumed, clock.monotonic())
        return machine

    return HostingPlan(
        title=f"{settings.jobs} jobs" if settings.jobs else "any number of jobs",
        details=f"at most {settings.most_jobs} at once, waiting for nodes"
        + (f"; going on with {len(resumed)} jobs" if resumed else ""),
        planning=_network(settings),
        make_machine=make_machine,
        close=(lambda: None) if logs is None else logs.close,
    )


def connect_several_jobs(machine: HostedMachine, post: Post, print_line: Callable[[str], None]) -> None:
    """Set the callbacks that only a machine of several jobs has. A machine of one job is left as it is.

    First policies are formed on threads of their own, so that no job waits for another one's.

    Args:
        machine: the one that is hosted.
        post: see `Post`.
        print_line: called with a line for the user whenever a job ends.
    """
    if not isinstance(machine, SeveralJobs):
        return

    def work(request: FirstPolicyRequest) -> None:
        answer = form_first_policy(request)
        post(lambda now: machine.first_policy_formed(answer, now))

    machine.on_first_policy = lambda request: threading.Thread(
        target=work, args=(request,), name=f"netstorm-first-policy-{request.settings.job}", daemon=True
    ).start()
    machine.on_job_over = lambda outcome: print_line(f"netstorm scheduler: {outcome.text}")


@contextlib.contextmanager
def naming_jobs(machine: HostedMachine) -> Iterator[None]:
    """Let each line of the log say which of several jobs it is about."""
    if not isinstance(machine, SeveralJobs):
        yield
        return
    factory = logging.getLogRecordFactory()

    def make_record(*args: object, **fields: object) -> logging.LogRecord:
        record: logging.LogRecord = factory(*args, **fields)
        name = f"job {machine.current_job!r}"
        if machine.current_job and record.name.startswith("netstorm.") and name not in record.getMessage():
            record.msg = f"{name}: {record.msg}"  # a job's name has no %
        return record

    logging.setLogRecordFactory(make_record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)


# The replay logs of a scheduler of several jobs: one file for each job, in one folder.

_log = logging.getLogger(__name__)


class JobLogs:
    """The logs in one folder. It must be closed."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if it is missing.

        Raises:
            UsageError: the folder cannot be used.
        """
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"NETSTORM_STATE_DIR={str(folder)!r}: {error.strerror}; it must be a folder in which files "
                "can be written"
            ) from None
        self._folder: Final = folder
        self._files: dict[Path, StateFile] = {}

    def open(self, job: str) -> StateFile:
        """Open the log of a job that has none open; see `StateFile`."""
        file = StateFile(self._folder, job)
        self._files[file.path] = file
        return file

    def resumed(self, settings: Settings, network_nodes: int) -> list[LoggedJob]:
        """Return the jobs to go on with.

        A log that cannot be used is left as it is. Nodes that ask for a job of that name are told why it
        cannot be opened.

        Args:
            settings: the scheduler's.
            network_nodes: how many nodes NETSTORM_NETWORK describes; 0: there is no such file.
        """
        jobs = []
        for path in sorted(self._folder.glob("*.log")):
            try:
                file = self.open(path.stem)
                job = file.replayed
                if job is None:
                    file.close()
                    continue
                own = job_settings(
                    settings,
                    job.began.job,
                    len(job.members),
                    job.began.first_node_settings,
                    network_nodes=network_nodes,
                )
                jobs.append(LoggedJob(file, job, own, initial_assumptions(own)))
            except UsageError as error:
                _log.error("%s", error)
        return jobs

    def close(self) -> None:
        """Close all logs."""
        for file in self._files.values():
            file.close()


# The file of a replay log: opening, locking, and appending records.

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_identity() -> str:
    """Return an identity that changes when the host is started again; empty if the system has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


class StateFile:
    """The replay log of one job. It must be closed.

    The operating system has a record before any node is told what it says, so the end of this process loses
    nothing. All records of one event are one write (measured: 2 µs). Records are not forced to the disk: a
    crash of the host may lose some, so a log from before the host's last start is refused.

    Attributes:
        path: of the file.
        replayed: the job as another process left it; None: the file was empty, or the job is over.
    """

    def __init__(self, folder: Path, job: str) -> None:
        """Open the log of a job, or create it.

        Raises:
            UsageError: the folder cannot be used, or the file is not such a log; says what to do.
        """
        self.path: Final = folder / _file_name(job)
        self._file: int | None = None
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            self._file = open_private(self.path, 0)
            self.replayed: Final = self._begin(self._file)
        except OSError as error:
            self.close()
            raise UsageError(
                f"NETSTORM_STATE_DIR={str(folder)!r}: {error.strerror} ({self.path}); it must be a folder in "
                "which files can be written"
            ) from None
        except UsageError:
            self.close()
            raise

    def _begin(self, file: int) -> ReplayedJob | None:
        self._lock(file)
        records, size = read(self.path.read_bytes(), str(self.path))
        job = ReplayedJob.replay(records, str(self.path))
        if job is not None and _file_name(job.began.job) != self.path.name:
            raise UsageError(
                f"{self.path} is the log of job {job.began.job!r}, whose file is "
                f"{_file_name(job.began.job)!r}: give that job (NETSTORM_JOB), or another NETSTORM_STATE_DIR"
            )
        if job is not None and job.began.boot != boot_identity():
            raise UsageError(
                f"{self.path} was written before this machine was last started, and may lack its end: its "
                "job cannot be taken over from it, but from its nodes, if they still wait (netstorm "
                "scheduler --recover); remove the file to begin anew"
            )
        os.truncate(file, 0 if job is None else size)
        os.lseek(file, 0, os.SEEK_END)
        if job is None:
            _write_all(file, MAGIC)
        return job

    def _lock(self, file: int) -> None:
        """Keep other schedulers from the file while this process lives."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is in use by another scheduler: give each a NETSTORM_STATE_DIR of its own, or "
                "jobs different names (NETSTORM_JOB)"
            ) from None

    def write(self, records: Iterable[Record]) -> None:
        """Append records. If that fails the log is removed: the job goes on, but not from this log."""
        if self._file is None:
            return
        try:
            _write_all(self._file, encode(records))
        except OSError as error:
            left = self._give_up()
            _log.error(
                "%s: %s; the job goes on, but no scheduler can be started again with this log%s; one can "
                "take the job over from its nodes (netstorm scheduler --recover)",
                self.path,
                error.strerror,
                left,
            )

    def _give_up(self) -> str:
        """Remove a log that lacks its end, and return what the user must do if that fails, too."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:  # a file system that has become read-only
            return f", which lacks its end: remove it, which failed here ({error.strerror})"
        return ""

    def close(self) -> None:
        """Close the file. Twice does no harm."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _file_name(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", job) + ".log"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
