#!/usr/bin/env python3
"""Trains a network with Gluon on one or many nodes.

netstorm launch -n 4 -- python examples/gluon_digits.py
python examples/gluon_digits.py --kv-store local
"""

from __future__ import annotations

from typing import Any

from digits.data import Dataset, load
from digits.errors import usage_errors
from digits.framework import check_optimizer, create_store, mx
from digits.models import build, input_shape, prepare
from digits.options import Options, parse
from digits.progress import progress_of
from digits.recorder import Recorder
from digits.shards import Shard, in_order


def main() -> None:
    """Train as the command line says."""
    options = parse("Trains a network with Gluon on one or many nodes.")
    with usage_errors():
        data = load(options.dataset, options.data_dir)
        check_optimizer(options)
        kv = create_store(options.kv_store)  # mx.kv.create, with clear errors
        train(options, data, kv)


def train(options: Options, data: Dataset, kv: Any) -> None:
    """Train on this rank's shard, together with the other ranks of `kv`."""
    shape = input_shape(options.model, data, options.image_size)
    shard = Shard(
        data.train, rank=kv.rank, ranks=kv.num_workers, batch_size=options.batch_size, seed=options.seed
    )

    mx.random.seed(options.seed)
    net = build(options.model, data.classes)
    net.initialize(mx.init.MSRAPrelu(factor_type="in", slope=0))
    if options.hybridize:
        net.hybridize()
    net(mx.nd.zeros((1, shape.channels, shape.size, shape.size)))  # gives the weights shapes and values
    mx.random.seed(options.seed + 1 + kv.rank)  # dropout: each rank drops other units

    trainer = mx.gluon.Trainer(
        net.collect_params(),
        options.optimizer,
        options.optimizer_params,
        kvstore=kv,
        update_on_kvstore=options.update_on_kvstore,
    )
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def test_accuracy() -> float:
        metric = mx.metric.Accuracy()
        for images, labels in in_order(data.test, options.batch_size):
            metric.update([mx.nd.array(labels)], [net(prepare(images, shape, data.white))])
        return float(metric.get()[1])

    recorder = Recorder("gluon", options, rank=kv.rank, ranks=kv.num_workers)
    progress = progress_of(
        rank=kv.rank,
        epochs=options.epochs,
        steps=shard.steps,
        samples_per_step=options.batch_size * kv.num_workers,
    )
    with progress:
        for epoch in range(options.epochs):
            mean_loss = mx.metric.Loss()
            for images, labels in shard.batches(epoch):
                with mx.autograd.record():
                    loss = loss_of(net(prepare(images, shape, data.white)), mx.nd.array(labels))
                loss.backward()
                trainer.step(options.batch_size * kv.num_workers)  # the store sums the gradients of all ranks
                mean_loss.update(None, loss)
                progress.step(float(mean_loss.get()[1]))
            progress.finish_epoch(test_accuracy() if kv.rank == 0 else None)
            recorder.epoch(progress.results)
    trained = {
        name: parameter.data().asnumpy()
        for name, parameter in net.collect_params().items()
        if parameter.grad_req != "null"
    }
    recorder.end(progress.results, trained)


if __name__ == "__main__":
    main()
