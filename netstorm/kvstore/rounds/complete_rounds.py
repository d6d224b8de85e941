"""Which rounds of each key are complete on this node. They become so in any order."""

from __future__ import annotations

from typing import Final

__all__ = ["CompleteRounds"]


class CompleteRounds:
    """Of all keys. All rounds up to one are complete, and a few beyond it."""

    def __init__(self) -> None:
        self._up_to: Final[dict[int, int]] = {}
        self._beyond: Final[dict[int, set[int]]] = {}

    def add_key(self, key: int) -> None:
        """Begin to count a key's rounds; a known key changes nothing."""
        self._up_to.setdefault(key, -1)

    def up_to(self, key: int) -> int:
        """Return the last round of a known key up to which all are complete; -1: the first is not."""
        return self._up_to[key]

    def __contains__(self, place: tuple[int, int]) -> bool:
        """Return whether a round, given as (key, number), is complete."""
        key, round = place
        return round <= self._up_to.get(key, -1) or round in self._beyond.get(key, ())

    def add(self, key: int, round: int) -> None:
        """Note that a round of a known key is complete."""
        beyond = self._beyond.setdefault(key, set())
        beyond.add(round)
        while self._up_to[key] + 1 in beyond:
            self._up_to[key] += 1
            beyond.remove(self._up_to[key])
