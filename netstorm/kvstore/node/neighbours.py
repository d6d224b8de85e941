"""What passes between nodes besides parts of trees: auxiliary paths, and links that fail and come back. Pure.

Parts on auxiliary paths, and parts around failed links, are forwarded without being looked at; at their end
they count as sent by the first node of their path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.failed_links import Detours
from netstorm.kvstore.paths.relay import check_path, confirmed, credit, parts_again
from netstorm.kvstore.paths.source_routes import not_delivered
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.pslite.machine import Connect, Send

__all__ = ["Neighbours"]

_log = logging.getLogger(__name__)


class Neighbours:
    """The other nodes of a job that one has joined."""

    def __init__(self, roster: Roster, aggregation: Aggregation, detours: Detours, outbox: Outbox) -> None:
        self._roster: Final = roster
        self._aggregation: Final = aggregation
        self._detours: Final = detours
        self._outbox: Final = outbox

    def auxiliary_part(self, peer: Peer, part: m.Part, payload: Buffer | None, payload_crc: int) -> None:
        """Take a part on a path of its own: send it on, or take it for its first node's.

        Raises:
            ProtocolViolation: it is not on its path here.
        """
        check_path(part, peer, self._roster.rank, len(self._roster.members))
        if not self._aggregation.relay(part, payload, payload_crc):
            if not part.around:
                self._outbox.add(confirmed(part))
            self._aggregation.receive(Peer(part.path[0]), part, payload, payload_crc)

    def delivered(self, peer: Peer, message: m.Delivered, now: float) -> None:
        """Take the word that a part has come to the end of its auxiliary path.

        Raises:
            ProtocolViolation: this node is not on that path.
        """
        check_path(message, peer, self._roster.rank, len(self._roster.members))
        further = credit(message)
        if further is not None:
            self._outbox.add(further)
        else:
            ticket = (message.key, message.round, message.chunk, int(message.phase), message.version)
            self._aggregation.dispatch.arrived(message.path, ticket, now)

    def lost(self, target: int, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """Have the scheduler decide; what was to go over the link waits for that, and goes around it."""
        if self._detours.lost(target, now):
            _log.info("%s cannot be reached from here: %s", self._roster.describe(target), reason)
            self._roster.suspect(target, reason, now)
            self._outbox.tell(m.Suspect(rank=target, reason=reason))
        again = parts_again(undelivered, self._roster.rank, self._aggregation.is_known)
        self._outbox.add_all(again)
        self._outbox.add_all(not_delivered(undelivered))

    def told(self, message: m.FailedLinks) -> None:
        """Take the scheduler's word on which links have failed, and what leads around them."""
        for target, way in self._detours.told(self._roster.rank, message):
            if self._roster.decided(target):
                _log.warning(
                    "the link to %s has failed; what is for it goes over ranks %s",
                    self._roster.describe(target),
                    ", ".join(map(str, way[1:-1])),
                )
            self._outbox.add_all(self._detours.released(target))
        self._aggregation.dispatch.avoid(self._detours.avoided)

    def try_again(self, now: float) -> None:
        """Try the failed links whose time has come."""
        for target in self._detours.trials(now):
            member = self._roster.members[target]
            self._outbox.add(
                Connect(peer=Peer(target), host=member.host, port=member.port),
                Send(peer=Peer(target), message=m.LinkTrial()),
            )

    def trial(self, peer: Peer, trial: m.LinkTrial) -> None:
        """Answer a trial of a link; an answer says that the link works again."""
        if not trial.answer:
            self._outbox.add(Send(peer=peer, message=m.LinkTrial(answer=True), back=True))
        elif int(peer) in self._detours:
            _log.warning("the link to %s works again", self._roster.describe(int(peer)))
            self._outbox.add_all(self._detours.restored(int(peer)))
            self._roster.decided(int(peer))
            self._outbox.tell(m.LinkRestored(rank=int(peer)))
