"""Which members are alive: heartbeats, suspicions, and the last sign of life of each rank.

Three findings have three time-outs. A process is *dead* if its connection has ended, and no process listens
at its address: that is certain at once (`EndedProcesses`). It is *cut off* if nothing comes from it for a
heartbeat time-out, and the kernel of its machine does not acknowledge either. If that does, it is *busy*: it
is stopped, or other code keeps its interpreter lock. Then it is lost after NETSTORM_WAIT_TIMEOUT.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import Member, PeerGone
from netstorm.scheduler.membership.ended_processes import EndedProcesses
from netstorm.scheduler.membership.member_texts import describe_member, list_some
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["LastSign", "Liveness", "Suspicion", "busy_text"]

_log = logging.getLogger(__name__)

_PROOF_BEATS: Final = 2
"""Heartbeats after a suspicion that prove its target alive: one may have been on its way before."""

_MISSED_BEATS: Final = 3
"""Heartbeat intervals without any message after which a rank does not run, for whatever reason."""

_VALID_BEATS: Final = 2
"""Heartbeat intervals for which it holds that a rank is busy; the scheduler asks once an interval."""


def busy_text(name: str, seconds: float) -> str:
    """Return that a process is busy, for a person."""
    return f"{name}: alive, but its Python has not run for {seconds:.0f} s"


@dataclass(slots=True)
class LastSign:
    """The last sign of life of one rank."""

    at: float
    """When any message came from it."""
    event: str
    """Its last message that means something to a person."""
    event_at: float
    waiting_for: str = ""
    """What it waits for, by its last heartbeat; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A rank that gave up reaching another one after NETSTORM_LINK_TIMEOUT."""

    by: int
    rank: int
    reason: str
    since: float


class Liveness:
    """Watches the members of a running job.

    Attributes:
        ended: signs that members' processes have ended.
    """

    def __init__(self, members: Sequence[Member], options: SchedulerOptions, now: float) -> None:
        # An elastic job goes on without the process, so it need not wait for the reason.
        self.ended: Final = EndedProcesses(0.0 if options.elastic else options.last_word_s)
        self._members: Final = list(members)
        self._interval_s: Final = options.heartbeat_interval_s
        self._timeout_s: Final = options.heartbeat_timeout_s
        self._wait_timeout_s: Final = options.wait_timeout_s
        self._proof_s: Final = min(_PROOF_BEATS * options.heartbeat_interval_s, options.link_timeout_s)
        self._last: Final = [LastSign(now, "it joined", now) for _ in members]
        self._watched: Final = {member.rank for member in members if member.port}
        self._suspicions: dict[tuple[int, int], Suspicion] = {}
        self._busy: Final[dict[int, float]] = {}
        """By rank that was found to be busy: when it was found last."""
        self._warn_after_s: Final[dict[int, float]] = {}
        """By rank that is busy: how long it must be so for the next warning."""
        self._ask_after_s: Final = max(self._timeout_s - self._interval_s, self._timeout_s / 2)
        self._next_check = now + self._ask_after_s

    def heard(self, rank: int, now: float, event: str | None = None) -> None:
        """Record a sign of life. `event`: what the message said, if that means something to a person."""
        last = self._last[rank]
        if self._suspicions and not self.runs(rank, now):
            self._restart_suspicions(rank, now)
        last.at = now
        self.ended.heard(rank)
        if rank in self._busy:
            del self._busy[rank]
            if self._warn_after_s.pop(rank, 0.0):
                _log.warning("%s runs again", describe_member(self._members[rank]))
        if event is not None:
            last.event, last.event_at = event, now

    def waiting_for(self, rank: int, text: str) -> None:
        """Record what a rank says that it waits for; empty: nothing."""
        self._last[rank].waiting_for = text

    def suspect(self, by: int, rank: int, reason: str, now: float) -> bool:
        """Record that a rank cannot reach another one; return whether it did not say so before."""
        since = max(now, self._last[rank].at)  # later than now: the time that a restart grants
        is_new = (by, rank) not in self._suspicions
        self._suspicions.setdefault((by, rank), Suspicion(by, rank, reason, since))
        self._next_check = now
        return is_new

    def watch(self, member: Member, now: float) -> None:
        """Expect heartbeats of a node at a place that was free."""
        self._members[member.rank] = member
        self._last[member.rank] = LastSign(now, "it joined", now)
        self._watched.add(member.rank)
        self._next_check = min(self._next_check, now + self._ask_after_s)

    def stop_watching(self, rank: int) -> None:
        """Expect no heartbeat of a rank any more."""
        self._watched.discard(rank)
        self.ended.heard(rank)
        self._busy.pop(rank, None)
        self._warn_after_s.pop(rank, None)
        for pair in [pair for pair in self._suspicions if rank in pair]:
            del self._suspicions[pair]

    def busy(self, rank: int, now: float) -> None:
        """Record that the kernel of a silent rank's machine acknowledges."""
        self._busy[rank] = now

    def busy_for(self, rank: int, now: float) -> float:
        """Return for how long a rank has been busy; 0: it is not, or for less than a heartbeat time-out."""
        silence = now - self._last[rank].at
        return silence if silence >= self._timeout_s and rank in self._busy else 0.0

    def busy_texts(self, now: float) -> list[str]:
        """Return what is to be said of the ranks that are busy."""
        return [
            busy_text(describe_member(self._members[rank]), seconds)
            for rank in sorted(self._busy)
            if (seconds := self.busy_for(rank, now))
        ]

    def take_warnings(self, now: float) -> list[str]:
        """Return what is to be said of the ranks that have been busy for long: after a heartbeat time-out,
        twice as long, and so on.
        """
        due = [
            (rank, seconds)
            for rank in sorted(self._busy)
            if (seconds := self.busy_for(rank, now)) >= self._warn_after_s.get(rank, self._timeout_s) > 0
        ]
        for rank, seconds in due:
            self._warn_after_s[rank] = 2 * seconds
        return [busy_text(describe_member(self._members[rank]), seconds) for rank, seconds in due]

    def overdue(self, now: float) -> list[int]:
        """Return the ranks whose heartbeats are overdue: it is time to find out whether they are busy."""
        return [rank for rank in self._watched if now - self._last[rank].at >= self._ask_after_s]

    def runs(self, rank: int, now: float) -> bool:
        """Return whether a rank has sent something lately."""
        return now - self._last[rank].at < _MISSED_BEATS * self._interval_s

    def next_check(self) -> float:
        """Return when `check` or `overdue` may find something new."""
        return min(self._next_check, self.ended.next_due())

    def silent(self, now: float) -> list[int]:
        """Return the watched ranks that have missed their heartbeats, the longest silent one first."""
        found = [rank for rank in self._watched if now - self._last[rank].at >= self._timeout_s]
        return sorted(found, key=lambda rank: (self._last[rank].at, rank))

    def check(self, now: float) -> PeerGone | None:
        """Return which ranks are lost, if there are any."""
        ended = self.ended.take(now)
        if ended is not None:
            rank, reason = ended
            text = f"{describe_member(self._members[rank])} is lost: {reason}; {self.last_heard(rank, now)}"
            return PeerGone(rank=rank, kind="lost", reason=text)
        if now < self._next_check:
            return None
        oldest = min((self._last[rank].at for rank in self._watched), default=math.inf)
        due = [at for at in (oldest + self._ask_after_s, oldest + self._timeout_s) if at > now]
        self._next_check = due[0] if len(due) == 2 else min([now + self._interval_s, *due])
        if self._suspicions:
            self._next_check = min(self._next_check, now + self._interval_s)
        silent = [rank for rank in self.silent(now) if not self._may_be_longer(rank, now)]
        if not silent:
            return None
        self._next_check = now  # the others may be next, if the job goes on without the first
        return self._ranks_lost(silent, now)

    def pop_link_failures(self) -> list[Suspicion]:
        """Return the suspicions whose targets have proved alive, and forget them: their links have failed."""
        found = [
            suspicion
            for suspicion in self._suspicions.values()
            if self._last[suspicion.rank].at - suspicion.since >= self._proof_s
        ]
        for suspicion in found:
            del self._suspicions[suspicion.by, suspicion.rank]
        return found

    def withdraw(self, by: int, rank: int) -> None:
        """Forget a suspicion: the rank can reach the other one again."""
        self._suspicions.pop((by, rank), None)

    def last_heard(self, rank: int, now: float) -> str:
        """Return "last heard: round 12 of key 'fc1', 10.2 s ago", and what the rank then waited for."""
        last = self._last[rank]
        waiting = f"; it was waiting: {last.waiting_for}" if last.waiting_for else ""
        return f"last heard: {last.event}, {now - last.event_at:.1f} s ago{waiting}"

    def last_sign(self, rank: int) -> LastSign:
        """Return the last sign of life of a rank. It changes with the next one: copy what you keep."""
        return self._last[rank]

    def waiting_texts(self) -> list[str]:
        """Return what each waiting rank waits for, as it says."""
        return [
            f"rank {rank}: {last.waiting_for}" for rank, last in enumerate(self._last) if last.waiting_for
        ]

    def _may_be_longer(self, rank: int, now: float) -> bool:
        """Return whether a silent rank is busy, and may be for longer."""
        found_at = self._busy.get(rank, -math.inf)
        within = now - self._last[rank].at < self._wait_timeout_s
        return within and now - found_at <= _VALID_BEATS * self._interval_s

    def _restart_suspicions(self, rank: int, now: float) -> None:
        """A rank goes on after it was silent: what it says from now on proves that its links are broken."""
        for pair, suspicion in self._suspicions.items():
            if pair[1] == rank:
                self._suspicions[pair] = dataclasses.replace(suspicion, since=max(suspicion.since, now))

    def _ranks_lost(self, silent: list[int], now: float) -> PeerGone:
        first, others = silent[0], silent[1:]
        silence = now - self._last[first].at
        name = describe_member(self._members[first])
        if silence >= self._wait_timeout_s and self.busy_for(first, now):
            text = f"{busy_text(name, silence)} (NETSTORM_WAIT_TIMEOUT); {self.last_heard(first, now)}"
        else:
            text = f"{name} is lost: no heartbeat for {silence:.1f} s; {self.last_heard(first, now)}"
        if others:
            text += "; also lost: " + list_some(describe_member(self._members[rank]) for rank in others)
        suspicions = [
            f"rank {suspicion.by} says: {suspicion.reason}"
            for suspicion in self._suspicions.values()
            if suspicion.rank == first
        ]
        if suspicions:
            text += "; " + list_some(suspicions)
        return PeerGone(rank=first, kind="lost", reason=text)

    def link_lost(self, suspicion: Suspicion, now: float, *, lost: int) -> PeerGone:
        """Return the message that the job cannot go on without a link that has failed, or without rank `lost`
        if nodes may leave it.
        """
        by = describe_member(self._members[suspicion.by])
        target = describe_member(self._members[suspicion.rank])
        alive = now - self._last[suspicion.rank].at
        return PeerGone(
            rank=lost,
            kind="lost",
            reason=(
                f"the link from {by} to {target} cannot be re-established ({suspicion.reason}); both nodes "
                f"are alive (rank {suspicion.rank} was heard {alive:.1f} s ago), and without that link there "
                "is no way from each node to each other one: check the network and firewalls between the "
                "two"
            ),
        )
