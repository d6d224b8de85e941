"""Which rounds of each key are complete on this node. They complete in any order. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["CompleteRounds"]


class CompleteRounds:
    """The complete rounds of all keys: all up to a round, and a few beyond it."""

    def __init__(self) -> None:
        self._up_to: Final[dict[int, int]] = {}
        self._beyond: Final[dict[int, set[int]]] = {}

    def add_key(self, key: int) -> None:
        """Begin to count a key's rounds; a known key changes nothing."""
        self._up_to.setdefault(key, -1)

    def begin_at(self, key: int, round: int) -> None:
        """Count no round before `round`, as a node that has joined later does."""
        beyond = self._beyond.setdefault(key, set())
        self._up_to[key] = max(self._up_to.get(key, -1), round - 1)
        beyond -= {number for number in beyond if number <= self._up_to[key]}
        self._advance(key, beyond)

    def up_to(self, key: int) -> int:
        """Return the last round of a known key up to which all are complete; -1: the first is not."""
        return self._up_to[key]

    def __contains__(self, key_and_round: tuple[int, int]) -> bool:
        """Return whether a round, given as (key, number), is complete."""
        key, round = key_and_round
        return round <= self._up_to.get(key, -1) or round in self._beyond.get(key, ())

    def add(self, key: int, round: int) -> None:
        """Record that a round of a known key is complete."""
        beyond = self._beyond.setdefault(key, set())
        beyond.add(round)
        self._advance(key, beyond)

    def _advance(self, key: int, beyond: set[int]) -> None:
        while self._up_to[key] + 1 in beyond:
            self._up_to[key] += 1
            beyond.remove(self._up_to[key])
