"""What the scripts of GeoMX's techniques share: its CNN, its options, and its training loop, on digits.

The loop is that of GeoMX's own examples: a push of each gradient, a pull of each parameter. The scripts
differ in the store that they give to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits.data import Dataset, load
from digits.errors import usage_errors
from digits.framework import mx
from digits.options import positive_number, whole_number
from digits.shards import Batch, Shard, in_order

__all__ = ["Options", "mx", "parser_of", "positive_number", "run", "whole_number"]

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for; names as in GeoMX's examples."""

    learning_rate: float
    batch_size: int
    epoch: int
    cpu: bool
    data_slice_idx: int | None


def parser_of(description: str, *, learning_rate: float) -> argparse.ArgumentParser:
    """Return a parser with GeoMX's options."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("-lr", "--learning-rate", type=positive_number, default=learning_rate)
    add("-bs", "--batch-size", type=whole_number, default=16, help="samples in a batch of one node")
    add("-ep", "--epoch", type=whole_number, default=5)
    add("-ds", "--data-slice-idx", type=int, help="which share of the samples; default: that of the rank")
    add("-c", "--cpu", action="store_true", help="use no GPU, even if there is one")
    return parser


def run(
    given: argparse.Namespace,
    make_store: Callable[[], Any],
    make_optimizer: Callable[[float], Any],
    *,
    summed_over: Callable[[Any], int] = lambda _: 1,
    steps: Callable[[Any, int], Iterator[None]] | None = None,
) -> Any:
    """Train, say on rank 0 how good the network is, and return the KVStore.

    Args:
        given: what the parser has returned.
        make_store: returns the KVStore.
        make_optimizer: returns the optimizer, given a learning rate.
        summed_over: returns over how many nodes the store sums gradients.
        steps: yields once for each step of an epoch, given the store and the usual number.
    """
    options = Options(
        learning_rate=given.learning_rate,
        batch_size=given.batch_size,
        epoch=given.epoch,
        cpu=given.cpu,
        data_slice_idx=given.data_slice_idx,
    )
    with usage_errors():
        data = load("digits", None)
        kvstore = make_store()
        _train(
            options,
            data,
            kvstore,
            make_optimizer(options.learning_rate),
            divisor=options.batch_size * summed_over(kvstore),
            steps=steps or (lambda _, usual: iter([None] * usual)),
        )
        return kvstore


def _train(
    options: Options,
    data: Dataset,
    kvstore: Any,
    optimizer: Any,
    *,
    divisor: int,
    steps: Callable[[Any, int], Iterator[None]],
) -> None:
    context = mx.cpu() if options.cpu or not mx.context.num_gpus() else mx.gpu()
    shard = Shard(
        data.train,
        rank=kvstore.rank if options.data_slice_idx is None else options.data_slice_idx,
        ranks=kvstore.num_workers,
        batch_size=options.batch_size,
        seed=_SEED,
    )
    net, loss_of = _cnn(context), mx.gluon.loss.SoftmaxCrossEntropyLoss()
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]

    kvstore.set_optimizer(optimizer)
    for idx, param in enumerate(params):
        kvstore.init(idx, param.data())
        kvstore.pull(idx, param.data(), priority=-idx)
    mx.nd.waitall()

    begin_time, iteration, batches = time.monotonic(), 0, _endless(shard)
    for epoch in range(options.epoch):
        for _ in steps(kvstore, shard.steps):
            images, labels = next(batches)
            with mx.autograd.record():
                loss = loss_of(net(_pixels(images, data, context)), mx.nd.array(labels, ctx=context))
            loss.backward()
            for idx, param in enumerate(params):
                kvstore.push(idx, param.grad() / divisor, priority=-idx)
                kvstore.pull(idx, param.data(), priority=-idx)
            mx.nd.waitall()
            iteration += 1
        if kvstore.rank == 0:
            seconds = time.monotonic() - begin_time
            right = _accuracy(net, data, context)
            print(
                f"[Time {seconds:.3f}][Epoch {epoch}][Iteration {iteration}] Test Acc {right:.4f}", flush=True
            )


def _cnn(context: Any) -> Any:
    """Return GeoMX's network, for images of 8 by 8 pixels."""
    mx.random.seed(_SEED)
    nn = mx.gluon.nn
    net = nn.Sequential()
    net.add(
        nn.Conv2D(channels=6, kernel_size=3, padding=1, activation="relu"),
        nn.MaxPool2D(pool_size=2, strides=2),
        nn.Conv2D(channels=16, kernel_size=3, padding=1, activation="relu"),
        nn.MaxPool2D(pool_size=2, strides=2),
        nn.Dense(120, activation="relu"),
        nn.Dense(84, activation="relu"),
        nn.Dense(10),
    )
    net.initialize(ctx=context, init=mx.init.Xavier())
    net(mx.nd.zeros((1, 1, 8, 8), ctx=context))
    return net


def _endless(shard: Shard) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from shard.batches(epoch)
        epoch += 1


def _pixels(images: Any, data: Dataset, context: Any) -> Any:
    return mx.nd.array(images / data.white, ctx=context)


def _accuracy(net: Any, data: Dataset, context: Any) -> float:
    metric = mx.metric.Accuracy()
    for images, labels in in_order(data.test, 64):
        metric.update([mx.nd.array(labels)], [net(_pixels(images, data, context)).as_in_context(mx.cpu())])
    return float(metric.get()[1])
