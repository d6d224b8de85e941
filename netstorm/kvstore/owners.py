"""Who owns which block of a key, in asynchronous training. Pure; the same on every node.

A block is what is updated at a time: a chunk, or a whole key if the update rule needs whole tensors (a norm).
Spread by chunk, a large key is pushed to all owners at once and updated by all of them; by key, the owner of
the largest one would be what everybody waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from netstorm.kvstore.keys import Key
from netstorm.topology.schedule import interleave

__all__ = ["Owners", "chunks_of"]


class Owners:
    """Blocks to ranks, in proportion to the weights that the scheduler fixed for the job."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.ranks: Final = tuple(rank for rank, weight in enumerate(weights) if weight > 0)
        """Those that own something."""
        self._schedule: Final = tuple(
            self.ranks[index] for index in interleave([weights[rank] for rank in self.ranks])
        )

    def of_slot(self, slot: int) -> int:
        """Return who owns the block whose first chunk has this slot."""
        return self._schedule[slot % len(self._schedule)]

    def blocks(self, key: Key, *, whole: bool) -> list[int]:
        """Return the first chunks of a key's blocks."""
        assert key.layout is not None
        return list(range(min(1, key.layout.chunks) if whole else key.layout.chunks))

    def owner(self, key: Key, block: int) -> int:
        """Return who owns a block, by its first chunk."""
        assert key.layout is not None
        return self.of_slot(key.layout.slots[block])

    def count(self, key: Key, *, whole: bool) -> Counter[int]:
        """Return how many blocks of a key each owner has."""
        return Counter(self.owner(key, block) for block in self.blocks(key, whole=whole))


def chunks_of(key: Key, block: int, *, whole: bool) -> range:
    """Return the chunks of a block."""
    assert key.layout is not None
    return range(key.layout.chunks) if whole else range(block, block + 1)
