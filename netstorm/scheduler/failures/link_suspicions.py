"""Reports of nodes that a link does not work, or works again, and what all nodes are told then."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import FailedLinks, LinkRestored, PeerGone, Suspect
from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.failures.failed_links import LinkFailures
from netstorm.scheduler.membership.liveness import Suspicion
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.policies.control_loop import Awareness
from netstorm.topology.policy import Policy

__all__ = ["LinkSuspicions"]

_log = logging.getLogger(__name__)


class LinkSuspicions:
    """The suspicions of one job's nodes. A method that finds that the job cannot go on returns the reason."""

    def __init__(self, members: Members, failures: LinkFailures, awareness: Awareness | None) -> None:
        """Begin without suspicions.

        Args:
            members: the nodes.
            failures: the failed links.
            awareness: plans without them; None: awareness is off.
        """
        self._members: Final = members
        self._failures: Final = failures
        self._awareness: Final = awareness

    def suspect(self, rank: int, message: Suspect, now: float) -> None:
        """Handle a node's report that it cannot reach another one, which may be lost.

        Raises:
            ProtocolViolation: there is no such node.
        """
        if message.rank == rank or not 0 <= message.rank < len(self._members):
            raise ProtocolViolation(f"rank {rank} suspects rank {message.rank}")
        target = self._members.describe(message.rank)
        _log.warning("rank %d cannot reach %s: %s", rank, target, message.reason)
        self._members.liveness.suspect(rank, message.rank, message.reason, now)

    def check(self, policy: Policy, now: float) -> PeerGone | None:
        """Go on without links that have failed while both ends are alive. Returns why that is impossible."""
        gone = None
        for suspicion in self._members.liveness.pop_link_failures():
            gone = gone or self._link_failed(suspicion, policy, now)
        return gone

    def _link_failed(self, suspicion: Suspicion, policy: Policy, now: float) -> PeerGone | None:
        failure = FailedLinkRecord(suspicion.by, suspicion.rank, suspicion.reason, now)
        if not self._failures.fail(failure, policy):
            return self._members.liveness.link_lost(suspicion, now)
        _log.warning(
            "the link from %s to %s has failed (%s); the job goes on without it",
            self._members.describe(suspicion.by),
            self._members.describe(suspicion.rank),
            suspicion.reason,
        )
        self._send_failed_links()
        return None

    def restored(self, rank: int, message: LinkRestored) -> None:
        """Handle a node's report that it can reach another one again.

        Raises:
            ProtocolViolation: there is no such node.
        """
        if message.rank == rank or not 0 <= message.rank < len(self._members):
            raise ProtocolViolation(f"rank {rank} reaches rank {message.rank} again")
        self._members.liveness.withdraw(rank, message.rank)
        if self._failures.restore(rank, message.rank):
            target = self._members.describe(message.rank)
            _log.warning("the link from %s to %s works again", self._members.describe(rank), target)
            self._send_failed_links()

    def _send_failed_links(self) -> None:
        if self._awareness is not None:
            self._awareness.exclude(self._failures.avoided)
        self._members.send_all(FailedLinks(links=self._failures.detours()))
