"""The CNN of `workers/train.py` on digits, trained by many ranks in one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

import numpy as np

from digits.data import Dataset, load
from digits.shards import Batch, Shard
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.training.codec_states import Parameter
from race.one_process import Curve, Floats, KeySums
from race.technique import Technique
from workers.train import cnn

__all__ = ["train_digits"]

_EVERY: Final = 8
"""Steps from one look at the test samples to the next, as on the WAN."""


def train_digits(technique: Technique, seed: int, options: argparse.Namespace) -> Curve:
    """Return the accuracies of a training, from 0 to 1.

    Raises:
        UsageError: the technique needs a job of several processes.
    """
    if technique.variables:
        raise UsageError(
            "digits in one process: a codec, local steps or both; the rest needs a job, as in bench train"
        )
    if technique.outer:
        raise UsageError("diloco is PyTorch's: digits train with MXNet")
    job = _Job(technique, seed, options)
    curve = Curve()
    for step in range(1, options.steps + 1):
        if technique.local_steps:
            job.local_step()
            if step % technique.local_steps == 0:
                job.average()
        else:
            job.step()
        if step % _EVERY == 0:
            curve.add(step, job.accuracy())
    return curve


class _Job:
    """One net, whose values are those of one rank after the other if they differ."""

    def __init__(self, technique: Technique, seed: int, options: argparse.Namespace) -> None:
        self.data: Final[Dataset] = load("digits", None)
        ranks, size = options.ranks, options.batch_size
        self.batches: Final = [
            _endless(Shard(self.data.train, rank=rank, ranks=ranks, batch_size=size, seed=seed))
            for rank in range(ranks)
        ]
        mx.random.seed(seed)
        self.net: Final = cnn(options.width)
        self.net.initialize(mx.init.Xavier())
        self.net(self._pixels(self.data.test.images[:1]))
        self.net.hybridize(static_alloc=True)
        self.loss_of: Final = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.parameters: Final[list[Any]] = list(self.net.collect_params().values())
        described = [Parameter(one.name, tuple(one.shape)) for one in self.parameters]
        self.sums: Final = KeySums(technique.compression or "none", described, ranks)
        self.is_encoded: Final = technique.compression is not None
        local = bool(technique.local_steps)
        # Gradients are sums over all ranks, or one's own. One updater has one rank's momentum.
        self.updaters: Final = [
            mx.optimizer.get_updater(
                mx.optimizer.SGD(
                    learning_rate=options.lr,
                    momentum=0.9 if technique.momentum else 0.0,
                    rescale_grad=1 / (size * (1 if local else ranks)),
                )
            )
            for _ in range(ranks if local else 1)
        ]
        self.values: Final = [
            [one.data().copy() for one in self.parameters] for _ in range(ranks if local else 0)
        ]
        self.base: Final[list[Floats]] = [one.data().asnumpy().copy() for one in self.parameters]
        """The values after the last average."""

    def step(self) -> None:
        """Sum the gradients of all ranks, and update."""
        by_rank = [self._gradients(batches) for batches in self.batches]
        by_parameter: list[Sequence[Floats]] = list(zip(*by_rank, strict=True))
        for index, (total, parameter) in enumerate(
            zip(self.sums.sum(by_parameter), self.parameters, strict=True)
        ):
            self.updaters[0](index, mx.nd.array(total.reshape(parameter.shape)), parameter.data())

    def local_step(self) -> None:
        """Update each rank's values by its own gradients."""
        for values, batches, update in zip(self.values, self.batches, self.updaters, strict=True):
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.set_data(value)
            for index, gradient in enumerate(self._gradients(batches)):
                update(index, mx.nd.array(gradient), values[index])

    def average(self) -> None:
        """Give all ranks, and the net, the mean of their values: under a codec the base and the mean of what
        ranks have learnt since, as in `frontends.mxnet.local_updates.changes`.
        """
        if self.is_encoded:
            means = self._encoded_means()
        else:
            by_rank = [[value.asnumpy() for value in values] for values in self.values]
            means = [np.mean(values, axis=0) for values in zip(*by_rank, strict=True)]
        for index, (parameter, mean) in enumerate(zip(self.parameters, means, strict=True)):
            parameter.set_data(mx.nd.array(mean))
            for values in self.values:
                values[index][:] = parameter.data()

    def _encoded_means(self) -> list[Floats]:
        by_rank = [
            [value.asnumpy() - base for value, base in zip(values, self.base, strict=True)]
            for values in self.values
        ]
        by_parameter: list[Sequence[Floats]] = list(zip(*by_rank, strict=True))
        for index, total in enumerate(self.sums.sum(by_parameter)):
            self.base[index] += total.reshape(self.base[index].shape) / np.float32(len(self.values))
        return self.base

    def accuracy(self) -> float:
        """Return the share of test samples that the net knows."""
        chosen = self.net(self._pixels(self.data.test.images)).argmax(axis=1).asnumpy()
        return float((chosen == self.data.test.labels).mean())

    def _gradients(self, batches: Iterator[Batch]) -> list[Floats]:
        images, labels = next(batches)
        with mx.autograd.record():
            loss = self.loss_of(self.net(self._pixels(images)), mx.nd.array(labels))
        loss.backward()
        return [one.grad().asnumpy() for one in self.parameters]

    def _pixels(self, images: Any) -> Any:
        return mx.nd.array(images / self.data.white)


def _endless(shard: Shard) -> Iterator[Batch]:
    for epoch in count():
        yield from shard.batches(epoch)
