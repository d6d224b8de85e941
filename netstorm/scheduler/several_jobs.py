"""Several jobs on one scheduler: admission control, settings, shares of the network. Pure.

A process says in its `Hello` which job it belongs to. The first process that asks to join a job opens it,
and says how many nodes it has unless the scheduler knows that. Jobs share the sockets, the numbering of
processes, the process that forms policies, and the rates of a network that several of them use
(`link_shares`). They share nothing else, so a job cannot disturb another one. A name is free again once its
job has ended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from netstorm.errors import PeerError, SettingsError, UsageError
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import not_authorised
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Instruction, Refuse, refuse_other_key
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.scheduler.machine import FirstPolicy, SchedulerMachine, abort_reason
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import (
    FormationRequest,
    FormationResult,
    InitialAssumptions,
    first_policy,
    initial_assumptions,
)
from netstorm.scheduler.rendezvous import ProcessRegistry, Refusal, refuse
from netstorm.scheduler.replay_log import JobEnded, LoggedOutbox, Record, ReplayedJob
from netstorm.scheduler.snapshot import JobPhase, JobSnapshot, Outcome
from netstorm.settings import JOB_WIDE, Settings, declarations
from netstorm.topology.files import load_network
from netstorm.topology.policy import Policy

__all__ = [
    "FirstPolicyRequest",
    "LoggedJob",
    "SeveralJobs",
    "form_first_policy",
    "job_settings",
    "network_file_nodes",
]


_log = logging.getLogger(__name__)


class SeveralJobs:
    """The scheduler of several jobs. Implements `pslite.machine.Machine`.

    Attributes:
        counters: of what belongs to no job.
        outcome: how all jobs went; None until the scheduler is over.
        on_over: called with the outcome when the scheduler is over.
        on_job_over: called with each job's outcome.
        on_form: called with each policy to form; the result goes to `policy_formed`.
        on_first_policy: called for each job that needs a first policy; the result goes to
            `first_policy_formed`.
        current_job: the job that is being served at this moment, for the log; empty: none.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        release: str,
        now: float,
        network_nodes: int = 0,
        counters: Counters | None = None,
        boot: str = "",
        processors: int = 1,
        open_log: Callable[[str], JobLog] | None = None,
        secret: SchedulerSecret | None = None,
    ) -> None:
        """Wait for the first job.

        Args:
            settings: the scheduler's own. Jobs may differ where these have the default.
            release: version of the NetStorm package.
            now: the time.
            network_nodes: how many nodes NETSTORM_NETWORK describes; 0: there is no such file.
            counters: None: new ones.
            boot: identity of the host's run since it was last started, for logs.
            processors: of the host.
            open_log: opens the log of a job by name; no other log of that name is open. None: there are no
                logs. A `UsageError` that it raises is sent to the node that asks for the job.
            secret: by which nodes recognise this scheduler; None: jobs have no key.
        """
        self.counters: Final = counters or Counters()
        self.outcome: Outcome | None = None
        self.on_over: Callable[[Outcome], None] | None = None
        self.on_job_over: Callable[[Outcome], None] | None = None
        self.on_form: Callable[[FormationRequest], None] | None = None
        self.on_first_policy: Callable[[FirstPolicyRequest], None] | None = None
        self.current_job = ""
        self._settings: Final = settings
        self._registry: Final = ProcessRegistry()
        self._release: Final = release
        self._network_nodes: Final = network_nodes
        self._boot: Final = boot
        self._processors: Final = processors
        self._open_log: Final = open_log
        self._secret: Final = secret
        self._stopping = False
        self._outbox: Final = LoggedOutbox()
        self._slots: list[JobSlot] = []
        """In order of arrival. Of several with one name, only the last can be joined."""
        self._slot_of: dict[Peer, JobSlot] = {}
        self._running: list[JobSlot] = []
        """The jobs that have a share of the network."""
        self._request_numbers: Final = itertools.count(1)
        self._requests: Final[dict[int, tuple[JobSlot, int]]] = {}
        """Whose result a number is for, and the number that the job itself gave it, which is not unique."""
        self._ended = 0
        self._failed = 0

    def resume(self, jobs: Iterable[LoggedJob], now: float) -> None:
        """Go on with jobs that another process served. Call it before anything else."""
        for job in jobs:
            machine = SchedulerMachine(
                self._job_options(job.settings, job.replayed.began.first_node_settings),
                job.replayed.policies[job.replayed.version],
                now=now,
                registry=self._registry,
                assumed=job.planned if job.settings.awareness else None,
                planned=job.planned,
                write=job.log.write,
                replayed=job.replayed,
            )
            slot = self._add(JobSlot(machine, job.settings, job.log))
            slot.peers.update(machine.peers)
            self._slot_of.update(dict.fromkeys(slot.peers, slot))
            self._settle(slot, now)

    # ------------------------------------------------------------------------------------ what drivers need

    @property
    def jobs(self) -> tuple[SchedulerMachine, ...]:
        """The machines of the jobs that are here, in order of arrival."""
        return tuple(slot.machine for slot in self._slots)

    def job(self, name: str) -> SchedulerMachine:
        """Return the machine of the job that nodes of this name belong to now.

        Raises:
            UsageError: no such job is here.
        """
        for slot in reversed(self._slots):
            if slot.name == name:
                return slot.machine
        here = ", ".join(repr(slot.name) for slot in self._slots) or "none"
        raise UsageError(f"no job {name!r} is here; there are: {here}")

    def snapshots(self, now: float) -> tuple[JobSnapshot, ...]:
        """Return the snapshots of all jobs that are here, in order of arrival."""
        return tuple(machine.snapshot(now) for machine in self.jobs)

    def first_policy_formed(self, answer: FirstPolicyResult, now: float) -> None:
        """Receive the result of a request that `on_first_policy` was called for."""
        slot, _ = self._requests.pop(answer.number, (None, 0))
        if slot is None or slot not in self._slots:
            return
        machine = slot.machine
        if answer.policy is None or answer.planned is None:
            self._run(slot, functools.partial(machine.set_first_policy, answer.problem, now), now)
        else:
            first = FirstPolicy(
                policy=answer.policy,
                planned=answer.planned,
                aware=slot.settings.awareness,
                link_share=slot.link_share,
            )
            self._run(slot, functools.partial(machine.set_first_policy, first, now), now)

    def policy_formed(self, answer: FormationResult, now: float) -> None:
        """Receive the result of a formation that `on_form` was called for."""
        slot, own_number = self._requests.pop(answer.number, (None, 0))
        if slot is not None and slot in self._slots:
            own = msgspec.structs.replace(answer, number=own_number)
            self._run(slot, functools.partial(slot.machine.policy_formed, own, now), now)

    def give_up(self, name: str, limit_s: float, now: float) -> None:
        """End the job of this name, if it has not begun: not every node has come within `limit_s`."""
        for slot in [slot for slot in self._slots if slot.name == name]:
            self._run(slot, functools.partial(slot.machine.give_up, limit_s, now), now)

    def stop(self, reason: str, now: float) -> None:
        """End all jobs because this process must end; no further one begins."""
        self._stopping = True
        for slot in list(self._slots):
            self._run(slot, functools.partial(slot.machine.stop, reason, now), now)
        self._end_if_due()

    def abort(self, error: Exception, now: float) -> None:
        """End all jobs because this process cannot go on."""
        self.stop(abort_reason(error), now)

    # ------------------------------------------------------------------------------ what the endpoint needs

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Number each process. Who may join is decided when it asks to, so that it is told why not."""
        if hello.receiver != SCHEDULER:
            return Refuse(f"this is a scheduler of several jobs, not rank {hello.receiver}")
        peer = self._registry.find(hello.incarnation)
        slot = None if peer is None else self._slot_of.get(peer)
        if slot is not None:
            return slot.machine.admit(hello, user)
        if self._registry.is_taken(hello.incarnation, user):
            return refuse_other_key("the process of this number", user, ())
        if hello.sender >= 0:
            for slot in self._slots:
                verdict = slot.machine.admit(hello, user) if slot.name == hello.job else None
                if isinstance(verdict, Refuse):  # it is out of an elastic job, and learns why
                    return verdict
                if isinstance(verdict, Admit) and slot.machine.has_departed(hello.incarnation):
                    self._slot_of[verdict.peer] = slot  # the same, in a job with a key
                    return verdict
            return Refuse(
                f"this scheduler does not know this rank {hello.sender} of job {hello.job!r}: that has ended "
                "here, or the scheduler was restarted, or another one has taken the address of the one before"
            )
        return Admit(self._registry.register(hello.incarnation, hello.job, user))

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message."""
        slot = self._slot_of.get(peer)
        if slot is None and isinstance(message, m.Join):
            slot = self._find_or_open(peer, message, now)
            if slot is None:
                return
            self._slot_of[peer] = slot
            slot.peers.add(peer)
        if slot is not None:
            receive = functools.partial(slot.machine.receive, peer, message, payload, payload_crc, now)
            self._run(slot, receive, now)
        elif isinstance(message, (m.Leave, m.Failed)):
            self._outbox.add(Disconnect(peer=peer))
        elif not isinstance(message, m.Heartbeat):  # its job may just have ended
            raise not_authorised(message, "a process that is in no job")

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        slot = self._slot_of.get(peer)
        if slot is not None:
            self._run(slot, functools.partial(slot.machine.peer_lost, peer, reason, now), now)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """Learn that a node's connection is gone. See `ConnectionWatcher`."""
        slot = self._slot_of.get(peer)
        if slot is not None:
            gone = functools.partial(slot.machine.connection_gone, peer, reason, now, refused=refused)
            self._run(slot, gone, now)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`."""
        slot = self._slot_of.get(peer)
        return slot is not None and slot.machine.may_be_busy(peer, now)

    def peer_busy(self, peer: Peer, seconds: float, now: float, *, late: bool = False) -> None:
        """Learn that a node is busy. See `ConnectionWatcher`."""
        slot = self._slot_of.get(peer)
        if slot is not None:
            self._run(slot, functools.partial(slot.machine.peer_busy, peer, seconds, now, late=late), now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for slot in list(self._slots):
            if now >= slot.machine.next_tick():
                self._run(slot, functools.partial(slot.machine.tick, now), now)

    def next_tick(self) -> float:
        """Return when something is due."""
        return min((machine.next_tick() for machine in self.jobs), default=math.inf)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        return self._outbox.take()

    # ------------------------------------------------------------------------------------------- new jobs

    def _find_or_open(self, peer: Peer, join: m.Join, now: float) -> JobSlot | None:
        """Return the job that a process asks for; a new one is opened. None: the process is refused."""
        name = self._registry.job_of(peer)
        for slot in self._slots:
            if slot.name == name and not slot.ending:
                return slot
        try:
            return self._add(self._open(name, join, now))
        except UsageError as error:
            refuse(Refusal(peer, str(error)), self._outbox, self.counters)
            return None

    def _open(self, name: str, join: m.Join, now: float) -> JobSlot:
        """Open a job for the first node that asks to join it.

        Raises:
            UsageError: there is no room, or no job can have these settings; says what to do.
        """
        present = [slot.name for slot in self._slots if not slot.ending]
        ended = self._ended + len(self._slots) - len(present)
        check_room(self._settings, name, present, ended=ended, stopping=self._stopping)
        settings = job_settings(
            self._settings, name, join.num_workers, join.must_agree, network_nodes=self._network_nodes
        )
        for slot in self._slots:
            if slot.name == name:
                slot.close_log()
        log = None if self._open_log is None else self._open_log(name)
        machine = SchedulerMachine(
            self._job_options(settings, join.must_agree),
            None,
            now=now,
            registry=self._registry,
            write=None if log is None else log.write,
        )
        if self._network_nodes and not settings.network_file:
            _log.warning(
                "job %r has %d nodes, NETSTORM_NETWORK describes %d: all its links are assumed equal",
                name,
                settings.num_workers,
                self._network_nodes,
            )
        return JobSlot(machine, settings, log)

    def _job_options(self, settings: Settings, first_node_settings: Mapping[str, str]) -> SchedulerOptions:
        return SchedulerOptions.from_settings(
            settings,
            release=self._release,
            boot=self._boot,
            processors=self._processors,
            first_node_settings=first_node_settings,
            secret=self._secret,
        )

    def _add(self, slot: JobSlot) -> JobSlot:
        slot.machine.on_all_joined = lambda: self._ask_first_policy(slot)
        slot.machine.on_form = lambda request: self._ask_policy(slot, request)
        self._slots.append(slot)
        return slot

    def _ask_first_policy(self, slot: JobSlot) -> None:
        slot.link_share = link_shares([*(running.claim for running in self._running), slot.claim])[-1]
        if self.on_first_policy is not None:
            number = self._number_request(slot, 0)
            self.on_first_policy(FirstPolicyRequest(number, slot.settings, slot.link_share))

    def _ask_policy(self, slot: JobSlot, request: FormationRequest) -> None:
        if self.on_form is not None:
            number = self._number_request(slot, request.number)
            self.on_form(msgspec.structs.replace(request, number=number))

    def _number_request(self, slot: JobSlot, own_number: int) -> int:
        number = next(self._request_numbers)
        self._requests[number] = slot, own_number
        return number

    # ------------------------------------------------------------------------------ jobs that run, and end

    def _run(self, slot: JobSlot, action: Callable[[], None], now: float) -> None:
        """Let a job's machine do something. An error in it ends this job alone."""
        before, self.current_job = self.current_job, slot.name
        try:
            action()
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001 -- an error in one job must not end the others
            _log.exception("an error in the scheduler ends job %r", slot.name)
            self._end_broken(slot, error, now)
        finally:
            self._settle(slot, now)
            self.current_job = before

    def _end_broken(self, slot: JobSlot, error: Exception, now: float) -> None:
        """End a job whose machine has failed: in good order if it still can."""
        if not slot.broken:
            slot.broken = True
            with contextlib.suppress(Exception):
                slot.machine.abort(error, now)
                return
        for peer in sorted(slot.peers):
            self._outbox.add(Disconnect(peer=peer))
        self._remove(slot, Outcome(1, f"job {slot.name!r} has failed: {error!r}"))

    def _settle(self, slot: JobSlot, now: float) -> None:
        """Pass on a job's instructions, and handle that it has begun or ended."""
        for instruction in slot.machine.take_instructions():
            self._outbox.add(instruction)
            if isinstance(instruction, Disconnect):
                self._detach(slot, instruction.peer)
        running = [other for other in self._slots if other.running]
        if running != self._running:
            verb = "begun" if len(running) > len(self._running) else "ended"
            self._running = running
            self._share_links(f"job {slot.name!r} has {verb}")
        if slot in self._slots and (slot.machine.outcome is not None or slot.machine.abandoned):
            self._remove(slot, slot.machine.outcome)

    def _share_links(self, why: str) -> None:
        """Tell each running job which part of its network's rates it plans with now."""
        shares = link_shares([slot.claim for slot in self._running])
        for slot, share in zip(self._running, shares, strict=True):
            if share != slot.link_share:
                slot.link_share = share
                slot.machine.set_link_share(share, f"{why}: this one plans with {share:.0%} of each link")

    def _detach(self, slot: JobSlot, peer: Peer) -> None:
        """Forget that a process belongs to a job."""
        if self._slot_of.get(peer) is slot:
            del self._slot_of[peer]
        slot.peers.discard(peer)
        self._registry.unpin(peer)

    def _remove(self, slot: JobSlot, outcome: Outcome | None) -> None:
        """Forget a job. `outcome`: None if it never began, and all its processes have left."""
        self._slots.remove(slot)
        slot.close_log()
        for peer in list(slot.peers):
            self._detach(slot, peer)
        if outcome is None:
            return
        self._ended += 1
        if outcome.exit_code:
            self._failed += 1
        on_job_over = self.on_job_over
        if on_job_over is not None:
            self._outbox.add(Call(function=lambda: on_job_over(outcome)))
        self._end_if_due()

    def _end_if_due(self) -> None:
        enough = self._settings.jobs and self._ended >= self._settings.jobs
        if self._slots or self.outcome is not None or not (self._stopping or enough):
            return
        text = f"{self._ended} jobs have ended, {self._failed} of them have failed"
        self.outcome = outcome = Outcome(int(self._failed > 0), text)
        on_over = self.on_over
        if on_over is not None:
            self._outbox.add(Call(function=lambda: on_over(outcome)))


# Admission control of jobs: whether a scheduler of several opens one more, and with which settings.

_MOST_NODES: Final = 1024
"""Nodes of a job whose size the scheduler does not know: a bound on what a process can ask for."""

_LISTED: Final = 12
"""Most jobs that one text names."""


def check_room(settings: Settings, name: str, present: Sequence[str], *, ended: int, stopping: bool) -> None:
    """Check that there is room for one more job.

    Args:
        settings: the scheduler's.
        name: of the job.
        present: names of the jobs that have not ended.
        ended: how many jobs have ended.
        stopping: no further job may begin.

    Raises:
        SettingsError: there is none; says why, and what to do.
    """
    if stopping:
        raise SettingsError(f"job {_short(name)} cannot begin: this scheduler is being stopped")
    names = ", ".join(present[:_LISTED]) + (", …" if len(present) > _LISTED else "")
    if len(present) >= settings.most_jobs:
        raise SettingsError(
            f"no room for job {_short(name)}: this scheduler serves {len(present)} jobs ({names}), as many "
            "as it may at once (NETSTORM_MOST_JOBS at the scheduler); wait for one of them to end, or start "
            "another scheduler"
        )
    if settings.jobs and ended + len(present) >= settings.jobs:
        raise SettingsError(
            f"no room for job {_short(name)}: this scheduler was started for {settings.jobs} jobs (--jobs, "
            f"NETSTORM_JOBS); {ended} have ended, and {len(present)} are here"
            + (f" ({names})" if present else "")
        )


def job_settings(
    settings: Settings, name: str, size: int, first_node: Mapping[str, str], *, network_nodes: int
) -> Settings:
    """Return the settings of a job: the scheduler's own, and those of the first node where these have the
    default.

    Args:
        settings: the scheduler's.
        name: of the job.
        size: how many nodes it has, as the first node says.
        first_node: settings that were given to the first node, by variable.
        network_nodes: how many nodes NETSTORM_NETWORK describes; 0: there is no such file.

    Raises:
        SettingsError: no job can have these settings.
    """
    any_size = settings.source("num_workers") == "default"
    if any_size and not 1 <= size <= _MOST_NODES:
        raise SettingsError(
            f"the first node of job {_short(name)} says DMLC_NUM_WORKER={size}: expected 1 to {_MOST_NODES}; "
            "for larger jobs tell the scheduler DMLC_NUM_WORKER, too"
        )
    given = {
        attribute: first_node[variable]
        for attribute in JOB_WIDE
        if (variable := declarations()[attribute].variable) in first_node
        and settings.source(attribute) == "default"
    }
    size = size if any_size else settings.num_workers
    return settings.changed(
        job=name,
        num_workers=size,
        rank=-1,
        network_file=None if size == network_nodes else "",
        **given,
    )


def _short(name: str) -> str:
    return repr(name[:64])


# Link shares: the part of a network that each of several jobs plans with.
#
# MLNET gives jobs on a shared network different priorities [1]_. Here each job's trees are formed for its
# share of every rate: its weight among the weights of all running jobs that use the same network. Shares are
# only planned with: nothing here enforces them. `NETSTORM_DSCP` marks packets so that the network can.
#
# References:
#     .. [1] Mai, Hong and Costa, Optimizing Network Performance in Distributed Machine Learning, HotCloud
#        '15, section 3.3.


@dataclass(frozen=True, slots=True)
class NetworkClaim:
    """The network that a job uses, and its weight there."""

    network: str
    """Its file; empty: the network is not described."""
    weight: int


def link_shares(claims: Sequence[NetworkClaim]) -> list[float]:
    """Return the share of its network that each claim gets, from 0 to 1; 1 where no network is described."""
    total: dict[str, int] = {}
    for claim in claims:
        total[claim.network] = total.get(claim.network, 0) + claim.weight
    return [claim.weight / total[claim.network] if claim.network else 1.0 for claim in claims]


# One job of a scheduler of several: its machine, its processes and its log.


class JobLog(Protocol):
    """The replay log of a job. `StateFile` is one."""

    def write(self, records: Iterable[Record]) -> None:
        """Append records."""

    def close(self) -> None:
        """Close the log. Twice does no harm; what is written later is lost."""


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """A job that another process served before."""

    log: JobLog
    replayed: ReplayedJob
    settings: Settings
    planned: InitialAssumptions
    """What its policies are formed for."""


class JobSlot:
    """One job.

    Attributes:
        machine: its scheduler.
        settings: of the job.
        name: of the job; another job of that name may come once this one is ending.
        claim: what it asks of the network.
        link_share: the part of each link's rate that it was last told to plan with.
        peers: processes that have asked to join it and have not left it.
        broken: an error in the scheduler itself has ended it.
    """

    def __init__(self, machine: SchedulerMachine, settings: Settings, log: JobLog | None = None) -> None:
        self.machine: Final = machine
        self.settings: Final = settings
        self.name: Final = settings.job
        self.claim: Final = NetworkClaim(settings.network_file, settings.job_weight)
        self.link_share = 1.0
        self.peers: Final[set[Peer]] = set()
        self.broken = False
        self._log: Final = log

    @property
    def running(self) -> bool:
        """Whether all nodes have joined, and some will push more."""
        return self.machine.phase is JobPhase.RUNNING

    @property
    def ending(self) -> bool:
        """Whether it only waits for its nodes to leave."""
        return self.machine.phase not in (JobPhase.GATHERING, JobPhase.RUNNING)

    def close_log(self) -> None:
        """Log that there is nothing to take over, and close the log. Twice does no harm."""
        if self._log is not None:
            self._log.write([JobEnded(text=f"job {self.name!r} is over")])
            self._log.close()


# The first policy of a job on a scheduler of several, formed for the job's share of the network.
#
# It is formed once all nodes of the job have joined. With many nodes that takes seconds, so it must not run
# on the scheduler's own thread.


@dataclass(frozen=True, slots=True)
class FirstPolicyRequest:
    """A first policy to form."""

    number: int
    """Of the request; its result has the same."""
    settings: Settings
    """Of the job."""
    link_share: float
    """The part of each link's rate that the job plans with, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class FirstPolicyResult:
    """The result of a request."""

    number: int
    policy: Policy | None = None
    """None: none could be formed, `problem` says why."""
    planned: InitialAssumptions | None = None
    """What it was formed for."""
    problem: str = ""


def network_file_nodes(settings: Settings) -> int:
    """Return how many nodes NETSTORM_NETWORK describes; 0: there is no such file.

    Raises:
        NetworkFileError: the file is wrong; says where.
    """
    return load_network(settings.network_file).size if settings.network_file else 0


def form_first_policy(request: FirstPolicyRequest) -> FirstPolicyResult:
    """Form the policy that a job begins under; deterministic."""
    settings = request.settings
    try:
        assumption = replace(initial_assumptions(settings), link_share=request.link_share)
        policy = first_policy(assumption)
    except UsageError as error:
        return FirstPolicyResult(request.number, problem=f"job {settings.job!r} cannot begin: {error}")
    return FirstPolicyResult(request.number, policy, assumption)
