"""Operations whose round may not begin yet, of all keys on one node. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final

from netstorm.kvstore.operations.allreduce import Operation

__all__ = ["OperationQueue"]


class OperationQueue:
    """Operations that wait for a policy or for earlier rounds, by round.

    They come in any order, since the caller's engine starts them when their data is there.
    """

    def __init__(self) -> None:
        self._by_key: Final[dict[int, list[Operation]]] = {}

    def add(self, operation: Operation) -> None:
        """Queue an operation."""
        waiting = self._by_key.setdefault(operation.key.identity, [])
        bisect.insort(waiting, operation, key=_round)

    def of(self, key: int) -> list[Operation]:
        """Return the operations of a key, the lowest round first. The caller removes those that begin."""
        return self._by_key.get(key, [])

    def __iter__(self) -> Iterator[Operation]:
        for waiting in self._by_key.values():
            yield from waiting

    def clear(self) -> None:
        """Drop all operations."""
        self._by_key.clear()


def _round(operation: Operation) -> int:
    return operation.round
