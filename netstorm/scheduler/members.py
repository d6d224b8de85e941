"""The nodes of a job that has begun: their addresses, their liveness, and sending to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Member, Message
from netstorm.pslite.machine import Inquire
from netstorm.scheduler.membership.liveness import Liveness
from netstorm.scheduler.membership.member_texts import describe_member
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox

__all__ = ["Members"]


class Members:
    """The nodes of one job. If nodes may leave and join, some ranks may be places that no node has.

    Attributes:
        all: the nodes, by rank. Without a port: a place that no node has.
        present: the ranks that are in the job, ascending.
        liveness: when each was last heard.
    """

    def __init__(
        self,
        members: Sequence[tuple[Peer, Member]],
        options: SchedulerOptions,
        outbox: Outbox,
        heard_at: float,
    ) -> None:
        """Begin with `members`, by rank. All count as heard at `heard_at`."""
        self.all = tuple(member for _, member in members)
        self.present = tuple(member.rank for member in self.all if member.port)
        self.liveness: Final = Liveness(self.all, options, heard_at)
        self._peers: Final = {member.rank: peer for peer, member in members if member.port}
        self._outbox: Final = outbox

    def __len__(self) -> int:
        return len(self.all)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The numbers of the processes that are in the job, by rank."""
        return tuple(self._peers[rank] for rank in self.present)

    def peers_but(self, ranks: Iterable[int]) -> list[Peer]:
        """Return the numbers of the processes of all ranks that are in the job but some."""
        left = set(ranks)
        return [self._peers[rank] for rank in self.present if rank not in left]

    def peer_of(self, rank: int) -> Peer | None:
        """Return the number of the process that has, or last had, a rank; None: none ever had."""
        return self._peers.get(rank)

    def describe(self, rank: int) -> str:
        """Return a rank with its address and site, for a person."""
        return describe_member(self.all[rank])

    @property
    def on_one_machine(self) -> bool:
        """Whether all have the same address."""
        return len({self.all[rank].host for rank in self.present}) == 1

    def remove(self, rank: int) -> None:
        """Go on without a rank."""
        self.present = tuple(other for other in self.present if other != rank)
        self.liveness.stop_watching(rank)
        self._replace(rank, Member(rank, self.all[rank].host, 0, self.all[rank].site, 0))

    def add(self, peer: Peer, member: Member, now: float) -> None:
        """Go on with a node at a place that was free."""
        self._peers[member.rank] = peer
        self.present = tuple(sorted({*self.present, member.rank}))
        self._replace(member.rank, member)
        self.liveness.watch(member, now)

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message to some nodes; those that are not in the job are left out."""
        here = set(self.present)
        self._outbox.send([self._peers[rank] for rank in ranks if rank in here], message)

    def send_all(self, message: Message) -> None:
        """Send a message to all nodes."""
        self._outbox.send(self.peers, message)

    def inquire(self, ranks: Iterable[int]) -> None:
        """Find out whether ranks are busy, or have ended."""
        for rank in ranks:
            peer, member = self._peers.get(rank), self.all[rank]
            if peer is not None and member.port:
                self._outbox.add(Inquire(peer=peer, host=member.host, port=member.port))

    def _replace(self, rank: int, member: Member) -> None:
        self.all = (*self.all[:rank], member, *self.all[rank + 1 :])
