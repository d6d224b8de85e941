"""What runs while something fails, and which links fail."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from netstorm.lab.testing.faults import Cut


def endless_rounds(cluster, size=200):
    """Let every rank push the next round of "w" as soon as it has the last one; return what all wait for."""
    pending = []

    def push(node):
        if not node.alive or node.failure is not None:
            return
        one = node.push("w", np.full(size, node.rank, np.float32))
        pending.append((node, one))

        one.then(lambda: one.error is None and push(node))

    for node in cluster.nodes:
        push(node)
    return pending


def some_rounds(cluster, rounds):
    """Let every rank do `rounds` rounds of "w", one after the other, and finish; return what all wait for."""
    pending = []

    def go_on(node, left):
        one = node.push("w", np.full(100, node.rank, np.float32)) if left else node.finish()
        pending.append(one)
        if left:
            one.then(lambda: one.error is None and go_on(node, left - 1))

    for node in cluster.nodes:
        go_on(node, rounds)
    return pending


FAST_TIMEOUTS: dict[str, Any] = {"link_timeout_s": 1.0, "heartbeat_timeout_s": 5.0, "link_retry_s": 3.0}


def failing_links(seed, nodes, spread_s):
    """Return cuts, for good or for a while, one-way or not, that leave some node with all of its links."""
    chance = random.Random(f"dying links {seed}")
    spared = chance.randrange(nodes)
    others = [rank for rank in range(nodes) if rank != spared]
    pairs = [(one, other) for one in others for other in others if one != other]
    cuts = []
    for source, target in chance.sample(pairs, chance.randint(1, min(4, len(pairs)))):
        at = chance.random() * spread_s
        heal_at = None if chance.random() < 0.5 else at + chance.random() * 12.0
        cuts.append(Cut(at=at, source=source, target=target, heal_at=heal_at, one_way=chance.random() < 0.3))
    return cuts
