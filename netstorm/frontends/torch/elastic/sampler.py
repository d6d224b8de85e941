"""Which samples each rank trains on while ranks come and go: shares of a permutation that all know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from netstorm.errors import UsageError

__all__ = ["ElasticSampler"]


class ElasticSampler:
    """Gives each rank its batches, in an order that all ranks know.

    Every epoch has a permutation of all samples. Each rank that contributed to the last step gets the next
    `batch_size` of them. All ranks agree on who did, so no sample is given twice, and the position is the
    same at all ranks whoever comes or goes. A rank that contributes for the first time trains on a batch that
    another one has, too. Samples at the end of an epoch that are too few for a batch of all ranks are left
    out, as with `drop_last`.

    A rank that has just joined repeats steps of the others, and its gradients do not count. Until it has
    caught up it gets small batches, so that it takes less time for a step than they do.

    As the `batch_sampler` of a DataLoader it needs `num_workers=0`: workers fetch batches in advance, for
    ranks that may be gone by then.

    Args:
        length: number of samples.
        batch_size: of one rank.
        seed: of the permutations, the same at all ranks.
        shuffle: if not, samples come in their order.
        catch_up_size: of a rank that is catching up; 2, since BatchNorm refuses a single sample.

    Attributes:
        epoch: of the next batch, from 0.
        position: samples of this epoch that were given to any rank.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, catch_up_size: int = 2
    ) -> None:
        if length < 1 or batch_size < 1 or catch_up_size < 1:
            raise UsageError(
                f"ElasticSampler({length}, {batch_size}, catch_up_size={catch_up_size}): expected at least "
                "one sample, and one a batch"
            )
        self.epoch = 0
        self.position = 0
        self._length: Final = length
        self._batch_size: Final = batch_size
        self._seed: Final = seed
        self._shuffle: Final = shuffle
        self._catch_up_size: Final = min(catch_up_size, batch_size)
        self._size = batch_size
        self._rank = 0
        self._ranks: tuple[int, ...] = (0,)
        self._order: tuple[int, torch.Tensor] | None = None
        """An epoch, and its permutation."""

    def set_ranks(self, rank: int, ranks: tuple[int, ...], *, counts: bool = True) -> None:
        """Share the next batches among `ranks`. `ElasticState` calls it before each step.

        Args:
            rank: this process's.
            ranks: those that contributed to the last step, ascending: the same at all ranks.
            counts: this rank contributes to the next step, as far as it knows.
        """
        self._rank, self._ranks = rank, ranks
        self._size = self._batch_size if counts else self._catch_up_size

    def take(self) -> list[int]:
        """Return this rank's next batch: numbers of samples."""
        together = self._batch_size * len(self._ranks)
        if self.position and self.position + together > self._length:
            self.epoch, self.position = self.epoch + 1, 0
        place = self._ranks.index(self._rank) if self._rank in self._ranks else self._rank % len(self._ranks)
        begin = self.position + place * self._batch_size
        self.position += together
        # With fewer samples than the ranks take together, some are given twice.
        chosen = torch.arange(begin, begin + self._size) % self._length
        found: list[int] = self._permutation()[chosen].tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, without end."""
        while True:
            yield self.take()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same at all ranks."""
        return {"epoch": self.epoch, "position": self.position, "length": self._length}

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

    def _permutation(self) -> torch.Tensor:
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.arange(self._length)
            if self._shuffle:
                order = torch.randperm(self._length, generator=generator)
            self._order = (self.epoch, order)
        return self._order[1]
