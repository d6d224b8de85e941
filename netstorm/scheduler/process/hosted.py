"""The machine that a scheduler's process hosts: that of one job or of several, as the settings say."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import netstorm
from netstorm import clock
from netstorm.errors import UsageError
from netstorm.observe.counters import Counters
from netstorm.pslite.machine import Machine
from netstorm.scheduler.job_phase import Outcome
from netstorm.scheduler.jobs.first_policy import FirstPolicyRequest, form_first_policy, network_file_nodes
from netstorm.scheduler.jobs.several_jobs import SeveralJobs
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.policies.initial_policy import first_policy, initial_assumptions
from netstorm.scheduler.process.job_logs import JobLogs
from netstorm.scheduler.process.state_file import StateFile, boot_identity
from netstorm.settings import Settings

__all__ = ["HostedMachine", "HostingPlan", "connect_several_jobs", "naming_jobs", "plan_hosting"]

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

    def snapshots(self, now: float) -> tuple[Snapshot, ...]:
        """Return a snapshot of each job."""


@dataclass(frozen=True, slots=True)
class HostingPlan:
    """What the process will serve."""

    title: str
    """"job 'alexnet'", or how many jobs."""
    details: str
    """The rest of the first line that the user sees."""
    make_machine: Callable[[Counters], HostedMachine]
    close: Callable[[], None] = lambda: None
    """To be called at the end."""


def plan_hosting(settings: Settings) -> HostingPlan:
    """Return what the process will serve. All settings are checked, before anything listens.

    Raises:
        UsageError: settings that contradict each other, a wrong network file.
    """
    return _one_job(settings) if settings.jobs == 1 else _several_jobs(settings)


def _one_job(settings: Settings) -> HostingPlan:
    assumption = initial_assumptions(settings)
    policy = first_policy(assumption)
    state = StateFile(Path(settings.state_dir), settings.job) if settings.state_dir else None
    replayed = None if state is None else state.replayed

    def make_machine(counters: Counters) -> SchedulerMachine:
        return SchedulerMachine(
            SchedulerOptions.from_settings(settings, release=netstorm.__version__, boot=boot_identity()),
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
            f"waiting for {settings.num_workers} nodes; network: "
            f"{settings.network_file or 'all links assumed equal'}; {policy.reason or settings.topology}"
            if state is None or replayed is None
            else f"which goes on: {len(replayed.members)} nodes, as {state.path} says"
        ),
        make_machine=make_machine,
        close=(lambda: None) if state is None else state.close,
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

    logs = JobLogs(Path(settings.state_dir)) if settings.state_dir else None
    resumed = [] if logs is None else logs.resumed(settings, network_nodes)

    def make_machine(counters: Counters) -> SeveralJobs:
        machine = SeveralJobs(
            settings,
            release=netstorm.__version__,
            now=clock.monotonic(),
            network_nodes=network_nodes,
            counters=counters,
            boot=boot_identity(),
            open_log=None if logs is None else logs.open,
        )
        machine.resume(resumed, clock.monotonic())
        return machine

    return HostingPlan(
        title=f"{settings.jobs} jobs" if settings.jobs else "any number of jobs",
        details=f"at most {settings.most_jobs} at once, waiting for nodes; network: "
        f"{settings.network_file or 'all links assumed equal'}"
        + (f"; going on with {len(resumed)} jobs" if resumed else ""),
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
