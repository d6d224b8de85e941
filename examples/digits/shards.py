"""Which samples each rank trains on, and in which order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from digits.data import Samples
from digits.errors import ExampleError

__all__ = ["Shard", "in_order"]

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images and labels."""


class Shard:
    """One rank's part of the training samples, dealt anew each epoch.

    All ranks draw the same permutation and take turns in it, batch by batch: each has the same number of
    batches, since a synchronous sum waits for all, and it matters to nobody which process has which rank.
    What does not fill a batch of every rank is left out until the next epoch's order.
    """

    def __init__(self, samples: Samples, *, rank: int, ranks: int, batch_size: int, seed: int) -> None:
        self.steps = len(samples) // (batch_size * ranks)
        if self.steps == 0:
            raise ExampleError(
                f"--batch-size {batch_size}: {len(samples)} samples do not fill one batch on each of {ranks} "
                f"ranks; at most {len(samples) // ranks}"
            )
        self.samples = samples
        self.batch_size = batch_size
        self._rank = rank
        self._ranks = ranks
        self._seed = seed

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield each step's (images, labels): the same for the same seed, epoch, rank and number of ranks."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self.samples))
        turns = order[: self.steps * self._ranks * self.batch_size].reshape(
            self.steps, self._ranks, self.batch_size
        )
        for chosen in turns[:, self._rank]:
            yield self.samples.images[chosen], self.samples.labels[chosen]


def in_order(samples: Samples, batch_size: int) -> Iterator[Batch]:
    """Yield all samples in their own order; the last batch may be smaller."""
    for start in range(0, len(samples), batch_size):
        yield samples.images[start : start + batch_size], samples.labels[start : start + batch_size]
