"""A job before it begins: nodes join, are refused or leave, until all are there."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Disconnect, Inquire
from netstorm.scheduler.membership.barriers import REMIND_EVERY_S
from netstorm.scheduler.membership.liveness import busy_text
from netstorm.scheduler.membership.refusal import Refusal, refuse
from netstorm.scheduler.membership.rendezvous import Applicant, Rendezvous
from netstorm.scheduler.observe.snapshot import NodeSnapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox

__all__ = ["Startup"]

_log = logging.getLogger(__name__)


class Startup:
    """Tells the nodes of one job what `Rendezvous` decides, and for whom they wait.

    Attributes:
        forming_policy: all nodes have joined, and the first policy is being formed.
    """

    def __init__(self, options: SchedulerOptions, outbox: Outbox, counters: Counters, now: float) -> None:
        """Wait for nodes."""
        self.forming_policy = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._counters: Final = counters
        self._rendezvous: Final = Rendezvous(options)
        self._since: Final = now
        self._remind_at = now + REMIND_EVERY_S
        self._disconnected: Final[set[Peer]] = set()

    def join(self, applicant: Applicant, now: float) -> None:
        """Handle a process that asks to join."""
        peer = applicant.peer
        for refusal in self._rendezvous.add(applicant, now):
            self._refuse(refusal)
        if self._rendezvous.is_accepted(peer):
            _log.info("the node at %s is here", applicant)
        elif peer in self._rendezvous:
            _log.info("the node at %s asks for the place of one that is here, and may have died", applicant)

    def refuse(self, peer: Peer, reason: str) -> None:
        """Tell a process why it cannot be in the job, and end its session."""
        self._refuse(Refusal(peer, reason))

    def heard(self, peer: Peer, now: float) -> None:
        """Record a heartbeat of any process."""
        self._disconnected.discard(peer)
        if peer in self._rendezvous:
            self._rendezvous.heard(peer, now)

    def busy(self, peer: Peer, seconds: float, now: float) -> None:
        """Record that a process is silent, but the kernel of its machine acknowledges: it keeps its place."""
        for applicant in self._rendezvous:
            if applicant.peer == peer:
                _log.warning("%s", busy_text(f"the node at {applicant}", seconds))
                applicant.heard_at = now

    def connection_gone(self, peer: Peer, reason: str, *, refused: bool) -> bool:
        """Handle that a process's connection is gone, or that nobody listens at its address. Return whether
        it has ended.
        """
        if refused:
            return peer in self._disconnected and peer in self._rendezvous
        self._disconnected.add(peer)
        self._inquire(applicant for applicant in self._rendezvous if applicant.peer == peer)
        return False

    def _inquire(self, applicants: Iterable[Applicant]) -> None:
        for applicant in applicants:
            host, port = applicant.join.host, applicant.join.port
            self._outbox.add(Inquire(peer=applicant.peer, host=host, port=port))

    def remove(self, peer: Peer, reason: str, *, quietly: bool = False) -> None:
        """End a process's session, and free its place."""
        self._disconnected.discard(peer)
        removed = self._rendezvous.remove(peer)
        if removed is not None and not quietly:
            _log.warning("the node at %s has gone before all were here: %s", removed, reason)
        self._outbox.add(Disconnect(peer=peer))

    def check(self, now: float) -> None:
        """Remove nodes that have fallen silent, and give free places to nodes that asked for them."""
        self._inquire(self._rendezvous.silent(now, beats=1))
        for silent in self._rendezvous.silent(now):
            self.remove(silent.peer, f"no heartbeat for {self._options.heartbeat_timeout_s:g} s")
        for refusal in self._rendezvous.retry_claims(now):
            self._refuse(refusal)

    def remind(self, now: float) -> m.PeerGone | None:
        """Tell waiting nodes for whom they wait. Returns why they should not wait any more, if so."""
        text, limit = self.status_text(), self._options.join_timeout_s
        if now - self._since >= limit:
            reason = f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {text}"
            return m.PeerGone(rank=-1, kind="timeout", reason=reason)
        if now >= self._remind_at:
            self._remind_at = now + REMIND_EVERY_S
            _log.info("%s", text)
            self._outbox.send(self.peers(), m.Waiting(text=text))
        return None

    def status_text(self) -> str:
        """Return what the nodes wait for, in one line."""
        if self.forming_policy and self.complete():
            nodes = self._options.begin_with or self._options.num_workers
            return f"all {nodes} nodes are here, and the first policy is being formed"
        return self._rendezvous.waiting_text()

    def begin_with(self, most: int) -> None:
        """Wait for `most` nodes at most: the others will not come."""
        self._rendezvous.needed(most)

    def asking_for(self, rank: int) -> Peer | None:
        """Return the process that has a rank's place; None: none has asked for it."""
        return self._rendezvous.asking_for(rank)

    def complete(self) -> bool:
        """Return whether all nodes have joined."""
        return self._rendezvous.complete()

    @property
    def reproducible(self) -> bool:
        """Whether the scheduler or a node asks for results that are the same in each run."""
        return self._rendezvous.reproducible

    def peers(self) -> list[Peer]:
        """Return the processes that have asked to join and were not refused."""
        return [applicant.peer for applicant in self._rendezvous]

    def assign_ranks(self) -> tuple[tuple[Peer, m.Member], ...]:
        """Return the members by rank, once all nodes have joined."""
        return self._rendezvous.assign_ranks()

    def snapshots(self) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each node that has joined."""
        return self._rendezvous.snapshots()

    def _refuse(self, refusal: Refusal) -> None:
        refuse(refusal, self._outbox, self._counters)
