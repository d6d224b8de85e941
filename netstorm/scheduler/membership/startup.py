"""A job before it begins: nodes come, are turned away or go again, until all are here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from netstorm.observe.counters import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.ids import Peer
from netstorm.pslite.machine import Disconnect
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.membership.barriers import REMIND_EVERY_S
from netstorm.scheduler.membership.rendezvous import Applicant, Rendezvous, TurnedAway
from netstorm.scheduler.observe.snapshot import NodeSnapshot
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["Startup"]

_log = logging.getLogger(__name__)


class Startup:
    """Of one job: tells nodes what `Rendezvous` decides.

    Attributes:
        forming: all nodes have come, and what the job begins under is being formed.
    """

    def __init__(self, options: SchedulerOptions, outbox: Outbox, counters: Counters, now: float) -> None:
        """Begin to wait."""
        self.forming = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._counters: Final = counters
        self._rendezvous: Final = Rendezvous(options)
        self._since: Final = now
        self._say_at = now + REMIND_EVERY_S

    def come(self, peer: Peer, incarnation: int, join: m.Join, now: float) -> None:
        """A process asks to join."""
        one = Applicant(peer=peer, incarnation=incarnation, join=join, heard_at=now)
        self._turn_away_all(self._rendezvous.come(one, now))
        if self._rendezvous.has_place(peer):
            _log.info("the node at %s is here", one)
        elif peer in self._rendezvous:
            _log.info("the node at %s asks for the place of one that is here, and may have died", one)

    def turn_away(self, peer: Peer, reason: str) -> None:
        """Tell a process why it will not be in the job."""
        _log.warning("refused: %s", reason)
        self._counters.add("refused")
        self._outbox.tell([peer], m.PeerGone(rank=-1, kind="refused", reason=reason))
        self._outbox.add(Disconnect(peer=peer))

    def heard(self, peer: Peer, now: float) -> None:
        """Note a heartbeat, whosever it is."""
        if peer in self._rendezvous:
            self._rendezvous.heard(peer, now)

    def leave(self, peer: Peer, reason: str, *, quietly: bool = False) -> None:
        """Let a process go. Others may take its place."""
        gone = self._rendezvous.leave(peer)
        if gone is not None and not quietly:
            _log.warning("the node at %s has gone before all were here: %s", gone, reason)
        self._outbox.add(Disconnect(peer=peer))

    def look(self, now: float) -> None:
        """Let go who has fallen silent, and let in whose place has become free."""
        for gone in self._rendezvous.silent(now):
            self.leave(gone.peer, f"no heartbeat for {self._options.heartbeat_timeout_s:g} s")
        self._turn_away_all(self._rendezvous.decide(now))

    def say(self, now: float) -> m.PeerGone | None:
        """Tell those who are here for whom they wait; returns why they should not any more, if so."""
        text, limit = self.text(), self._options.join_timeout_s
        if now - self._since >= limit:
            reason = f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {text}"
            return m.PeerGone(rank=-1, kind="timeout", reason=reason)
        if now >= self._say_at:
            self._say_at = now + REMIND_EVERY_S
            _log.info("%s", text)
            self._outbox.tell(self.peers(), m.Waiting(text=text))
        return None

    def text(self) -> str:
        """Say for whom those who are here wait."""
        if self.forming and self.complete():
            return f"all {self._options.num_workers} nodes are here, and the first policy is being formed"
        return self._rendezvous.waiting_text()

    def complete(self) -> bool:
        """Return whether all nodes are here."""
        return self._rendezvous.complete()

    def peers(self) -> list[Peer]:
        """Return who is here."""
        return [one.peer for one in self._rendezvous]

    def seats(self) -> tuple[tuple[Peer, m.Member], ...]:
        """Return who is who, by rank, once all are here."""
        return self._rendezvous.seats()

    def snapshots(self) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each node that is here."""
        return self._rendezvous.snapshots()

    def _turn_away_all(self, them: Iterable[TurnedAway]) -> None:
        for one in them:
            self.turn_away(one.peer, one.reason)
