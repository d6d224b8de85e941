"""The ranks of a store, as checkpoints need them: a few numbers from all, and bytes from one.

Both are rounds of keys of the store's own, so they need no message of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.checkpoint.checksums import Bytes
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["StoreRanks"]

_PIECE: Final = 16 * 2**20
"""Bytes of one round of a broadcast."""


class StoreRanks:
    """The ranks of one store. Its keys' names begin with what no user's key does."""

    def __init__(self, runtime: Runtime, namespace: int) -> None:
        """Prepare for the store with this namespace; nothing is sent."""
        self._runtime: Final = runtime
        self._namespace: Final = namespace
        self.keys: Final[dict[str, Key]] = {}
        """By name."""
        self._first_rounds: Mapping[str, int] = {}

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self._runtime.rank

    @property
    def writes_alone(self) -> bool:
        """Whether this is the first of the ranks that are in the job."""
        return self.rank == min(self.incarnations(), default=self.rank)

    def incarnations(self) -> dict[int, int]:
        """Return who is in the job; nobody, once it has failed."""
        if self._runtime.failure is not None:
            return {}
        return {member.rank: member.incarnation for member in self._runtime.node.members if member.port}

    def begin_at(self, rounds: Mapping[str, int]) -> None:
        """Begin with these rounds, by name of the key: this node has joined a job that has done others."""
        self._first_rounds = rounds

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of every rank that takes part, by rank. Blocks until all have called.

        In an elastic job `Runtime.size` counts all places, and those that nobody has contribute nothing.
        """
        places = np.zeros((self._runtime.size, 1 + len(numbers)), np.int64)
        places[self.rank] = (1, *numbers)
        self._sum(places.reshape(-1), contributes=True)
        return {rank: tuple(map(int, row[1:])) for rank, row in enumerate(places) if row[0]}

    def from_rank(self, rank: int, parts: Sequence[Bytes] | None) -> list[Bytes]:
        """Return what one rank gives; the others give None."""
        count = np.array([len(parts or ())], np.int64)
        self._sum(count, contributes=parts is not None)
        sizes = np.array([len(part) for part in parts] if parts else [0] * int(count[0]), np.int64)
        self._sum(sizes, contributes=parts is not None)
        return [
            self._send(int(size), None if parts is None else parts[place]) for place, size in enumerate(sizes)
        ]

    def _send(self, size: int, part: Bytes | None) -> Bytes:
        whole: Bytes = bytearray(size) if part is None else part
        into = np.frombuffer(whole, np.uint8)
        for begin in range(0, size, _PIECE):
            end = min(begin + _PIECE, size)
            piece = np.zeros(end - begin, np.uint8)
            if part is not None:
                piece[:] = into[begin:end]
            self._sum(piece, contributes=part is not None)
            if part is None:
                into[begin:end] = piece
        return whole

    def _sum(self, values: npt.NDArray[np.generic], *, contributes: bool) -> None:
        """Replace `values` by the sum over the ranks that contribute."""
        name = f"\0checkpoint {values.dtype.name} {values.size}"
        key = self.keys.get(name)
        if key is None:
            key = self._runtime.register(self._namespace, name, values.shape, values.dtype.name)
            key.begin_at(self._first_rounds.get(name, 0))
            self.keys[name] = key
        self._runtime.allreduce(
            Operation(
                key=key,
                round=key.take_round(),
                source=values if contributes else None,
                destination=values,
                done=lambda _: None,
            )
        )
