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
        if message.rank not in self._members.present:
            return
        if self._members.liveness.suspect(rank, message.rank, message.reason, now):
            target = self._members.describe(message.rank)
            _log.warning("rank %d cannot reach %s: %s", rank, target, message.reason)

    def check(self, policy: Policy, now: float) -> PeerGone | None:
        """Go on without links that have failed while both ends are alive. Returns why that is impossible."""
        gone = None
        for suspicion in self._members.liveness.pop_link_failures():
            gone = gone or self._link_failed(suspicion, policy, now)
        if gone is None and policy.members and self._failures.failures:
            gone = self._cut_off(policy, now)  # the node on a detour has left
        return gone

    def _cut_off(self, policy: Policy, now: float) -> PeerGone | None:
        for rank in self._failures.cut_off(policy.silent):
            records = self._failures.failures.values()
            own = [record for record in records if rank in (record.source, record.target)]
            record = (own or list(records))[0]
            suspicion = Suspicion(record.source, record.target, record.reason, now)
            return self._members.liveness.link_lost(suspicion, now, lost=rank)
        return None

    def _link_failed(self, suspicion: Suspicion, policy: Policy, now: float) -> PeerGone | None:
        failure = FailedLinkRecord(suspicion.by, suspicion.rank, suspicion.reason, now)
        if not self._failures.fail(failure, policy):
            lost = suspicion.rank
            if policy.members:
                lost = self._failures.cut_off(policy.silent, [(suspicion.by, suspicion.rank)])[0]
            return self._members.liveness.link_lost(suspicion, now, lost=lost)
        _log.warning(
            "the link from %s to %s has failed (%s); the job goes on without it",
            self._members.describe(suspicion.by),
            self._members.describe(suspicion.rank),
            suspicion.reason,
        )
        self.announce()
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
            self.announce()

    def announce(self) -> None:
        """Tell all nodes which links have failed, and the ways around them."""
        if self._awareness is not None:
            self._awareness.exclude(self._failures.avoided)
        self._members.send_all(FailedLinks(links=self._failures.detours()))
