"""Handwritten digits with a Gluon Trainer, in the manner of Gluon's image_classification.py.

python -m netstorm launch -n 3 -- python -m netstorm.run gluon_digits_classification.py --kvstore dist_sync
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits


class SplitSampler(gluon.data.sampler.Sampler):
    """This worker's part of the samples, in another order each epoch; equally many for all."""

    def __init__(self, length: int, parts: int, part: int) -> None:
        self.part_len = length // parts
        self.start = self.part_len * part
        self._random = np.random.RandomState(part)

    def __iter__(self) -> Iterator[int]:
        """Yield numbers of samples."""
        return iter((self.start + self._random.permutation(self.part_len)).tolist())

    def __len__(self) -> int:
        """Return how many."""
        return self.part_len


def network() -> Any:
    """Return a small convolutional network."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(8, 3, padding=1, activation="relu"),
        nn.MaxPool2D(),
        nn.BatchNorm(),
        nn.Flatten(),
        nn.Dense(32, activation="relu"),
        nn.Dense(10),
    )
    return net


def test(net: Any, contexts: list[Any], batches: Any) -> float:
    """Return the accuracy."""
    metric = mx.metric.Accuracy()
    for data, label in batches:
        parts = gluon.utils.split_and_load(data, contexts, even_split=False)
        labels = gluon.utils.split_and_load(label, contexts, even_split=False)
        metric.update(labels, [net(part) for part in parts])
    return float(metric.get()[1])


def main() -> None:
    """Train, and print how good the model is and which weights it has."""
    parser = argparse.ArgumentParser(description="train on digits")
    parser.add_argument("--kvstore", default="device", help="kvstore to use for trainer")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of a worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--devices", type=int, default=1, help="number of CPU contexts")
    parser.add_argument("--hybridize", action="store_true")
    parser.add_argument("--save", help="file of the trainer's states, written and read again")
    opt = parser.parse_args()
    contexts = [mx.cpu(number) for number in range(opt.devices)]

    mx.random.seed(123)
    kv = mx.kv.create(opt.kvstore)
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]
    labels = digits.target.astype(np.float32)
    train = gluon.data.ArrayDataset(images[261:], labels[261:])
    sampler = SplitSampler(len(train), kv.num_workers, kv.rank)
    batches = gluon.data.DataLoader(train, batch_size=opt.batch_size, sampler=sampler, last_batch="discard")
    tests = gluon.data.DataLoader(
        gluon.data.ArrayDataset(images[:261], labels[:261]), batch_size=opt.batch_size
    )

    net = network()
    net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts)
    if opt.hybridize:
        net.hybridize()
    net(mx.nd.zeros((1, 1, 8, 8), ctx=contexts[0]))
    options = {"learning_rate": opt.lr, "wd": 1e-4, "momentum": opt.momentum}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    metric = mx.metric.Accuracy()
    for epoch in range(opt.epochs):
        began = time.time()
        metric.reset()
        if epoch == opt.epochs - 1:
            trainer.set_learning_rate(opt.lr * 0.1)
        for data, label in batches:
            parts = gluon.utils.split_and_load(data, contexts)
            targets = gluon.utils.split_and_load(label, contexts)
            with autograd.record():
                outputs = [net(part) for part in parts]
                losses = [loss_of(output, target) for output, target in zip(outputs, targets, strict=True)]
            autograd.backward(losses)
            trainer.step(data.shape[0] * kv.num_workers)
            metric.update(targets, outputs)
        print(f"[Epoch {epoch}] training: accuracy={metric.get()[1]:.4f} time: {time.time() - began:.2f}")
        if opt.save:
            trainer.save_states(opt.save)
            trainer.load_states(opt.save)
    print("accuracy", test(net, contexts, tests))
    trained = [value for _, value in sorted(net.collect_params(".*weight|.*bias|.*gamma|.*beta").items())]
    weights = b"".join(value.list_data()[0].asnumpy().tobytes() for value in trained)
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
