"""Which rank owns which block of a key, in asynchronous training. Pure; the same on every node.

A block is the unit of an update: a chunk, or a whole key if the update rule needs whole tensors (a norm).
Chunks are spread, so that all owners receive and update a large key at once. If keys were spread, every rank
would wait for the owner of the largest key.

A push may carry single rows of a key, so no row is divided among owners: a row belongs to the chunk in which
it begins.

In an elastic job a block also has a *replica*: the rank that keeps a copy, and owns the block if the owner is
lost. Both follow from who is in the job, so every node finds the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from netstorm.kvstore.values.key import Key
from netstorm.protocol.chunks import row_length
from netstorm.topology.schedule import interleave

__all__ = ["Owners", "chunks_of", "extent", "has_whole_rows"]


class Owners:
    """Maps blocks to ranks, in proportion to the weights that the scheduler fixed for the job.

    Attributes:
        ranks: that own blocks now.
    """

    def __init__(self, weights: Sequence[int], eligible: Iterable[int] | None = None) -> None:
        """Begin with these ranks; None: all."""
        self._replicated: Final = eligible is not None
        ranks = [rank for rank, weight in enumerate(weights) if weight > 0]
        self._all: Final = tuple(ranks[index] for index in interleave([weights[rank] for rank in ranks]))
        """An owner for each slot, if all ranks are here."""
        self.ranks: tuple[int, ...] = ()
        self._two: tuple[tuple[int, int | None], ...] = ()
        """Owner and replica, by slot."""
        self.change(ranks if eligible is None else eligible)

    def change(self, eligible: Iterable[int]) -> None:
        """Record which ranks are in the job, and may own blocks.

        Those of a rank that is not are its successor's: the next one in the order of slots. A rank that comes
        back has the same blocks again.
        """
        here = set(eligible)
        order = self._all if here & set(self._all) else tuple(sorted(here))  # else those without a weight
        self.ranks = tuple(sorted(here & set(order)))
        self._two = tuple(_next_two([rank if rank in here else None for rank in order]))

    def of_slot(self, slot: int) -> int:
        """Return the owner of the block whose first chunk has this slot."""
        return self._two[slot % len(self._two)][0]

    def replica(self, key: Key, block: int) -> int | None:
        """Return the rank that keeps a copy of a block; None: there is no second rank."""
        assert key.layout is not None
        return self._two[key.layout.slots[block] % len(self._two)][1]

    def waited_for(self, key: Key, blocks: Collection[int]) -> str:
        """Return for whom an operation on some blocks waits, for a person. In an elastic job owners wait for
        replicas themselves.
        """
        text = f"their owners, ranks {sorted({self.owner(key, block) for block in blocks})}"
        replicas = {self.replica(key, block) for block in blocks} if self._replicated else set()
        found = sorted(rank for rank in replicas if rank is not None)
        return f"{text}, which may wait for ranks {found} to confirm copies" if found else text

    def blocks(self, key: Key, *, whole: bool) -> list[int]:
        """Return the first chunks of a key's blocks."""
        chunks = _chunks(key)
        return list(range(min(1, chunks) if whole else chunks))

    def blocks_of(self, rank: int, key: Key, *, whole: bool) -> list[int]:
        """Return the blocks of a key that a rank owns."""
        return [block for block in self.blocks(key, whole=whole) if self.owner(key, block) == rank]

    def owner(self, key: Key, block: int) -> int:
        """Return the owner of a block, which is given by its first chunk."""
        assert key.layout is not None
        return self.of_slot(key.layout.slots[block])

    def count(self, key: Key, *, whole: bool) -> Counter[int]:
        """Return how many blocks of a key each owner has."""
        return Counter(self.owner(key, block) for block in self.blocks(key, whole=whole))


def _next_two(order: Sequence[int | None]) -> list[tuple[int, int | None]]:
    """Return for each place of a circle the next two ranks from there on; None: there is no second one.

    Args:
        order: the ranks around the circle; None: nobody, at this place.
    """
    first, second = None, None
    two = []
    for rank in (*reversed(order), *reversed(order)):  # the second time around, both are known
        if rank is not None and rank != first:
            first, second = rank, first
        two.append((first, second))
    return [(first, second) for first, second in reversed(two[len(order) :]) if first is not None]


def chunks_of(key: Key, block: int, *, whole: bool) -> range:
    """Return the chunks of a block."""
    return range(_chunks(key)) if whole else range(block, block + 1)


def extent(key: Key, chunk: int) -> tuple[int, int]:
    """Return the first element, and the end, of a chunk at its owner."""
    assert key.layout is not None
    start, end = key.layout.bounds[chunk]
    if not has_whole_rows(key):
        return start, end
    length = row_length(key.spec.shape)
    return -(-start // length) * length, -(-end // length) * length


def has_whole_rows(key: Key) -> bool:
    """Return whether each row has one owner. Rows longer than a chunk are divided like any values."""
    layout = key.layout
    assert layout is not None
    return layout.chunks > 0 and row_length(key.spec.shape) <= layout.bounds[0][1]


def _chunks(key: Key) -> int:
    """Return how many chunks of a key have owners: not the last one, if no row begins in it."""
    assert key.layout is not None
    chunks = key.layout.chunks
    if chunks:
        start, end = extent(key, chunks - 1)
        return chunks - (start == end)
    return 0
