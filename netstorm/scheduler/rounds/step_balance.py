"""How many local steps each node takes so that all are ready to exchange at the same time (ESync). Pure.

A node is ready k·c + m after the last exchange: k local steps of c seconds each, and m seconds until its
values are where they are summed. The slowest node takes the fewest steps, and all others as many as they can
until then.

Source: Li et al., "ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers", IEEE
TSC 15 (4), 2022. There a node asks after each step whether to take another one; here it is told once a round,
since a question takes a round trip over the WAN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["NodeTimes", "balanced_steps", "ready_at"]

_LATE: Final = 0.1
"""A node takes one more step if that makes it late by at most this part of the step: measured times scatter,
and four steps of 1.01 s beside one of 4 s are better than three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """What is known of one node."""

    step_s: float
    """Duration of a local step; more than 0."""
    exchange_s: float = 0.0
    """From its last step until its values are where they are summed, without waiting for other nodes."""
    least: int = 1
    most: int = 1
    """Fewest and most local steps of a round."""


def ready_at(nodes: Mapping[int, NodeTimes]) -> float:
    """Return how long after the last exchange the slowest node is ready, with its fewest steps."""
    return max(node.least * node.step_s + node.exchange_s for node in nodes.values())


def balanced_steps(nodes: Mapping[int, NodeTimes]) -> dict[int, int]:
    """Return the local steps of each node's next round, by rank.

    No node is ready more than a tenth of its step after the slowest one, and none could take another step
    before that, unless it has its most.

    Args:
        nodes: by rank, at least one.
    """
    end = ready_at(nodes)
    return {
        rank: max(
            node.least,
            min(node.most, math.floor((end - node.exchange_s) / node.step_s + _LATE)),
        )
        for rank, node in nodes.items()
    }
