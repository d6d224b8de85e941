"""Several jobs on one scheduler: a machine that holds one scheduler machine for each.

A process says in its `Hello` which job it belongs to. The first that asks to join a job opens it, and says
how many nodes it has, if the scheduler was not told. Jobs share the sockets, the numbers of processes, the
process that forms policies, and the rates of a network that several of them use (`shares`): nothing else, so
what one job does, or what becomes of it, is nothing to the others. A name is free again once its job has
ended. Pure.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from netstorm.errors import NetStormError, PeerError, ProtocolViolation, UsageError
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Instruction, Refuse
from netstorm.scheduler.job_phase import Outcome, Phase
from netstorm.scheduler.jobs.first_policy import Preparation, Prepared
from netstorm.scheduler.jobs.job_settings import check_room, settings_of
from netstorm.scheduler.jobs.job_slot import JobLog, JobSlot, PendingRequests, Resumed
from netstorm.scheduler.jobs.link_shares import link_shares
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.membership.process_registry import ProcessRegistry
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.settings import Settings

__all__ = ["SeveralJobs"]

_log = logging.getLogger(__name__)


class SeveralJobs:
    """A scheduler of several jobs. Implements `pslite.machine.Machine`.

    Attributes:
        outcome: how it all went; None until it is over.
        on_over: called when it is over.
        on_job_over: called with each job's outcome.
        on_form: called with the policies that are to be formed; the answers go to `formed`.
        on_prepare: called with the jobs that need a first policy; the answers go to `prepared`.
        acting: the job that something is being done for, for the log; empty: none.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        release: str,
        now: float,
        described: int = 0,
        counters: Counters | None = None,
        boot: str = "",
        open_log: Callable[[str], JobLog] | None = None,
    ) -> None:
        """Wait for the first job.

        Args:
            settings: the scheduler's own; jobs may differ where it was not told.
            release: version of the NetStorm package.
            now: the time.
            described: how many nodes NETSTORM_NETWORK has; 0: there is no such file.
            counters: what is counted that belongs to no job.
            boot: identity of this run of the machine, for logs.
            open_log: opens the log of a job, which no longer has one; None: there are no logs. It may raise
                a `UsageError`, which whoever asks for the job is told.
        """
        self.counters: Final = counters or Counters()
        self.outcome: Outcome | None = None
        self.on_over: Callable[[Outcome], None] | None = None
        self.on_job_over: Callable[[Outcome], None] | None = None
        self.on_form: Callable[[FormationRequest], None] | None = None
        self.on_prepare: Callable[[Preparation], None] | None = None
        self.acting = ""
        self._settings: Final = settings
        self._release: Final = release
        self._described: Final = described
        self._boot: Final = boot
        self._open_log: Final = open_log
        self._door: Final = ProcessRegistry()
        self._outbox: Final = Outbox()
        self._tenants: list[JobSlot] = []
        """In order of arrival; of one name, only the last can be joined."""
        self._of: dict[Peer, JobSlot] = {}
        self._running: list[JobSlot] = []
        """Those that have a share of the network."""
        self._questions: Final = PendingRequests()
        self._ended = 0
        self._failed = 0
        self._stopping = False

    # ------------------------------------------------------------------------------- what the shell wants

    @property
    def jobs(self) -> tuple[SchedulerMachine, ...]:
        """The machines of the jobs that are here, in order of arrival."""
        return tuple(tenant.machine for tenant in self._tenants)

    def job(self, name: str) -> SchedulerMachine:
        """Return the machine of the job that nodes of this name belong to now.

        Raises:
            UsageError: no such job is here.
        """
        for machine in reversed(self.jobs):
            if machine.options.job == name:
                return machine
        here = ", ".join(repr(one.name) for one in self._tenants) or "none"
        raise UsageError(f"no job {name!r} is here; there are: {here}")

    def snapshots(self, now: float) -> tuple[Snapshot, ...]:
        """Return the snapshots of all jobs that are here, in order of arrival."""
        return tuple(machine.snapshot(now) for machine in self.jobs)

    def prepared(self, answer: Prepared, now: float) -> None:
        """Take what a job begins under."""
        tenant, _ = self._questions.whose(answer.number)
        if tenant not in self._tenants:
            return
        machine = tenant.machine
        if answer.policy is None or answer.planned is None:
            self._do(tenant, functools.partial(machine.unprepared, answer.problem, now), now)
        else:
            begin = functools.partial(
                machine.prepared,
                answer.policy,
                answer.planned,
                now,
                aware=tenant.settings.awareness,
                link_share=tenant.link_share,
            )
            self._do(tenant, begin, now)

    def formed(self, answer: FormationResult, now: float) -> None:
        """Take what has come of a formation that `on_form` was asked for."""
        tenant, number = self._questions.whose(answer.number)
        if tenant in self._tenants:
            own = msgspec.structs.replace(answer, number=number)
            self._do(tenant, functools.partial(tenant.machine.formed, own, now), now)

    def stop(self, reason: str, now: float) -> None:
        """End all jobs because this process is to end; no further one begins."""
        self._stopping = True
        for tenant in list(self._tenants):
            self._do(tenant, functools.partial(tenant.machine.stop, reason, now), now)
        self._perhaps_over()

    def abort(self, error: Exception, now: float) -> None:
        """End all jobs because this process cannot go on."""
        text = str(error) if isinstance(error, NetStormError) else f"its I/O thread has died: {error!r}"
        self.stop(f"the scheduler has stopped: {text}", now)

    def status_text(self) -> str:
        """Return how the jobs are doing, in a line for each."""
        return "\n".join(machine.status_text() for machine in self.jobs) or "no job is here"

    # --------------------------------------------------------------------------------- what drives it wants

    def admit(self, hello: m.Hello) -> Admission:
        """Number whoever comes; who may join is decided when it asks, so that it hears why not."""
        if hello.receiver != SCHEDULER:
            return Refuse(f"this is a scheduler of several jobs, not rank {hello.receiver}")
        peer = self._door.known(hello.incarnation)
        tenant = None if peer is None else self._of.get(peer)
        if tenant is not None:
            return tenant.machine.admit(hello)
        if hello.sender >= 0:
            return Refuse(
                f"this scheduler does not know this rank {hello.sender} of job {hello.job!r}: that has ended "
                "here, or the scheduler was restarted, or another one has taken the address of the one before"
            )
        return Admit(self._door.enter(hello.incarnation, hello.job))

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        """Take a message from a peer."""
        tenant = self._of.get(peer)
        if tenant is None and isinstance(message, m.Join):
            tenant = self._find(peer, message, now)
            if tenant is None:
                return
            self._of[peer] = tenant
            tenant.peers.add(peer)
        if tenant is not None:
            taken = functools.partial(tenant.machine.receive, peer, message, payload, payload_crc, now)
            self._do(tenant, taken, now)
        elif isinstance(message, (m.Leave, m.Failed)):
            self._outbox.add(Disconnect(peer=peer))
        elif not isinstance(message, m.Heartbeat):  # its job may just have ended
            raise ProtocolViolation(
                f"a process that is in no job sends a {type(message).__name__} to the scheduler"
            )

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        tenant = self._of.get(peer)
        if tenant is not None:
            self._do(tenant, functools.partial(tenant.machine.peer_lost, peer, reason, now), now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for tenant in list(self._tenants):
            if now >= tenant.machine.next_tick():
                self._do(tenant, functools.partial(tenant.machine.tick, now), now)

    def next_tick(self) -> float:
        """Return when something is due."""
        return min((machine.next_tick() for machine in self.jobs), default=math.inf)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        return self._outbox.take()

    # --------------------------------------------------------------------------------------------- jobs come

    def _find(self, peer: Peer, join: m.Join, now: float) -> JobSlot | None:
        """Return the job that a process asks for, opened if need be; None: it was told why not."""
        name = self._door.job_of(peer)
        here = [one for one in self._tenants if not one.ending]
        for tenant in here:
            if tenant.name == name:
                return tenant
        try:
            check_room(
                self._settings,
                name,
                [one.name for one in here],
                ended=self._ended + len(self._tenants) - len(here),
                stopping=self._stopping,
            )
            settings = settings_of(
                self._settings, name, join.num_workers, join.must_agree, described=self._described
            )
            return self._open(settings, join.must_agree, now)
        except UsageError as error:
            _log.warning("refused: %s", error)
            self.counters.add("refused")
            self._outbox.tell([peer], m.PeerGone(rank=-1, kind="refused", reason=str(error)))
            self._outbox.add(Disconnect(peer=peer))
            return None

    def resume(self, jobs: Iterable[Resumed], now: float) -> None:
        """Go on with jobs that another process has served before; call it before anything else happens."""
        for job in jobs:
            machine = SchedulerMachine(
                self._options(job.settings, job.past.began.said),
                job.past.policies[job.past.version],
                now=now,
                door=self._door,
                assumed=job.planned if job.settings.awareness else None,
                planned=job.planned,
                write=job.log.write,
                past=job.past,
            )
            tenant = self._add(machine, job.settings, job.log)
            tenant.peers.update(machine.peers)
            self._of.update(dict.fromkeys(machine.peers, tenant))
            self._look(tenant, now)

    def _open(self, settings: Settings, said: Mapping[str, str], now: float) -> JobSlot:
        for before in self._tenants:
            if before.name == settings.job:
                before.close_log()
        log = None if self._open_log is None else self._open_log(settings.job)
        write = None if log is None else log.write
        options = self._options(settings, said)
        machine = SchedulerMachine(options, None, now=now, door=self._door, write=write)
        tenant = self._add(machine, settings, log)
        if self._described and not settings.network_file:
            _log.warning(
                "job %r has %d nodes, NETSTORM_NETWORK describes %d: all its links are assumed equal",
                tenant.name,
                settings.num_workers,
                self._described,
            )
        return tenant

    def _options(self, settings: Settings, said: Mapping[str, str]) -> SchedulerOptions:
        return SchedulerOptions.from_settings(settings, release=self._release, boot=self._boot, said=said)

    def _add(self, machine: SchedulerMachine, settings: Settings, log: JobLog | None) -> JobSlot:
        tenant = JobSlot(machine, settings, log)
        machine.on_complete = lambda: self._prepare(tenant)
        machine.on_form = lambda question: self._form(tenant, question)
        self._tenants.append(tenant)
        return tenant

    def _prepare(self, tenant: JobSlot) -> None:
        tenant.link_share = link_shares([*(one.claim for one in self._running), tenant.claim])[-1]
        if self.on_prepare is not None:
            self.on_prepare(
                Preparation(self._questions.number(tenant, 0), tenant.settings, tenant.link_share)
            )

    def _form(self, tenant: JobSlot, question: FormationRequest) -> None:
        if self.on_form is not None:
            number = self._questions.number(tenant, question.number)
            self.on_form(msgspec.structs.replace(question, number=number))

    # --------------------------------------------------------------------------------------- jobs run and go

    def _do(self, tenant: JobSlot, action: Callable[[], None], now: float) -> None:
        """Let something happen to a job; whatever comes of it, the others do not feel it."""
        before, self.acting = self.acting, tenant.name
        try:
            action()
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001 -- one job's end is enough
            _log.exception("job %r ends for an error of the scheduler's", tenant.name)
            self._break(tenant, error, now)
        finally:
            self._look(tenant, now)
            self.acting = before

    def _break(self, tenant: JobSlot, error: Exception, now: float) -> None:
        """End a job whose machine has failed: in good order if it still can."""
        if not tenant.broken:
            tenant.broken = True
            with contextlib.suppress(Exception):
                tenant.machine.abort(error, now)
                return
        for peer in sorted(tenant.peers):
            self._outbox.add(Disconnect(peer=peer))
        self._drop(tenant, Outcome(1, f"job {tenant.name!r} has failed: {error!r}"))

    def _look(self, tenant: JobSlot, now: float) -> None:
        """Carry on what a job wants done, and see whether it has begun or ended."""
        for instruction in tenant.machine.take_instructions():
            self._outbox.add(instruction)
            if isinstance(instruction, Disconnect):
                self._part_with(tenant, instruction.peer)
        running = [one for one in self._tenants if one.machine.phase is Phase.RUNNING]
        if running != self._running:
            verb = "begun" if len(running) > len(self._running) else "ended"
            self._running = running
            self._share(f"job {tenant.name!r} has {verb}")
        if tenant in self._tenants and (tenant.machine.outcome is not None or tenant.machine.deserted):
            self._drop(tenant, tenant.machine.outcome)

    def _share(self, why: str) -> None:
        """Tell each running job which share of its network it plans with now."""
        for one, share in zip(self._running, link_shares([one.claim for one in self._running]), strict=True):
            if share != one.link_share:
                one.link_share = share
                one.machine.take_link_share(share, f"{why}: this one plans with {share:.0%} of each link")

    def _part_with(self, tenant: JobSlot, peer: Peer) -> None:
        if self._of.get(peer) is tenant:
            del self._of[peer]
        tenant.peers.discard(peer)
        self._door.release(peer)

    def _drop(self, tenant: JobSlot, outcome: Outcome | None) -> None:
        """Forget a job; `outcome`: None if it has never begun, and nobody waits for it any more."""
        self._tenants.remove(tenant)
        tenant.close_log()
        for peer in list(tenant.peers):
            self._part_with(tenant, peer)
        if outcome is None:
            return
        self._ended += 1
        if outcome.exit_code:
            self._failed += 1
        on_job_over = self.on_job_over
        if on_job_over is not None:
            self._outbox.add(Call(function=lambda: on_job_over(outcome)))
        self._perhaps_over()

    def _perhaps_over(self) -> None:
        enough = self._settings.jobs and self._ended >= self._settings.jobs
        if self._tenants or self.outcome is not None or not (self._stopping or enough):
            return
        text = f"{self._ended} jobs have ended, {self._failed} of them have failed"
        self.outcome = outcome = Outcome(int(self._failed > 0), text)
        on_over = self.on_over
        if on_over is not None:
            self._outbox.add(Call(function=lambda: on_over(outcome)))
