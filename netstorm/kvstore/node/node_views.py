"""What a node does when the members of its job change: sessions, sums, messages, barriers. Pure."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import NodeLost
from netstorm.kvstore.node.lifecycle import Lifecycle
from netstorm.protocol import messages as m
from netstorm.protocol.ids import Peer
from netstorm.pslite.machine import Connect, Disconnect

__all__ = ["NodeViews"]

_log = logging.getLogger(__name__)


class NodeViews:
    """The views of one node's job.

    Attributes:
        number: of the present view.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.number = 0
        self._life: Final = lifecycle

    def begin(self, message: m.NewView) -> None:
        """Go over to a new view: stop, and report which results are here.

        Raises:
            ProtocolViolation: the view is not newer than the last one.
        """
        life = self._life
        joined, roster = life.require_joined(), life.roster
        report = joined.aggregation.views.begin(message)
        self.number = message.view
        for departure in message.departures:
            _log.warning("view %d without rank %d: %s", message.view, departure.rank, departure.reason)
        for rank in message.arrivals:
            _log.warning("view %d with rank %d, which has just come", message.view, rank)
        former = {member.rank: member for member in roster.present() if member.rank != roster.rank}
        roster.change(message.members)
        for member in roster.others():
            known = former.pop(member.rank, None)
            if known is not None and known.incarnation != member.incarnation:
                self._leave_behind(member.rank, message)
                known = None
            if known is None:
                life.outbox.add(Connect(peer=Peer(member.rank), host=member.host, port=member.port))
        for rank in former:
            self._leave_behind(rank, message)
        for rank in message.arrivals:
            joined.point_to_point.arrived(rank)
            joined.state.providing.forget(rank)
        joined.new_policy(message.policy, of_view=True)
        life.outbox.send_to_scheduler(report)

    def agree(self, message: m.ViewAgreed) -> None:
        """Go on in the new view."""
        joined = self._life.require_joined()
        if joined.aggregation.agree(message):
            joined.state.view_agreed()

    def _leave_behind(self, rank: int, message: m.NewView) -> None:
        life = self._life
        joined = life.require_joined()
        reasons = (one.reason for one in message.departures if one.rank == rank)
        reason = next(reasons, f"it is not in view {message.view}")
        life.outbox.add(Disconnect(peer=Peer(rank), at_once=True))
        life.detours.forget(rank)
        joined.departed(rank, NodeLost(f"rank {rank} is not in the job any more: {reason}"))
