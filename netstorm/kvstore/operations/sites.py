"""The sites of a job: which ranks share a local network, and who speaks for each across the WAN. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netstorm.errors import UsageError
from netstorm.protocol.messages import Member

__all__ = ["Sites"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """The sites as one rank sees them, in the order of their lowest ranks.

    Attributes:
        names: of the sites.
        ranks: of each site, ascending.
        mine: index of the own site.
        rank: the own rank.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    mine: int
    rank: int

    @classmethod
    def of(cls, members: Sequence[Member], rank: int) -> Sites:
        """Group the members of a job. Where NETSTORM_SITE is not set, the host's address stands for it.

        Raises:
            UsageError: `rank` is not among the members.
        """
        found: dict[str, list[int]] = {}
        for member in members:
            found.setdefault(member.site or member.host, []).append(member.rank)
        names = tuple(found)
        ranks = tuple(tuple(sorted(found[name])) for name in names)
        mine = next((index for index, site in enumerate(ranks) if rank in site), None)
        if mine is None:
            raise UsageError(f"rank {rank} is at none of the sites {', '.join(names)}")
        return cls(names=names, ranks=ranks, mine=mine, rank=rank)

    def without_others(self) -> Sites:
        """Return the own rank as a site of its own, the only one: of a rank that has joined later."""
        return Sites(names=(self.name,), ranks=((self.rank,),), mine=0, rank=self.rank)

    @property
    def name(self) -> str:
        """The own site's name."""
        return self.names[self.mine]

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of the own site."""
        return self.ranks[self.mine]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each site that sends over the WAN for it, ascending: its lowest."""
        return tuple(sorted(site[0] for site in self.ranks))

    @property
    def is_leader(self) -> bool:
        """Whether the own rank sends over the WAN."""
        return self.rank == self.local[0]

    @property
    def size(self) -> int:
        """How many ranks all sites have."""
        return sum(map(len, self.ranks))
