"""The nodes of a job that has begun: who they are, whether they live, and how they are told something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Member, Message
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.membership.liveness import Liveness
from netstorm.scheduler.membership.rendezvous import describe
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["Members"]


class Members:
    """Of one job.

    Attributes:
        all: by rank.
        peers: what their sessions are known by, by rank.
        liveness: when and with what they were last heard.
    """

    def __init__(
        self,
        seats: Sequence[tuple[Peer, Member]],
        options: SchedulerOptions,
        outbox: Outbox,
        heard_at: float,
    ) -> None:
        """Begin with `seats`, by rank; all count as `heard_at` some time."""
        self.peers: Final = tuple(peer for peer, _ in seats)
        self.all: Final = tuple(member for _, member in seats)
        self.liveness: Final = Liveness(self.all, options, heard_at)
        self._outbox: Final = outbox

    def __len__(self) -> int:
        return len(self.all)

    def describe(self, rank: int) -> str:
        """Return a rank with its address and site, for a person."""
        return describe(self.all[rank])

    @property
    def on_one_machine(self) -> bool:
        """Whether all have the same address."""
        return len({member.host for member in self.all}) == 1

    def tell(self, ranks: Iterable[int], message: Message) -> None:
        """Send some nodes a message."""
        self._outbox.tell([self.peers[rank] for rank in ranks], message)

    def tell_all(self, message: Message) -> None:
        """Send all nodes a message."""
        self._outbox.tell(self.peers, message)
