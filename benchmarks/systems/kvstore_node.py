"""A worker that reduces NDArrays through a store of MXNet's: `pushpull` in place, as `gluon.Trainer` does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from netstorm.frontends.mxnet.compat import mx
from systems.base import Case

__all__ = ["KVStoreNode", "NDArrays"]


class NDArrays:
    """The arrays alone, without a store."""

    def __init__(self, case: Case) -> None:
        self.rank = 0
        self.nodes = 1
        self.sizes = case.sizes
        self.values: list[Any] = [mx.nd.zeros((size,)) for size in self.sizes]

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        """Overwrite a part of array `index`."""
        self.values[index][start : start + len(values)] = mx.nd.array(values, dtype="float32")

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a part of array `index`."""
        values: NDArray[np.float32] = self.values[index][start:stop].asnumpy()
        return values

    def settle(self) -> None:
        """Wait until what was written is in memory."""
        for value in self.values:
            value.wait_to_read()

    def allreduce(self) -> None:
        """Do nothing: the sum over one rank."""


class KVStoreNode(NDArrays):
    """A worker of a distributed store; `store` is what `mx.kv.create` is asked for."""

    def __init__(self, case: Case, store: str) -> None:
        super().__init__(case)
        self.store: Any = mx.kv.create(store)
        self.rank = self.store.rank
        self.nodes = self.store.num_workers
        for key, value in enumerate(self.values):
            self.store.init(key, value)

    def allreduce(self) -> None:
        """Replace every array by the sum over all ranks; returns when it can be read."""
        for key, value in enumerate(self.values):
            self.store.pushpull(key, value, priority=-key)
        for value in self.values:
            value.wait_to_read()
