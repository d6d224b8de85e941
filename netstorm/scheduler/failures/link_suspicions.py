"""What nodes say of links that do not work, or work again, and what all nodes are told of it."""

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
    """Of the nodes of one job. What may end the job is returned."""

    def __init__(self, members: Members, links: LinkFailures, awareness: Awareness | None) -> None:
        """Begin without any.

        Args:
            members: the nodes.
            links: those that have failed.
            awareness: plans without them.
        """
        self._members: Final = members
        self._links: Final = links
        self._awareness: Final = awareness

    def suspect(self, rank: int, message: Suspect, now: float) -> None:
        """A node cannot reach another one, which may be lost.

        Raises:
            ProtocolViolation: there is no such node.
        """
        if message.rank == rank or not 0 <= message.rank < len(self._members):
            raise ProtocolViolation(f"rank {rank} suspects rank {message.rank}")
        target = self._members.describe(message.rank)
        _log.warning("rank %d cannot reach %s: %s", rank, target, message.reason)
        self._members.liveness.suspect(rank, message.rank, message.reason, now)

    def look(self, policy: Policy, now: float) -> PeerGone | None:
        """Decide about those whose targets have proven alive: go on without the link, if that is possible."""
        gone = None
        for one in self._members.liveness.proven():
            gone = gone or self._failed(one, policy, now)
        return gone

    def _failed(self, one: Suspicion, policy: Policy, now: float) -> PeerGone | None:
        if not self._links.fail(FailedLinkRecord(one.by, one.rank, one.reason, now), policy):
            return self._members.liveness.cut(one, now)
        _log.warning(
            "the link from %s to %s has failed (%s); the job goes on without it",
            self._members.describe(one.by),
            self._members.describe(one.rank),
            one.reason,
        )
        self._tell()
        return None

    def restored(self, rank: int, message: LinkRestored) -> None:
        """A node can reach another one again.

        Raises:
            ProtocolViolation: there is no such node.
        """
        if message.rank == rank or not 0 <= message.rank < len(self._members):
            raise ProtocolViolation(f"rank {rank} reaches rank {message.rank} again")
        self._members.liveness.withdrawn(rank, message.rank)
        if self._links.restore(rank, message.rank):
            target = self._members.describe(message.rank)
            _log.warning("the link from %s to %s works again", self._members.describe(rank), target)
            self._tell()

    def _tell(self) -> None:
        if self._awareness is not None:
            self._awareness.exclude(self._links.avoided)
        self._members.tell_all(FailedLinks(links=self._links.told()))
