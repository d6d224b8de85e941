"""The batches of `Module.fit` and `Module.score`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from digits.framework import mx
from digits.models import InputShape, prepare

__all__ = ["Batches"]


class Batches(mx.io.DataIter):
    """An MXNet data iterator over one pass (epoch) after another of (images, labels)."""

    def __init__(
        self,
        epoch: Callable[[int], Iterator[tuple[Any, Any]]],
        *,
        batch_size: int,
        shape: InputShape,
        white: int,
    ) -> None:
        """Take `epoch`, which returns the batches of the n-th pass, each of `batch_size` samples."""
        super().__init__(batch_size)
        self._epoch = epoch
        self._shape = shape
        self._white = white
        self._passes = 0
        self._batches = epoch(0)
        self.provide_data = [
            mx.io.DataDesc("data", (batch_size, shape.channels, shape.size, shape.size), "float32")
        ]
        self.provide_label = [mx.io.DataDesc("softmax_label", (batch_size,), "float32")]

    def reset(self) -> None:
        """Begin the next pass."""
        self._passes += 1
        self._batches = self._epoch(self._passes)

    def next(self) -> Any:
        """Return the next batch; raises `StopIteration` at the end of a pass."""
        images, labels = next(self._batches)
        return mx.io.DataBatch(
            data=[prepare(images, self._shape, self._white)],
            label=[mx.nd.array(labels, dtype="float32")],
            pad=0,
        )
