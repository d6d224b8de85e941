"""Link shares: the part of a network that each of several jobs plans with. Pure.

MLNET gives jobs on a shared network different priorities [1]_. Here each job's trees are formed for its
share of every rate: its weight among the weights of all running jobs that use the same network. Shares are
only planned with: nothing here enforces them. `NETSTORM_DSCP` marks packets so that the network can.

References:
    .. [1] Mai, Hong and Costa, Optimizing Network Performance in Distributed Machine Learning, HotCloud '15,
       section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Claim", "link_shares"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The network that a job uses, and its weight there."""

    network: str
    """Its file; empty: the network is not described."""
    weight: int


def link_shares(claims: Sequence[Claim]) -> list[float]:
    """Return the share of its network that each claim gets, from 0 to 1; 1 where no network is described."""
    total: dict[str, int] = {}
    for claim in claims:
        total[claim.network] = total.get(claim.network, 0) + claim.weight
    return [claim.weight / total[claim.network] if claim.network else 1.0 for claim in claims]
