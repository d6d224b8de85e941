"""A standby scheduler: takes a job over when a majority of its nodes have lost their scheduler. Pure.

A node that cannot reach its scheduler for a heartbeat time-out tries the next address that it knows, and ends
its session with the scheduler before. So it counts at one scheduler only. A scheduler that has standbys ends
its side of the job when it is left with half of the members or fewer. So of two schedulers at most one goes
on.

A *recovering* scheduler is a standby at an address that no node knows. It asks nodes to come (`PeerInquiry`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Final

from netstorm.errors import PeerError
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.authority import Role, check_authority
from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Buffer, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Instruction, Refuse, refuse_other_key
from netstorm.scheduler.job_phase import Outcome
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.membership.process_registry import ProcessRegistry
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.replay_log.records import Record
from netstorm.scheduler.standby.peer_inquiry import PeerInquiry
from netstorm.scheduler.standby.report_checks import check_report
from netstorm.scheduler.standby.reported_job import ReportedJob

__all__ = ["StandbyMachine"]

_log = logging.getLogger(__name__)

_STATUS_EVERY_S: Final = 60.0
_RECOVERING_STATUS_EVERY_S: Final = 5.0
"""Of a scheduler that somebody has started to take a job over now, and watches."""


class StandbyMachine:
    """The standby scheduler of one job. Implements `pslite.machine.Machine`.

    Attributes:
        options: of the job.
        counters: of the process.
        job: the machine that serves the job; None until it is taken over.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        now: float,
        counters: Counters | None = None,
        assumed: InitialAssumptions | None = None,
        planned: InitialAssumptions | None = None,
        write: Callable[[list[Record]], None] | None = None,
        inquiry: PeerInquiry | None = None,
    ) -> None:
        """Wait for nodes that have lost their scheduler; for the other arguments see `SchedulerMachine`.

        Args:
            inquiry: asks nodes to come; None: they know this scheduler's address.
        """
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.job: SchedulerMachine | None = None
        self._assumed: Final = assumed
        self._planned: Final = planned
        self._write: Final = write
        self._inquiry: Final = inquiry
        self._registry: Final = ProcessRegistry()
        self._reported: Final = ReportedJob()
        self._resumes: Final[dict[Peer, m.Resume]] = {}
        self._since = math.inf
        self._status_at = now + self._status_every_s
        self._instructions: list[Instruction] = []
        self._on_over: Callable[[Outcome], None] | None = None
        self._on_form: Callable[[FormationRequest], None] | None = None
        self._ended: Outcome | None = None

    # ------------------------------------------------------------------------------- what its process needs

    @property
    def on_over(self) -> Callable[[Outcome], None] | None:
        """See `SchedulerMachine`."""
        return self._on_over

    @on_over.setter
    def on_over(self, function: Callable[[Outcome], None] | None) -> None:
        self._on_over = function

    @property
    def on_form(self) -> Callable[[FormationRequest], None] | None:
        """See `SchedulerMachine`."""
        return self._on_form

    @on_form.setter
    def on_form(self, function: Callable[[FormationRequest], None] | None) -> None:
        self._on_form = function

    @property
    def _status_every_s(self) -> float:
        return _STATUS_EVERY_S if self._inquiry is None else _RECOVERING_STATUS_EVERY_S

    @property
    def outcome(self) -> Outcome | None:
        """How the job went; None until it is over."""
        return self._ended if self.job is None else self.job.outcome

    def policy_formed(self, answer: FormationResult, now: float) -> None:
        """Receive the result of a formation."""
        if self.job is not None:
            self.job.policy_formed(answer, now)

    def snapshots(self, now: float) -> tuple[Snapshot, ...]:
        """Return the snapshot of the job, once it is taken over."""
        return () if self.job is None else self.job.snapshots(now)

    def stop(self, reason: str, now: float) -> None:
        """End because this process must end."""
        if self.job is not None:
            self.job.stop(reason, now)
        else:
            self._ended = Outcome(0, f"standby of job {self.options.job!r}: {reason}; it was not needed")
            if self._on_over is not None:
                self._on_over(self._ended)

    def abort(self, error: Exception, now: float) -> None:
        """End the job because this process cannot go on."""
        if self.job is not None:
            self.job.abort(error, now)

    # ------------------------------------------------------------------------------ what the endpoint needs

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """Admit nodes that have lost their scheduler."""
        if self.job is not None:
            return self.job.admit(hello, user)
        if hello.receiver != SCHEDULER or hello.job != self.options.job:
            return Refuse(f"this is a standby scheduler of job {self.options.job!r}")
        if hello.sender < 0:
            return Refuse(
                f"this is a standby scheduler of job {self.options.job!r}: it takes over when a majority of "
                "the nodes have lost the scheduler before it, and lets nodes join then"
            )
        if self._registry.is_taken(hello.incarnation, user):
            return refuse_other_key("the process of this number", user, self._reported.members())
        return Admit(self._registry.register(hello.incarnation, hello.job, user))

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Handle a message."""
        if peer <= UNKNOWN:
            check_authority(message, Role.MEMBER, Role.RECOVERER, "a node that was asked")
            assert isinstance(message, m.RecoverAnswer)  # the one message of its authority
            if self._inquiry is not None and self.job is None:
                self._inquiry.answered(peer, message, now)
                if not message.accepted:
                    self._reported.remove_rank(message.rank)
            return
        if self.job is not None:
            self.job.receive(peer, message, payload, payload_crc, now)
            return
        check_authority(message, Role.MEMBER, Role.SCHEDULER, f"process {peer}")
        if isinstance(message, m.Resume):
            incarnation, user = self._registry.incarnation_of(peer), self._registry.user_of(peer)
            check_report(message, incarnation, user, self.options.num_workers)
            if not self._reported:
                self._since = now
            self._reported.add(incarnation, user, message)
            self._resumes[peer] = message
            _log.warning("%s", self._reported.waiting_text())
            self._take_over_if_due(now)
        elif isinstance(message, (m.Leave, m.Failed)):
            self._forget(peer)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        if peer <= UNKNOWN:
            if self._inquiry is not None:
                self._inquiry.lost(peer, reason)
        elif self.job is not None:
            self.job.peer_lost(peer, reason, now)
        else:
            self._forget(peer)

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """See `ConnectionWatcher`."""
        if self.job is not None and peer > UNKNOWN:
            self.job.connection_gone(peer, reason, now, refused=refused)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """See `ConnectionWatcher`."""
        return self.job is not None and peer > UNKNOWN and self.job.may_be_busy(peer, now)

    def peer_busy(self, peer: Peer, seconds: float, now: float) -> None:
        """See `ConnectionWatcher`."""
        if self.job is not None and peer > UNKNOWN:
            self.job.peer_busy(peer, seconds, now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.job is not None:
            self.job.tick(now)
            return
        if self._ended is not None:
            return
        if now >= self._status_at:
            self._status_at = now + self._status_every_s
            said = "" if self._inquiry is None else f"; {self._inquiry.status_text()}"
            _log.info("standby of job %r: %s%s", self.options.job, self._reported.waiting_text(), said)
        self._take_over_if_due(now)
        if self._inquiry is not None and self.job is None:
            self._ask(self._inquiry, now)

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.job is not None:
            return self.job.next_tick()
        if self._ended is not None:
            return math.inf
        due = min(self._status_at, self._since + self.options.heartbeat_timeout_s)
        return due if self._inquiry is None else min(due, self._inquiry.next_tick())

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        taken, self._instructions = self._instructions, []
        if self._inquiry is not None:
            taken += self._inquiry.take_instructions()
        return taken if self.job is None else [*taken, *self.job.take_instructions()]

    # ------------------------------------------------------------------------------------------------ inside

    def _ask(self, inquiry: PeerInquiry, now: float) -> None:
        """Ask nodes to come, or end if that is in vain."""
        missing = self._reported.missing_text(elastic=self.options.elastic is not None)
        inquiry.tick(now, missing)
        if inquiry.error:
            self._ended = ended = Outcome(2, f"job {self.options.job!r} is not taken over: {inquiry.error}")
            on_over = self._on_over
            if on_over is not None:
                self._instructions.append(Call(function=lambda: on_over(ended)))

    def _forget(self, peer: Peer) -> None:
        self._resumes.pop(peer, None)
        self._reported.remove(self._registry.incarnation_of(peer))
        self._instructions.append(Disconnect(peer=peer))
        if not self._reported:
            self._since = math.inf

    def _take_over_if_due(self, now: float) -> None:
        """Take over with all nodes, or, after a while, with a majority of them."""
        waited = now - self._since >= self.options.heartbeat_timeout_s
        enough = self.options.elastic is not None and self._reported.has_majority()
        if not self._reported.is_complete() and not (waited and enough):
            if waited:
                self._since = now
            return
        replayed = self._reported.replayed(self.options)
        _log.warning("taking over job %r: %s", self.options.job, self._reported.waiting_text())
        if self._inquiry is not None:
            self._inquiry.end()
        majority = self.options.recoverable or self._reported.majority
        self.job = SchedulerMachine(
            dataclasses.replace(self.options, recoverable=majority),
            replayed.policies[replayed.version],
            now=now,
            counters=self.counters,
            assumed=self._assumed,
            planned=self._planned,
            registry=self._registry,
            write=self._write,
            replayed=replayed,
        )
        self.job.on_over, self.job.on_form = self._on_over, self._on_form
        for peer, resume in self._resumes.items():
            try:
                self.job.receive(peer, resume, None, None, now)
            except PeerError as error:  # of one node: the others must be answered
                self.counters.add("dropped_refused")
                _log.warning("refused what process %d says of the job: %s", peer, error)
