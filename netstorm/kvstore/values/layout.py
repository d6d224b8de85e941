"""Where the chunks of a round are, by the numbers that the scheduler fixed for its key. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.protocol.chunks import pitch
from netstorm.protocol.collectives import ELEMENT_BYTES, Signature
from netstorm.protocol.messages import KeyGrant

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The chunks of a round, the first of which has number 0."""

    bounds: list[tuple[int, int]]
    """First element and end of each chunk; of a collective round: first byte and end."""
    offsets: list[int]
    """Byte offset of each chunk in the job: the global chunk order."""
    slots: range
    """One for each chunk; `Plan.tree_of` maps it to a tree."""
    is_within_key: bool = True
    """The offsets are the key's own, and no other key's are between them."""

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.slots)

    @classmethod
    def of_key(cls, elements: int, itemsize: int, grant: KeyGrant, form: int = 0) -> Layout:
        """Cut a key's `elements` values into chunks: the same in all rounds."""
        size = grant.chunk_size
        bounds = [(start, min(start + size, elements)) for start in range(0, elements, size)]
        return cls._of(bounds, grant, pitch(size, itemsize, form))

    @classmethod
    def of_round(cls, signature: Signature, elements: int, grant: KeyGrant) -> Layout:
        """Cut the segments of a collective round into chunks; each begins with a new one.

        Args:
            signature: of the round.
            elements: of the key; rounds with many short segments may have more chunks than these are.
            grant: the key's.
        """
        size, segment = grant.chunk_size * ELEMENT_BYTES, signature.segment_bytes
        bounds = [
            (first + start, first + min(start + size, segment))
            for first in range(0, signature.segments * segment, segment or 1)
            for start in range(0, segment, size)
        ]
        within = len(bounds) <= -(-elements // grant.chunk_size)
        return cls._of(bounds, grant, size, within=within)

    @classmethod
    def _of(cls, bounds: list[tuple[int, int]], grant: KeyGrant, step: int, *, within: bool = True) -> Layout:
        return cls(
            bounds=bounds,
            offsets=[grant.offset + chunk * step for chunk in range(len(bounds))],
            slots=range(grant.first_slot, grant.first_slot + len(bounds)),
            is_within_key=within,
        )
