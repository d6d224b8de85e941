#!/usr/bin/env python3
"""Trains a network with Module.fit on one or many nodes.

netstorm launch -n 4 -- python examples/module_digits.py
python examples/module_digits.py --kv-store local
"""

from __future__ import annotations

import logging
import os
from typing import Any

from digits.data import Dataset, load
from digits.errors import usage_errors
from digits.framework import check_optimizer, create_store, mx
from digits.models import build, input_shape
from digits.module_iterator import Batches
from digits.options import Options, parse
from digits.progress import progress_of
from digits.recorder import Recorder
from digits.shards import Shard, in_order


def main() -> None:
    """Train as the command line says."""
    options = parse("Trains a network with Module.fit on one or many nodes.")
    with usage_errors():
        data = load(options.dataset, options.data_dir)
        check_optimizer(options)
        if options.update_on_kvstore is not None:
            # Module.fit has no argument for it, as Gluon's Trainer has.
            os.environ["MXNET_UPDATE_ON_KVSTORE"] = str(int(options.update_on_kvstore))
        kv = create_store(options.kv_store)  # mx.kv.create, with clear errors
        train(options, data, kv)


def train(options: Options, data: Dataset, kv: Any) -> None:
    """Train on this rank's shard, together with the other ranks of `kv`."""
    shape = input_shape(options.model, data, options.image_size)
    shard = Shard(
        data.train, rank=kv.rank, ranks=kv.num_workers, batch_size=options.batch_size, seed=options.seed
    )
    training = Batches(shard.batches, batch_size=options.batch_size, shape=shape, white=data.white)
    test = Batches(
        lambda _epoch: in_order(data.test, options.batch_size),
        batch_size=options.batch_size,
        shape=shape,
        white=data.white,
    )

    network = build(options.model, data.classes)(mx.sym.var("data"))
    network = mx.sym.SoftmaxOutput(network, name="softmax")
    weights, running_means = initial_values(network, training, seed=options.seed)
    mx.random.seed(options.seed + 1 + kv.rank)  # dropout: each rank drops other units

    recorder = Recorder("module", options, rank=kv.rank, ranks=kv.num_workers)
    progress = progress_of(
        rank=kv.rank,
        epochs=options.epochs,
        steps=shard.steps,
        samples_per_step=options.batch_size * kv.num_workers,
    )

    def step_done(state: Any) -> None:
        progress.step(float(state.eval_metric.get()[1]))

    def epoch_done(*_state: Any) -> None:
        if kv.rank != 0:
            progress.finish_epoch(None)
            recorder.epoch(progress.results)

    def test_done(state: Any) -> None:
        progress.finish_epoch(float(state.eval_metric.get()[1]))
        recorder.epoch(progress.results)

    quiet = logging.getLogger("module")  # its lines would cut the progress bar
    quiet.setLevel(logging.WARNING)
    module = mx.mod.Module(network, logger=quiet)
    with progress:
        module.fit(
            training,
            eval_data=test if kv.rank == 0 else None,
            eval_metric=mx.metric.CrossEntropy(),
            validation_metric=mx.metric.Accuracy(),
            kvstore=kv,
            optimizer=options.optimizer,
            optimizer_params=options.optimizer_params,
            arg_params=weights,
            aux_params=running_means,
            num_epoch=options.epochs,
            batch_end_callback=step_done,
            epoch_end_callback=epoch_done,
            eval_end_callback=test_done,
        )
    recorder.end(progress.results, {name: value.asnumpy() for name, value in module.get_params()[0].items()})


def initial_values(network: Any, training: Batches, *, seed: int) -> tuple[Any, Any]:
    """Return the weights and running means that every rank begins with."""
    mx.random.seed(seed)
    module = mx.mod.Module(network)
    module.bind(training.provide_data, training.provide_label)
    module.init_params(mx.init.MSRAPrelu(factor_type="in", slope=0))
    weights, running_means = module.get_params()
    return weights, running_means


if __name__ == "__main__":
    main()
