"""Schedulers that would take the job over, and what a node answers them. Pure.

Such a scheduler knows no more of a node than an address, and has no rank. It gets a session, over which it
can say one thing: where it listens, with a proof that it is a scheduler of this job if that has a key. A node
that has lost its own scheduler goes there. Any other node says whom it follows.
"""

from __future__ import annotations

from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.membership.roster import Roster
from netstorm.kvstore.membership.scheduler_session import SchedulerSession
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.protocol import messages as m
from netstorm.protocol.ids import UNKNOWN, Peer
from netstorm.pslite.machine import Admission, Admit, Refuse, Send

__all__ = ["RecoveringSchedulers"]

_MOST: Final = 8
"""Sessions with such schedulers. One more takes the place of the oldest, which may have ended."""

_MOST_CHARACTERS: Final = 253
"""Of a host's name (RFC 1035, section 2.3.4)."""


class RecoveringSchedulers:
    """The sessions of one node with schedulers that would take its job over."""

    def __init__(self, session: SchedulerSession, outbox: Outbox) -> None:
        """Begin without any; `session` is the one with the node's own scheduler."""
        self._session: Final = session
        self._outbox: Final = outbox
        self._peers: Final[dict[int, Peer]] = {}
        """By incarnation, in order of arrival."""
        self._arrived = 0

    @staticmethod
    def asks(hello: m.Hello) -> bool:
        """Return whether a Hello is that of such a scheduler."""
        return hello.sender < 0 and hello.receiver <= UNKNOWN

    def admit(self, hello: m.Hello, rank: int) -> Admission:
        """Admit such a scheduler, unless this node is in no job yet (`rank` < 0)."""
        if rank < 0:
            return Refuse("this node has not joined its job yet: it waits for its scheduler")
        if hello.incarnation not in self._peers:
            if len(self._peers) == _MOST:
                del self._peers[next(iter(self._peers))]
            self._peers[hello.incarnation] = Peer(UNKNOWN - self._arrived % _MOST)
            self._arrived += 1
        return Admit(self._peers[hello.incarnation])

    def receive(
        self, peer: Peer, message: m.Recover, roster: Roster, elastic: tuple[int, int] | None, now: float
    ) -> None:
        """Answer such a scheduler.

        Raises:
            ProtocolViolation: it listens at no address.
        """
        if not 0 < len(message.host) <= _MOST_CHARACTERS or not 0 < message.port < 2**16:
            raise ProtocolViolation(f"a scheduler at {message.host[:60]!r}, port {message.port}")
        proves = self._session.proves(message)
        answer = m.RecoverAnswer(
            accepted=proves and self._session.offered(message.host, message.port, now),
            scheduler=self._session.address,
            rank=roster.rank,
            members=roster.members,
            elastic=elastic,
            unproven=not proves,
        )
        self._outbox.add(Send(peer=peer, message=answer))
