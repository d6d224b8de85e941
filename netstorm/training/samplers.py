"""Which samples each rank trains on while ranks come and go: shares of a permutation that all know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError

__all__ = ["Permutation", "SampleShares"]

Permutation: TypeAlias = npt.NDArray[np.int64]


class SampleShares:
    """Deals batches of a permutation to ranks, which all know it and agree on who shares it.

    The position is the same at all ranks, whoever comes or goes, so no sample is given twice.

    Args:
        length: number of samples.
        batch_size: of one rank.
        seed: of the permutations, the same at all ranks.
        shuffle: if not, samples come in their order.
        catch_up_size: of a rank that is catching up; 2, since BatchNorm refuses a single sample.

    Attributes:
        epoch: of the next batch, from 0.
        position: samples of this epoch that were given to any rank.
        rank: this process's.
        ranks: those that share the next batches, ascending.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, catch_up_size: int = 2
    ) -> None:
        if length < 1 or batch_size < 1 or catch_up_size < 1:
            raise UsageError(
                f"{type(self).__name__}({length}, {batch_size}, catch_up_size={catch_up_size}): expected "
                "at least one sample, and one a batch"
            )
        self.epoch = 0
        self.position = 0
        self._length: Final = length
        self._batch_size: Final = batch_size
        self._seed: Final = seed
        self._shuffle: Final = shuffle
        self._catch_up_size: Final = min(catch_up_size, batch_size)
        self._size = batch_size
        self._last = 0
        """How many samples the last batches of all ranks had together."""
        self.rank = 0
        self.ranks: tuple[int, ...] = (0,)
        self._order: tuple[int, Permutation] | None = None
        """An epoch, and the order of its samples."""

    def set_ranks(self, rank: int, ranks: tuple[int, ...], *, counts: bool = True) -> None:
        """Share the next batches among `ranks`; call it before each step.

        Args:
            rank: this process's.
            ranks: those that contributed to the last step, ascending: the same at all ranks.
            counts: this rank contributes to the next step, as far as it knows.
        """
        self.rank, self.ranks = rank, ranks
        self._size = self._batch_size if counts else self._catch_up_size

    def take(self) -> list[int]:
        """Return this rank's next batch: numbers of samples."""
        place = self.ranks.index(self.rank) if self.rank in self.ranks else self.rank % len(self.ranks)
        begin = self._next_batches() + place * self._batch_size
        # With fewer samples than the ranks take together, some are given twice.
        chosen = np.arange(begin, begin + self._size) % self._length
        batch: list[int] = self._samples()[chosen].tolist()
        return batch

    def skip(self, batches: int) -> None:
        """Leave out so many batches, which the others take: this rank skips steps."""
        for _ in range(batches):
            self._next_batches()

    def give_back(self) -> None:
        """Give the last batches of all ranks again: the others have taken them, and this rank has not."""
        self.position -= self._last
        self._last = 0

    def _next_batches(self) -> int:
        """Return where the next batches of all ranks begin, and go on behind them."""
        together = self._batch_size * len(self.ranks)
        if self.position and self.position + together > self._length:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += together
        self._last = together
        return self.position - together

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, without end."""
        while True:
            yield self.take()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same at all ranks."""
        return {"epoch": self.epoch, "position": self.position, "length": self._length, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position.

        Raises:
            UsageError: it is one among another number of samples.
        """
        if state["length"] != self._length:
            raise UsageError(
                f"a position among {state['length']} samples, and this sampler has {self._length}: all ranks "
                "must have the same samples"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._last = int(state.get("last", 0))

    def _samples(self) -> Permutation:
        """Return the samples of this epoch in their order."""
        if self._order is None or self._order[0] != self.epoch:
            order = self._permutation(self._seed + self.epoch) if self._shuffle else np.arange(self._length)
            self._order = (self.epoch, order)
        return self._order[1]

    def _permutation(self, seed: int) -> Permutation:
        """Return the permutation that a seed stands for. A framework may have its own, which earlier jobs of
        its scripts have used.
        """
        return np.random.default_rng(seed).permutation(self._length)
