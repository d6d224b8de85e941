"""What share of a network each of several jobs plans with. Pure.

MLNET lets jobs on a shared network go before one another [1]_. Here each job's trees are formed for its share
of every rate: its weight among those of all running jobs that use the same network. It is planning only: what
the network gives each of them is its own affair (and that of marks, `NETSTORM_DSCP`).

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
    """What a job asks of a network."""

    network: str
    """Which one, by its file; empty: none that anybody has described."""
    weight: int


def link_shares(claims: Sequence[Claim]) -> list[float]:
    """Return the share of its network that each claim gets beside the others; all where none is known."""
    total: dict[str, int] = {}
    for claim in claims:
        total[claim.network] = total.get(claim.network, 0) + claim.weight
    return [claim.weight / total[claim.network] if claim.network else 1.0 for claim in claims]
