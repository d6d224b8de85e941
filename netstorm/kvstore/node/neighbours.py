"""What nodes exchange besides parts of trees: parts on auxiliary paths, and links that fail and recover.
Pure.

A relay forwards parts on auxiliary paths, and around failed links, without looking into them. At the end of
the path a part counts as sent by the first node of the path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from netstorm.errors import NoRoom
from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.failed_links import Detours
from netstorm.kvstore.paths.relay import (
    check_path,
    delivery_confirmation,
    parts_to_resend,
    relay_confirmation,
)
from netstorm.kvstore.paths.source_routes import messages_to_resend
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.pslite.machine import Connect, Send

__all__ = ["Neighbours"]

_log = logging.getLogger(__name__)

_REPORT_EVERY_S: Final = 0.5
"""Between two reports that no process listens where a node was: the first may have come too early."""


class Neighbours:
    """The traffic of one node with its neighbours, beside that of the trees."""

    def __init__(self, roster: Roster, aggregation: Aggregation, detours: Detours, outbox: Outbox) -> None:
        self._roster: Final = roster
        self._aggregation: Final = aggregation
        self._detours: Final = detours
        self._outbox: Final = outbox
        self._report_again: Final[dict[int, float]] = {}
        """By rank whose process has probably ended: when to say so again."""

    def receive_auxiliary(
        self, peer: Peer, part: m.Part, payload: Buffer | None, payload_crc: int | None
    ) -> None:
        """Handle a part on an auxiliary path: forward it, or receive it as if its first node had sent it.

        Raises:
            ProtocolViolation: its path does not lead here.
            NoRoom: it would have to wait, and too much waits already.
        """
        check_path(part, peer, self._roster.rank, len(self._roster.members))
        if not self._aggregation.incoming.relay(part, payload, payload_crc):
            confirmation = None if part.around else delivery_confirmation(part)
            try:
                self._aggregation.receive(Peer(part.path[0]), part, payload, payload_crc)
            except NoRoom:
                confirmation = None  # it has not arrived, so path[0] is not to send more
                raise
            finally:
                if confirmation is not None:
                    self._outbox.add(confirmation)

    def delivered(self, peer: Peer, message: m.Delivered, now: float) -> None:
        """Handle the confirmation that a part has arrived at the end of its auxiliary path.

        Raises:
            ProtocolViolation: this node is not on that path.
        """
        check_path(message, peer, self._roster.rank, len(self._roster.members))
        further = relay_confirmation(message)
        if further is not None:
            self._outbox.add(further)
        else:
            part = (message.key, message.round, message.chunk, int(message.phase), message.version)
            self._aggregation.dispatch.record_arrival(message.path, part, now)

    def refused(self, target: int, reason: str, now: float) -> None:
        """Report that no process listens where a node was."""
        member = self._roster.members[target]
        if member.port and now >= self._report_again.get(target, 0.0):
            self._report_again[target] = now + _REPORT_EVERY_S
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason, refused=True))

    def busy(self, target: int, seconds: float) -> None:
        """Report that a node does not answer, but the kernel of its machine acknowledges. The scheduler says
        if it hears of that node: then it is not busy, but the connection with it is broken.
        """
        if self._roster.members[target].port:
            reason = f"it has not answered for {seconds:.1f} s"
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason, busy=True))

    def link_lost(self, target: int, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """Report a failed link to the scheduler. What was to go over it waits for a detour."""
        if not self._roster.members[target].port:
            return  # it is in the job no more
        if self._detours.record_failure(target, now):
            _log.info("%s cannot be reached from here: %s", self._roster.describe(target), reason)
            self._roster.suspect(target, reason, now)
            self._outbox.send_to_scheduler(m.Suspect(rank=target, reason=reason))
        parts = parts_to_resend(undelivered, self._roster.rank, self._aggregation.incoming.is_obsolete)
        self._outbox.add_all(parts)
        self._outbox.add_all(messages_to_resend(undelivered))

    def failed_links(self, message: m.FailedLinks) -> None:
        """Record which links have failed, and send what waits for them over the scheduler's detours."""
        for target, path in self._detours.record_decision(self._roster.rank, message):
            if self._roster.clear_suspicion(target):
                _log.warning(
                    "the link to %s has failed; traffic to it goes over ranks %s",
                    self._roster.describe(target),
                    ", ".join(map(str, path[1:-1])),
                )
            self._outbox.add_all(self._detours.release(target))
        self._aggregation.dispatch.avoid(self._detours.avoided)

    def retry_failed_links(self, now: float) -> None:
        """Try the failed links whose next trial is due."""
        for target in self._detours.due_trials(now):
            member = self._roster.members[target]
            self._outbox.add(
                Connect(peer=Peer(target), host=member.host, port=member.port),
                Send(peer=Peer(target), message=m.LinkTrial()),
            )

    def link_trial(self, peer: Peer, trial: m.LinkTrial) -> None:
        """Answer a trial of a link; an answer means that the link works again."""
        if not trial.answer:
            self._outbox.add(Send(peer=peer, message=m.LinkTrial(answer=True), back=True))
        elif int(peer) in self._detours:
            _log.warning("the link to %s works again", self._roster.describe(int(peer)))
            self._outbox.add_all(self._detours.restored(int(peer)))
            self._roster.clear_suspicion(int(peer))
            self._outbox.send_to_scheduler(m.LinkRestored(rank=int(peer)))
