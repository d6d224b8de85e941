"""Who is alive: heartbeats, suspicions, and the last thing heard from each rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import Member, PeerGone
from netstorm.scheduler.membership.rendezvous import describe, list_some
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["Liveness", "Suspicion"]

_PROOF_BEATS: Final = 2
"""Heartbeats after a suspicion that prove its target alive: one may have been on its way before."""


@dataclass(slots=True)
class _Heard:
    """What is known of one rank."""

    at: float
    """When any message came from it."""
    said: str
    """Its last message that means something to a person."""
    said_at: float
    busy: str = ""
    """What it waits for, by its last heartbeat."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A rank cannot reach another, and has given up after NETSTORM_LINK_TIMEOUT."""

    by: int
    rank: int
    reason: str
    since: float


class Liveness:
    """Watches the members of a running job."""

    def __init__(self, members: Sequence[Member], options: SchedulerOptions, now: float) -> None:
        self._members: Final = members
        self._interval_s: Final = options.heartbeat_interval_s
        self._timeout_s: Final = options.heartbeat_timeout_s
        self._proof_s: Final = min(_PROOF_BEATS * options.heartbeat_interval_s, options.link_timeout_s)
        self._heard: Final = [_Heard(now, "it joined", now) for _ in members]
        self._watched: Final = set(range(len(members)))
        self._suspicions: dict[tuple[int, int], Suspicion] = {}
        self._next_look = now + self._timeout_s
        self._looked_at = now

    def heard(self, rank: int, now: float, said: str | None = None) -> None:
        """Note a sign of life, and what it said if that means something to a person."""
        heard = self._heard[rank]
        heard.at = now
        if said is not None:
            heard.said, heard.said_at = said, now

    def busy(self, rank: int, text: str) -> None:
        """Note what a rank says that it waits for."""
        self._heard[rank].busy = text

    def suspect(self, by: int, rank: int, reason: str, now: float) -> None:
        """Note that a rank cannot reach another one."""
        self._suspicions.setdefault((by, rank), Suspicion(by, rank, reason, now))
        self._next_look = now

    def stop_watching(self, rank: int) -> None:
        """Expect nothing from a rank any more."""
        self._watched.discard(rank)

    def deaf_for(self, seconds: float, now: float) -> None:
        """This process itself was suspended or overloaded for a while: silence in that time says nothing."""
        for heard in self._heard:
            heard.at = min(heard.at + seconds, now)
        for pair, one in self._suspicions.items():
            self._suspicions[pair] = dataclasses.replace(one, since=one.since + seconds)

    def next_look(self) -> float:
        """Return when `verdict` may have something new to say."""
        return self._next_look

    def silent(self, now: float) -> list[int]:
        """Return the watched ranks that have missed their heartbeats, the longest silent one first."""
        found = [rank for rank in self._watched if now - self._heard[rank].at >= self._timeout_s]
        return sorted(found, key=lambda rank: (self._heard[rank].at, rank))

    def verdict(self, now: float) -> PeerGone | None:
        """Return who is lost, if somebody is."""
        if now < self._next_look:
            return None
        oldest = min((self._heard[rank].at for rank in self._watched), default=math.inf)
        self._next_look = oldest + self._timeout_s
        if self._suspicions:
            self._next_look = min(self._next_look, now + self._interval_s)
        silent = self.silent(now)
        if silent:
            return self._lost(silent, now)
        return None

    def proven(self) -> list[Suspicion]:
        """Return the suspicions whose targets have proven alive, and forget them: their links have failed."""
        found = [
            one for one in self._suspicions.values() if self._heard[one.rank].at - one.since >= self._proof_s
        ]
        for one in found:
            del self._suspicions[one.by, one.rank]
        return found

    def withdrawn(self, by: int, rank: int) -> None:
        """Note that a rank can reach another one after all."""
        self._suspicions.pop((by, rank), None)

    def last_heard(self, rank: int, now: float) -> str:
        """Return "last heard: round 12 of key 'fc1', 10.2 s ago", and what the rank then waited for."""
        heard = self._heard[rank]
        busy = f"; it was waiting: {heard.busy}" if heard.busy else ""
        return f"last heard: {heard.said}, {now - heard.said_at:.1f} s ago{busy}"

    def known(self, rank: int) -> tuple[float, str, str]:
        """Return when a rank was last heard, the last thing it said, and what it waits for."""
        heard = self._heard[rank]
        return heard.at, heard.said, heard.busy

    def waits(self) -> list[str]:
        """Return what each rank that waits says it waits for."""
        return [f"rank {rank}: {heard.busy}" for rank, heard in enumerate(self._heard) if heard.busy]

    def _lost(self, silent: list[int], now: float) -> PeerGone:
        first, others = silent[0], silent[1:]
        silence = now - self._heard[first].at
        text = (
            f"{describe(self._members[first])} is lost: no heartbeat for {silence:.1f} s; "
            f"{self.last_heard(first, now)}"
        )
        if others:
            text += "; also lost: " + list_some(describe(self._members[rank]) for rank in others)
        suspicions = [
            f"rank {one.by} says: {one.reason}" for one in self._suspicions.values() if one.rank == first
        ]
        if suspicions:
            text += "; " + list_some(suspicions)
        return PeerGone(rank=first, kind="lost", reason=text)

    def cut(self, one: Suspicion, now: float) -> PeerGone:
        """Return the word that a link has failed without which the job cannot go on."""
        by, target = describe(self._members[one.by]), describe(self._members[one.rank])
        alive = now - self._heard[one.rank].at
        return PeerGone(
            rank=one.rank,
            kind="lost",
            reason=(
                f"the link from {by} to {target} cannot be re-established ({one.reason}); both nodes are "
                f"alive (rank {one.rank} was heard {alive:.1f} s ago), and without that link there is no way "
                "from each node to each other one: look at the network and firewalls between the two"
            ),
        )
