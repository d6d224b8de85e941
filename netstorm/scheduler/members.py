"""The nodes of a job that has begun: their addresses, whether they are alive, their barriers. Pure."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.addresses import host_port
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Member, Message, PeerGone
from netstorm.pslite.machine import Inquire, busy_text
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log import LoggedOutbox

__all__ = [
    "REMIND_EVERY_S",
    "BarrierCount",
    "EndedProcesses",
    "LastSign",
    "Members",
    "Suspicion",
    "describe_member",
    "format_address",
    "list_some",
]


# The nodes of a job that has begun: their addresses, their liveness, and sending to them.


class Members:
    """The nodes of one job. If nodes may leave and join, some ranks may be places that no node has.

    Attributes:
        all: the nodes, by rank. Without a port: a place that no node has.
        present: the ranks that are in the job, ascending.
        liveness: when each was last heard.
    """

    def __init__(
        self,
        members: Sequence[tuple[Peer, Member]],
        options: SchedulerOptions,
        outbox: LoggedOutbox,
        heard_at: float,
    ) -> None:
        """Begin with `members`, by rank. All count as heard at `heard_at`."""
        self.all = tuple(member for _, member in members)
        self.present = tuple(member.rank for member in self.all if member.port)
        self.liveness: Final = Liveness(self.all, options, heard_at)
        self._peers: Final = {member.rank: peer for peer, member in members if member.port}
        self._outbox: Final = outbox

    def __len__(self) -> int:
        return len(self.all)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The numbers of the processes that are in the job, by rank."""
        return tuple(self._peers[rank] for rank in self.present)

    def peers_but(self, ranks: Iterable[int]) -> list[Peer]:
        """Return the numbers of the processes of all ranks that are in the job but some."""
        left = set(ranks)
        return [self._peers[rank] for rank in self.present if rank not in left]

    def peer_of(self, rank: int) -> Peer | None:
        """Return the number of the process that has, or last had, a rank; None: none ever had."""
        return self._peers.get(rank)

    def describe(self, rank: int) -> str:
        """Return a rank with its address and site, for a person."""
        return describe_member(self.all[rank])

    @property
    def on_one_machine(self) -> bool:
        """Whether all have the same address."""
        return len({self.all[rank].host for rank in self.present}) == 1

    def remove(self, rank: int) -> None:
        """Go on without a rank."""
        self.present = tuple(other for other in self.present if other != rank)
        self.liveness.stop_watching(rank)
        self._replace(rank, Member(rank, self.all[rank].host, 0, self.all[rank].site, 0))

    def add(self, peer: Peer, member: Member, now: float) -> None:
        """Go on with a node at a place that was free."""
        self._peers[member.rank] = peer
        self.present = tuple(sorted({*self.present, member.rank}))
        self._replace(member.rank, member)
        self.liveness.watch(member, now)

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message to some nodes; those that are not in the job are left out."""
        here = set(self.present)
        self._outbox.send([self._peers[rank] for rank in ranks if rank in here], message)

    def send_all(self, message: Message) -> None:
        """Send a message to all nodes."""
        self._outbox.send(self.peers, message)

    def inquire(self, ranks: Iterable[int]) -> None:
        """Find out whether ranks are busy, or have ended."""
        for rank in ranks:
            peer, member = self._peers.get(rank), self.all[rank]
            if peer is not None and member.port:
                self._outbox.add(Inquire(peer=peer, host=member.host, port=member.port))

    def _replace(self, rank: int, member: Member) -> None:
        self.all = (*self.all[:rank], member, *self.all[rank + 1 :])


# Which members are alive: heartbeats, suspicions, and the last sign of life of each rank.
#
# Three findings have three time-outs. A process is *dead* if its connection has ended, and no process listens
# at its address: that is certain at once (`EndedProcesses`). It is *cut off* if nothing comes from it for a
# heartbeat time-out, and the kernel of its machine does not acknowledge either. If that does, it is *busy*:
# it is stopped, or other code keeps its interpreter lock. Then it is lost after NETSTORM_WAIT_TIMEOUT.

_log = logging.getLogger(__name__)

REMIND_EVERY_S: Final = 3.0
"""How often waiting nodes are told for whom they wait."""

_PROOF_BEATS: Final = 2
"""Heartbeats after a suspicion that prove its target alive: one may have been on its way before."""

_MISSED_BEATS: Final = 3
"""Heartbeat intervals without any message after which a rank does not run, for whatever reason."""


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
        self._busy: Final[dict[int, bool]] = {}
        """Silent ranks whose machines have acknowledged, and whether late."""
        self._probed: Final[set[int]] = set()
        """Silent ranks to which something was sent, so that their machines have something to acknowledge."""
        self._warn_after_s: Final[dict[int, float]] = {}
        """By rank that is busy: how long it must be so for the next warning."""
        # Twice before the time-out: the first time something is sent, the second time shows how it arrived.
        self._ask_after_s: Final = max(self._timeout_s - 2 * self._interval_s, self._timeout_s / 2)
        self._asked: Final[dict[int, float]] = {}
        """By silent rank: since when its machine has been asked, and has not acknowledged."""
        self._answer_s: Final = (self._timeout_s - self._ask_after_s) / 2
        self._next_check = now + self._ask_after_s

    def heard(self, rank: int, now: float) -> None:
        """Record a sign of life."""
        last = self._last[rank]
        if self._suspicions and not self.runs(rank, now):
            self._restart_suspicions(rank, now)
        last.at = now
        self._asked.pop(rank, None)
        self._probed.discard(rank)
        self.ended.heard(rank)
        if rank in self._busy:
            again = "is heard again" if self._busy.pop(rank) else "runs again"
            if self._warn_after_s.pop(rank, 0.0):
                _log.warning("%s %s", describe_member(self._members[rank]), again)

    def did(self, rank: int, event: str, now: float) -> None:
        """Record what a rank's message said that means something to a person."""
        last = self._last[rank]
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
        self._asked.pop(rank, None)
        self._probed.discard(rank)
        self._busy.pop(rank, None)
        self._warn_after_s.pop(rank, None)
        for pair in [pair for pair in self._suspicions if rank in pair]:
            del self._suspicions[pair]

    def busy(self, rank: int, *, late: bool = False) -> None:
        """Record that the kernel of a silent rank's machine acknowledges; or that it does so late: then the
        rank's heartbeats may only wait on the way.
        """
        self._asked.pop(rank, None)
        self._busy[rank] = late

    def busy_for(self, rank: int, now: float) -> float:
        """Return for how long a rank has been busy; 0: it is not, as far as is known, or for less than a
        heartbeat time-out.
        """
        return 0.0 if self._busy.get(rank, True) else self._silent_for(rank, now)

    def _silent_for(self, rank: int, now: float) -> float:
        """Return for how long nothing has come from a rank; 0: for less than a heartbeat time-out."""
        silence = now - self._last[rank].at
        return silence if silence >= self._timeout_s else 0.0

    def _busy_text(self, rank: int, seconds: float) -> str:
        return busy_text(describe_member(self._members[rank]), seconds, late=self._busy[rank])

    def busy_texts(self, now: float) -> list[str]:
        """Return what is to be said of the ranks that are busy."""
        return [
            self._busy_text(rank, seconds)
            for rank in sorted(self._busy)
            if (seconds := self._silent_for(rank, now))
        ]

    def take_warnings(self, now: float) -> list[str]:
        """Return what is to be said of the ranks that have been busy for long: after a heartbeat time-out,
        twice as long, and so on.
        """
        due = [
            (rank, seconds)
            for rank in sorted(self._busy)
            if (seconds := self._silent_for(rank, now)) >= self._warn_after_s.get(rank, self._timeout_s) > 0
        ]
        for rank, seconds in due:
            self._warn_after_s[rank] = 2 * seconds
        return [self._busy_text(rank, seconds) for rank, seconds in due]

    def take_unprobed(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some silent ranks to which nothing was sent yet, once: `busy` needs it."""
        unprobed = [rank for rank in ranks if rank not in self._probed]
        self._probed.update(unprobed)
        return unprobed

    def overdue(self, now: float) -> list[int]:
        """Return the ranks whose heartbeats are overdue, and which the caller now asks about."""
        ranks = [rank for rank in self._watched if now - self._last[rank].at >= self._ask_after_s]
        for rank in ranks:
            self._asked.setdefault(rank, now)
        return ranks

    def runs(self, rank: int, now: float) -> bool:
        """Return whether a rank has sent something lately."""
        return now - self._last[rank].at < _MISSED_BEATS * self._interval_s

    def next_check(self) -> float:
        """Return when `check` or `overdue` may find something new."""
        return min(self._next_check, self.ended.next_due())

    def silent(self, now: float) -> list[int]:
        """Return the watched ranks that have missed their heartbeats, the longest silent one first."""
        silent = [rank for rank in self._watched if now - self._last[rank].at >= self._timeout_s]
        return sorted(silent, key=lambda rank: (self._last[rank].at, rank))

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
        failures = [
            suspicion
            for suspicion in self._suspicions.values()
            if self._last[suspicion.rank].at - suspicion.since >= self._proof_s
        ]
        for suspicion in failures:
            del self._suspicions[suspicion.by, suspicion.rank]
        return failures

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
        """Return whether a silent rank may be so for longer: it is busy, or had no time to be found so, as
        this process may be late itself, and ask only now.
        """
        within = now - self._last[rank].at < self._wait_timeout_s
        return within and now - self._asked.get(rank, now) < self._answer_s

    def _restart_suspicions(self, rank: int, now: float) -> None:
        """A rank goes on after it was silent: what it says from now on proves that its links are broken."""
        for pair, suspicion in self._suspicions.items():
            if pair[1] == rank:
                self._suspicions[pair] = dataclasses.replace(suspicion, since=max(suspicion.since, now))

    def _ranks_lost(self, silent: list[int], now: float) -> PeerGone:
        first, others = silent[0], silent[1:]
        silence = now - self._last[first].at
        name = describe_member(self._members[first])
        if silence >= self._wait_timeout_s and first in self._busy:
            text = f"{self._busy_text(first, silence)} (NETSTORM_WAIT_TIMEOUT); {self.last_heard(first, now)}"
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


# Members whose processes have certainly ended: they need not be silent for long to be lost.
#
# Two signs together are certain: the member's own connection to the scheduler is gone, and no process listens
# at its address, as another member says who tried to connect, or the scheduler itself found.


class EndedProcesses:
    """The signs that processes of one job have ended.

    Attributes:
        certain: ranks that have certainly ended, as `take` has said.
    """

    def __init__(self, last_word_s: float) -> None:
        """Begin without any. `last_word_s`: how long a process that has ended is not lost yet, since somebody
        may still say why.
        """
        self._last_word_s: Final = last_word_s
        self._refused: Final[dict[int, str]] = {}
        """By rank at whose address no process listens: who says so."""
        self._disconnected: Final[set[int]] = set()
        """Ranks whose connection to the scheduler is gone."""
        self._lost_at: Final[dict[int, float]] = {}
        """By rank of which there are both signs."""
        self.certain: Final[set[int]] = set()

    def heard(self, rank: int) -> None:
        """Record a sign of life, or that the rank is not watched any more."""
        self.certain.discard(rank)
        if self._disconnected or self._refused:
            self._disconnected.discard(rank)
            self._refused.pop(rank, None)
            self._lost_at.pop(rank, None)

    def refused(self, rank: int, text: str, now: float) -> None:
        """Record that no process listens at a rank's address, and who says so."""
        self._refused[rank] = text
        self._judge(rank, now)

    def disconnected(self, rank: int, now: float) -> None:
        """Record that a rank's connection to the scheduler is gone."""
        self._disconnected.add(rank)
        self._judge(rank, now)

    def next_due(self) -> float:
        """Return when `take` has something to return."""
        return min(self._lost_at.values(), default=math.inf)

    def take(self, now: float) -> tuple[int, str] | None:
        """Return a rank that has ended, and why that is certain, for a person. It is forgotten."""
        for rank, lost_at in self._lost_at.items():
            if now >= lost_at:
                text = f"its process has ended: its connections have ended, and {self._refused[rank]}"
                self.heard(rank)
                self.certain.add(rank)
                return rank, text
        return None

    def _judge(self, rank: int, now: float) -> None:
        if rank in self._disconnected and rank in self._refused:
            self._lost_at.setdefault(rank, now + self._last_word_s)


# How nodes are named in texts for people: addresses, ranks, lists.

_LISTED: Final = 32
"""Most nodes that one text names."""


def format_address(host: str, port: int, site: str) -> str:
    """Return "host:port, site"."""
    address = host_port(host, port)
    return f"{address}, {site}" if site else address


def describe_member(member: Member) -> str:
    """Return "rank 2 (10.0.0.7:4242, denver)"."""
    return f"rank {member.rank} ({format_address(member.host, member.port, member.site)})"


def list_some(names: Iterable[str]) -> str:
    """Join names with commas; of very many, only the first."""
    every = list(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more


# Counting arrivals at barriers: the n-th barrier of every rank is the same one.

_OUTSTANDING: Final = 64
"""Barriers at which a rank may arrive before the first is reached. A thread blocks at each, so only a process
with many threads has several."""


class BarrierCount:
    """At how many barriers each rank has arrived."""

    def __init__(self, ranks: int) -> None:
        self._arrivals: Final = [0] * ranks
        self._reached = 0
        self._excluded: Final[set[int]] = set()
        self._late: Final[dict[int, int]] = {}
        """By rank that joined later: the barrier from which on it is waited for."""
        self._since: dict[int, float] = {}
        """By barrier that is not reached: when the first rank arrived."""

    @property
    def oldest(self) -> int:
        """Number of the first barrier that is not reached."""
        return self._reached

    @property
    def since(self) -> float:
        """When the first rank arrived at the oldest barrier; inf if none has."""
        return self._since.get(self._reached, math.inf)

    def arrive(self, rank: int, number: int, now: float) -> list[int]:
        """Record that a rank has arrived at barrier `number`. Returns the barriers that are reached by it.

        A rank that is not waited for, since it has joined later, may begin with any barrier, and be behind.

        Raises:
            ProtocolViolation: a barrier out of order, or far too many.
        """
        if rank in self._excluded:
            self._arrivals[rank] = max(self._arrivals[rank], number)
        if 0 <= number < self._late.get(rank, 0):  # it was behind when it was included
            return []
        if number != self._arrivals[rank] or number >= self._reached + _OUTSTANDING:
            raise ProtocolViolation(
                f"rank {rank} comes to barrier {number}; its next one is {self._arrivals[rank]}, and at most "
                f"{_OUTSTANDING} may be outstanding"
            )
        self._arrivals[rank] += 1
        if number < self._reached:
            return []
        self._since.setdefault(number, now)
        return self._advance()

    def restore(self, arrivals: Sequence[int], now: float, *, reached: int = 0) -> None:
        """Go on where another process stopped.

        Args:
            arrivals: by rank, at how many barriers it had arrived, or from which on it was waited for.
            now: the time.
            reached: so many at least had been reached.

        Raises:
            UsageError: more are outstanding than can be.
        """
        self._arrivals[:] = arrivals
        self._late.update(enumerate(arrivals))  # who was waited for later may still be behind
        waited_for = [count for rank, count in enumerate(arrivals) if rank not in self._excluded]
        self._reached = max(reached, min(waited_for, default=max(arrivals)))
        if max(arrivals) > self._reached + _OUTSTANDING:
            raise UsageError(
                f"a rank has arrived at {max(arrivals)} barriers, another one at {self._reached}: at most "
                f"{_OUTSTANDING} may be outstanding; remove the log to begin anew"
            )
        for number in range(self._reached, max(arrivals)):
            self._since.setdefault(number, now)
        self._advance()

    def is_reached(self, number: int) -> bool:
        """Return whether all ranks have arrived at a barrier."""
        return number < self._reached

    def exclude(self, rank: int) -> list[int]:
        """Wait for a rank at no barrier any more. Returns the barriers that are reached by it."""
        self._excluded.add(rank)
        return self._advance()

    def remove(self, rank: int) -> list[int]:
        """Do as `exclude` says, and forget where the rank is: another process may have its place."""
        self._arrivals[rank] = 0
        self._late.pop(rank, None)
        return self.exclude(rank)

    def include(self, rank: int) -> None:
        """Wait for a rank, which has joined late, from the oldest barrier that is not reached on."""
        self._excluded.discard(rank)
        self._arrivals[rank] = self._late[rank] = max(self._arrivals[rank], self._reached)

    def _advance(self) -> list[int]:
        reached = []
        while self._since and not self.missing():
            reached.append(self._reached)
            del self._since[self._reached]
            self._reached += 1
        return reached

    def has_arrived(self, rank: int, number: int) -> bool:
        """Return whether a rank has arrived at barrier `number`. An excluded rank need not have."""
        return self._arrivals[rank] > number

    def waiting(self) -> list[int]:
        """Return the ranks that wait at the oldest barrier."""
        return [rank for rank, arrivals in enumerate(self._arrivals) if arrivals > self._reached]

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived at the oldest barrier; none if no rank waits at it."""
        if not self._since:
            return []
        return [
            rank
            for rank, arrivals in enumerate(self._arrivals)
            if arrivals <= self._reached and rank not in self._excluded
        ]

    def never_coming(self, finished: Iterable[int]) -> list[int]:
        """Return the `finished` ranks that others wait for at the oldest barrier, in vain."""
        return sorted(set(self.missing()).intersection(finished))
