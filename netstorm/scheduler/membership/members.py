"""The nodes of a job that has begun: their addresses, their liveness, and sending to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Member, Message
from netstorm.scheduler.membership.liveness import Liveness
from netstorm.scheduler.membership.member_texts import describe_member
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox

__all__ = ["Members"]


class Members:
    """The nodes of one job.

    Attributes:
        all: the nodes, by rank.
        peers: the numbers of their processes, by rank.
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
        self.peers: Final = tuple(peer for peer, _ in members)
        self.all: Final = tuple(member for _, member in members)
        self.liveness: Final = Liveness(self.all, options, heard_at)
        self._outbox: Final = outbox

    def __len__(self) -> int:
        return len(self.all)

    def describe(self, rank: int) -> str:
        """Return a rank with its address and site, for a person."""
        return describe_member(self.all[rank])

    @property
    def on_one_machine(self) -> bool:
        """Whether all have the same address."""
        return len({member.host for member in self.all}) == 1

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message to some nodes."""
        self._outbox.send([self.peers[rank] for rank in ranks], message)

    def send_all(self, message: Message) -> None:
        """Send a message to all nodes."""
        self._outbox.send(self.peers, message)
