"""The scheduler as a pure state machine: from the first node at the door to the last that leaves.

Peers are numbered in order of arrival, by incarnation (`strangers`). While not all nodes are here they wait
(`gathering`); then they get ranks, and `job` serves them. What ends a job is decided here, in one place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Instruction, Refuse
from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.job import Job
from netstorm.scheduler.job_phase import FAREWELL_S, Outcome, Phase
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.log.records import Ended, Record
from netstorm.scheduler.log.replay import ReplayedJob
from netstorm.scheduler.membership.process_registry import ProcessRegistry
from netstorm.scheduler.membership.rendezvous import describe, full, list_some, place
from netstorm.scheduler.membership.startup import Startup
from netstorm.scheduler.observe.announcements import PolicyHistory
from netstorm.scheduler.observe.snapshot import Snapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.assumptions import InitialAssumptions
from netstorm.scheduler.policies.control_loop import Awareness
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.policies.policy_check import check_policy, placeholder_policy
from netstorm.topology.policy import Policy

__all__ = ["SchedulerMachine"]

_log = logging.getLogger(__name__)


class SchedulerMachine:
    """One job's scheduler. Implements `pslite.machine.Machine`.

    Attributes:
        phase: where the job is in its life.
        outcome: how it went; None until it is over.
        on_over: called when it is over, if it is set.
        on_form: called with the policies that are to be formed; the answers go to `formed`.
        on_complete: called once all nodes are here, if the first policy is not; it goes to `prepared`.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        policy: Policy | None,
        *,
        now: float,
        counters: Counters | None = None,
        assumed: InitialAssumptions | None = None,
        planned: InitialAssumptions | None = None,
        door: ProcessRegistry | None = None,
        write: Callable[[list[Record]], None] | None = None,
        past: ReplayedJob | None = None,
    ) -> None:
        """Begin to wait for nodes.

        Args:
            options: the job.
            policy: what it begins under, formed for what is `assumed`. None: it is asked for, once all nodes
                are here.
            now: the time.
            counters: what is counted.
            assumed: None: the policy stays until somebody installs another one, or a link fails.
            planned: what policies are formed for when links fail, even if nothing is `assumed`.
            door: numbers those who come; None: one of its own.
            write: writes down what another process needs to take over; None: nothing is.
            past: what another process has written down of this job.

        Raises:
            UsageError: the policy is for another number of nodes than the job has.
        """
        self.options: Final = options
        self.counters: Final = counters or Counters()
        self.phase = Phase.GATHERING
        self.outcome: Outcome | None = None
        self.on_over: Callable[[Outcome], None] | None = None
        self.on_form: Callable[[FormationRequest], None] | None = None
        self.on_complete: Callable[[], None] | None = None
        self._prepared = policy is not None
        self._first_policy = placeholder_policy(options.num_workers) if policy is None else policy
        check_policy(self._first_policy, nodes=options.num_workers, after=-1)
        self._assumed = assumed
        self._planned = planned
        self._past = PolicyHistory(self._first_policy, now)
        self._link_share = 1.0
        self._outbox: Final = Outbox(write)
        self._door: Final = door or ProcessRegistry()
        self._gathering: Final = Startup(options, self._outbox, self.counters, now)
        self._job: Job | None = None
        self._ranks: dict[Peer, int] = {}
        self._left: set[int] = set()
        self._failure: m.PeerGone | None = None
        self._started_at = now
        self._leave_at = math.inf
        self._last_tick = now
        if past is not None:
            self._take_over(past, now)

    # ------------------------------------------------------------------------------- what the shell wants

    @property
    def policy(self) -> Policy:
        """The policy that rounds which nobody has been granted will run under."""
        return self._first_policy if self._job is None else self._job.policy

    @property
    def members(self) -> tuple[m.Member, ...]:
        """The nodes, by rank; none until all are here."""
        return () if self._job is None else self._job.members.all

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The numbers of the nodes' processes, by rank; none until all are here."""
        return tuple(self._ranks)

    @property
    def awareness(self) -> Awareness | None:
        """What is measured, and what follows from it; None: nothing does, or not all nodes are here."""
        return None if self._job is None else self._job.awareness

    @property
    def failed_links(self) -> tuple[FailedLinkRecord, ...]:
        """The links that the job does without at present."""
        return () if self._job is None else tuple(self._job.links.failures.values())

    def install_policy(self, policy: Policy) -> None:
        """Let a new policy apply, in each key, from the first round on that nobody has been granted.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        if self._job is not None:
            self._job.install(policy)
        else:
            check_policy(policy, nodes=self.options.num_workers, after=self._first_policy.version)
            self._first_policy = policy
        self._past.installed(policy, self._last_tick)
        self.counters.add("policies")

    def formed(self, answer: FormationResult, now: float) -> None:
        """Take what has come of a formation that `on_form` was asked for."""
        if self._job is None or self.phase is not Phase.RUNNING:
            return
        policy = self._job.formed(answer, now)
        if policy is not None:
            self.install_policy(policy)

    def prepared(
        self, policy: Policy, planned: InitialAssumptions, now: float, *, aware: bool, link_share: float = 1.0
    ) -> None:
        """Take what the job begins under, which `on_complete` was called for.

        Args:
            policy: formed for what is `planned`.
            planned: what later ones are formed for.
            now: the time.
            aware: they follow what is measured.
            link_share: of each link's rate that is planned with.

        Raises:
            UsageError: the policy is for another number of nodes than the job has.
        """
        check_policy(policy, nodes=self.options.num_workers, after=-1)
        self._prepared = True
        self._first_policy, self._link_share = policy, link_share
        self._assumed, self._planned = planned if aware else None, planned
        self._past = PolicyHistory(policy, now)
        if self.phase is Phase.GATHERING and self._gathering.complete():  # nobody has left meanwhile
            self._begin(now)

    def unprepared(self, problem: str, now: float) -> None:
        """Learn that there is nothing that the job could begin under."""
        self._fail(m.PeerGone(rank=-1, kind="refused", reason=problem), now)

    def take_link_share(self, share: float, why: str) -> None:
        """Plan with another share of each link from now on; `why`: for a person."""
        self._link_share = share
        if self._job is not None and self.phase is Phase.RUNNING:
            self._job.take_link_share(share, why)

    @property
    def deserted(self) -> bool:
        """Whether nobody is here any more before all have come."""
        return self.phase is Phase.GATHERING and not self._gathering.peers()

    def stop(self, reason: str, now: float) -> None:
        """End the job because this process is to end. If all have finished, just do not wait any more."""
        if self.phase is Phase.FINISHED:
            self._leave_at = now
        else:
            self._fail(m.PeerGone(rank=-1, kind="stopped", reason=reason), now)

    def abort(self, error: Exception, now: float) -> None:
        """End the job because this process cannot go on."""
        text = str(error) if isinstance(error, NetStormError) else f"its I/O thread has died: {error!r}"
        self.stop(f"the scheduler has stopped: {text}", now)

    def status_text(self) -> str:
        """Return how the job is doing, in one line."""
        return self._gathering.text() if self._job is None else self._job.status_text()

    def snapshots(self, now: float) -> tuple[Snapshot, ...]:
        """Return the snapshot of the one job."""
        return (self.snapshot(now),)

    def snapshot(self, now: float) -> Snapshot:
        """Return everything that people and programs may want to know of the job. Cheap; nothing changes."""
        job = self._job
        collector = None if job is None or job.awareness is None else job.awareness.collector
        return Snapshot(
            now=now,
            started_at=self._started_at,
            job=self.options.job,
            release=self.options.release,
            num_workers=self.options.num_workers,
            phase=self.phase,
            text=self.status_text() if self._failure is None else self._failure.reason,
            nodes=self._gathering.snapshots() if job is None else job.node_snapshots(self._left, now),
            policy=self.policy,
            policy_since=self._past.since,
            former=self._past.former(),
            keys=0 if job is None else len(job.rounds.keys),
            key_bytes=0 if job is None else job.rounds.keys.total_bytes,
            considered="" if job is None or job.awareness is None else job.awareness.adaptation.reason,
            links=tuple if job is None else job.seen_links(now),
            counters=self.counters.snapshot(),
            failed_links=self.failed_links,
            link_share=self._link_share,
            routed=frozenset() if collector is None else collector.routed,
            crowded=collector is not None and collector.contended,
        )

    # --------------------------------------------------------------------------------- what drives it wants

    def admit(self, hello: m.Hello) -> Admission:
        """Number whoever comes; who may join is decided when it asks, so that it hears why not."""
        if hello.receiver != SCHEDULER:
            return Refuse(f"this is the scheduler of job {self.options.job!r}, not rank {hello.receiver}")
        peer = self._door.known(hello.incarnation)
        if peer is None and hello.sender >= 0:
            return Refuse(
                f"the scheduler of job {self.options.job!r} does not know this rank {hello.sender}: it was "
                "restarted, or another scheduler has taken the address of the one before"
            )
        return Admit(self._door.enter(hello.incarnation, hello.job))

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        """Take a message from a peer."""
        rank = self._ranks.get(peer)
        if isinstance(message, m.Join):
            self._join(peer, message, now)
        elif rank is None or self._job is None:
            self._from_stranger(peer, message, now)
        else:
            self._job.members.liveness.heard(rank, now)
            if self.phase is Phase.RUNNING:
                self._from_member(self._job, rank, message, now)
            elif isinstance(message, (m.Leave, m.Failed)):
                self._leaves(rank, now)
            elif isinstance(message, m.Resume) and self.phase is Phase.FINISHED:
                self._outbox.tell([peer], m.AllFinished())

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """React to a session that cannot be re-established."""
        rank = self._ranks.get(peer)
        if rank is None or self._job is None:
            self._forget(peer, reason, now)
        else:
            if self.phase is Phase.RUNNING:
                self._gone(self._job.lost(rank, reason, now), now)
            self._leaves(rank, now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        late = now - self._last_tick - 2 * self.options.heartbeat_interval_s
        if late > 0 and self._job is not None:
            self._job.members.liveness.deaf_for(late, now)
            if late >= 1.0:
                _log.warning("the scheduler did not run for %.1f s: heartbeats get that much longer", late)
        self._last_tick = now
        if self.phase is Phase.GATHERING:
            self._gather(now)
        elif self._job is not None and self.phase is Phase.RUNNING:
            gone = self._job.tick(now)
            if gone is not None:
                self._gone(gone, now)
            else:
                self._adapt(self._job, now)
        if self._job is not None and self.phase in (Phase.FINISHED, Phase.FAILED):
            for rank in self._job.members.liveness.silent(now):
                self._leaves(rank, now)
        if now >= self._leave_at and self.phase is not Phase.OVER:
            self._over()

    def next_tick(self) -> float:
        """Return when something is due."""
        if self.phase is Phase.OVER:
            return math.inf
        due = min(self._last_tick + self.options.heartbeat_interval_s, self._leave_at)
        # No later than that: only who expects a tick notices that it comes late.
        return min(due, self._job.next_tick()) if self._job and self.phase is Phase.RUNNING else due

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done."""
        return self._outbox.take()

    # --------------------------------------------------------------------------------------------- gathering

    def _join(self, peer: Peer, join: m.Join, now: float) -> None:
        job = self._door.job_of(peer)
        if job != self.options.job:
            reason = (
                f"the node at {place(join.host, join.port, join.site)} is of job {job!r}, the scheduler of "
                f"job {self.options.job!r}: give both the same NETSTORM_JOB, or the node another "
                "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            )
            self._gathering.turn_away(peer, reason)
        elif self._failure is not None:
            self._gathering.turn_away(peer, f"the job has already ended: {self._failure.reason}")
        elif self._job is None:
            self._gathering.come(peer, self._door.incarnation_of(peer), join, now)
            if self._gathering.complete():
                self._complete(now)
        elif peer in self._ranks:  # its session broke before it could read that it had joined
            self._job.welcome(self._ranks[peer], now)
        else:
            name = place(join.host, join.port, join.site)
            members = self._job.members.all
            self._gathering.turn_away(peer, full(self.options.job, members, name, join.asked_rank))

    def _gather(self, now: float) -> None:
        self._gathering.look(now)
        if self._gathering.complete():
            self._complete(now)
        if self.phase is Phase.GATHERING:
            late = self._gathering.say(now)
            if late is not None:
                self._fail(late, now)

    def _complete(self, now: float) -> None:
        if self._prepared:
            self._begin(now)
        elif not self._gathering.forming and self.on_complete is not None:
            self._gathering.forming = True
            self._outbox.add(Call(function=self.on_complete))

    def _begin(self, now: float) -> None:
        """Everybody is here: give ranks."""
        job = self._serve(self._gathering.seats(), self._first_policy, now)
        _log.info("all nodes are here: %s", list_some(map(describe, job.members.all)))
        for rank in range(len(job.members)):
            job.welcome(rank, now)

    def _take_over(self, past: ReplayedJob, now: float) -> None:
        """Go on with the job that another process has served before."""
        policy = past.policies[past.version]
        peers = [self._door.enter(member.incarnation, self.options.job) for member in past.members]
        job = self._serve(list(zip(peers, past.members, strict=True)), policy, now, past)
        if job.all_finished:
            self.phase = Phase.FINISHED
        _log.warning(
            "job %r goes on: %d nodes, %d keys, policy version %d",
            self.options.job,
            len(peers),
            len(job.rounds.keys),
            policy.version,
        )

    def _serve(
        self,
        seats: Sequence[tuple[Peer, m.Member]],
        policy: Policy,
        now: float,
        past: ReplayedJob | None = None,
    ) -> Job:
        self.phase = Phase.RUNNING
        self._job = job = Job(
            seats,
            policy,
            self.options,
            self._outbox,
            now,
            assumed=self._assumed,
            planned=self._planned,
            past=past,
        )
        for rank, peer in enumerate(job.members.peers):
            self._ranks[peer] = rank
            self._door.keep(peer)
        return job

    def _from_stranger(self, peer: Peer, message: m.Message, now: float) -> None:
        """Take a message of a process that has no rank."""
        match message:
            case m.Heartbeat():
                self._gathering.heard(peer, now)
            case m.Leave():
                self._forget(peer, "it left", now)
            case m.Failed():
                self._forget(peer, f"it failed: {message.reason}", now)
            case _:
                raise ProtocolViolation(
                    f"a process that has not joined sends a {type(message).__name__} to the scheduler"
                )

    def _forget(self, peer: Peer, reason: str, now: float) -> None:
        """Let a process without a rank go."""
        self._gathering.leave(peer, reason, quietly=self.phase is not Phase.GATHERING)
        if self.phase is Phase.FAILED and not self._gathering.peers():
            self._leave_at = now

    # ------------------------------------------------------------------------------------ running and ending

    def _from_member(self, job: Job, rank: int, message: m.Message, now: float) -> None:
        if isinstance(message, (m.Leave, m.Failed)):
            self._leaves(rank, now)
        gone = job.receive(rank, message, now)
        if gone is not None:
            self._gone(gone, now)
        elif job.all_finished:
            self.phase = Phase.FINISHED
            _log.info("all nodes have finished")
            self._outbox.tell(job.members.peers, m.AllFinished())

    def _adapt(self, job: Job, now: float) -> None:
        """Have a policy formed, if it is time. It takes long: somebody else does it."""
        on_form = self.on_form
        if on_form is None:
            return
        question = job.look(now)
        if isinstance(question, Policy):
            self.install_policy(question)
        elif question is not None:
            self._outbox.add(Call(function=lambda: on_form(question)))

    def _gone(self, gone: m.PeerGone, now: float) -> None:
        """Decide what it means that a rank is gone or that ranks disagree. So far: the end of the job."""
        self._fail(gone, now)

    def _fail(self, failure: m.PeerGone, now: float) -> None:
        """End the job; everybody who does not know is told why. The first reason stays."""
        if self.phase not in (Phase.GATHERING, Phase.RUNNING):
            return
        waiting = (
            self._gathering.peers()
            if self._job is None
            else [peer for rank, peer in enumerate(self._job.members.peers) if rank not in self._left]
        )
        self.phase = Phase.FAILED
        self._failure = failure
        self._outbox.note(Ended(text=failure.reason))
        self._leave_at = now + FAREWELL_S if waiting else now
        # Alone, the process's last line is enough.
        _log.log(logging.ERROR if waiting else logging.DEBUG, "the job ends: %s", failure.reason)
        self._outbox.tell(waiting, failure)

    def _leaves(self, rank: int, now: float) -> None:
        """A member will not be heard of again."""
        if self._job is None or rank in self._left:
            return
        self._left.add(rank)
        self._job.members.liveness.stop_watching(rank)
        self._outbox.add(Disconnect(peer=self._job.members.peers[rank]))
        if len(self._left) == len(self._job.members):
            self._leave_at = now

    def _over(self) -> None:
        self.phase = Phase.OVER
        keys = 0 if self._job is None else len(self._job.rounds.keys)
        nodes = self.options.num_workers
        self.outcome = outcome = Outcome.of(self.options.job, self._failure, nodes=nodes, keys=keys)
        self._outbox.note(Ended(text=outcome.text))
        on_over = self.on_over
        if on_over is not None:
            self._outbox.add(Call(function=lambda: on_over(outcome)))
