"""The vote on the job's state: each rank gives a digest of its own, and the majority is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Vote", "count_votes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What was voted."""

    digest: int
    """That of most ranks; of several, the one that the lowest rank has."""
    source: int
    """The lowest rank that has it."""
    differing: tuple[int, ...]
    """Ranks that have another one."""


def count_votes(digests: Mapping[int, int]) -> Vote:
    """Count the digests of some ranks."""
    votes = Counter(digests.values())
    lowest = {digest: min(_holders(digests, digest)) for digest in votes}
    right = min(votes, key=lambda digest: (-votes[digest], lowest[digest]))
    return Vote(
        digest=right,
        source=lowest[right],
        differing=tuple(sorted(rank for rank, digest in digests.items() if digest != right)),
    )


def _holders(digests: Mapping[int, int], digest: int) -> Iterable[int]:
    return (rank for rank, other in digests.items() if other == digest)
