"""Links that fail at random moments, for good or for a while."""

from __future__ import annotations

import random
from typing import Any

from netstorm.lab.testing.faults import Cut

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
