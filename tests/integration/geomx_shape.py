"""Programs of the shape of GeoMX's examples: their calls of the store, in their order.

GeoMX's own (cnn.py, cnn_bsc.py, …) are not part of this repository. The first argument says which one; the
network, and scikit-learn's digits in place of MNIST, are ours.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

BATCH = 32


def main() -> None:
    """Train as GeoMX's example of that name does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=("cnn", "cnn_bsc", "cnn_fp16", "cnn_mpq", "cnn_hfa"))
    parser.add_argument("--data-slice-idx", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=4)
    parser.add_argument("--mixed-sync", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()

    mx.random.seed(given.data_slice_idx)  # so that ranks begin differently
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(128, activation="relu"), mx.gluon.nn.Dense(10))
    net.initialize(init=mx.init.Xavier())
    net(mx.nd.zeros((BATCH, 64)))

    kv = mx.kv.create("dist_async" if given.mixed_sync else "dist_sync")
    is_master_worker = kv.is_master_worker
    if is_master_worker and given.shape == "cnn":
        kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.01))
    if is_master_worker and given.shape in ("cnn_bsc", "cnn_mpq"):
        kv.set_gradient_compression({"type": "bsc", "threshold": 0.1})
    workers = kv.num_all_workers
    trainer = mx.gluon.Trainer(
        net.collect_params(), mx.optimizer.Adam(learning_rate=0.01), kvstore=None, update_on_kvstore=False
    )
    params = list(net.collect_params().values())

    for idx, param in enumerate(params):
        initial = cast(param.data(), given.shape)
        kv.init(idx, initial)
        if is_master_worker:
            continue
        kv.pull(idx, initial)
        param.set_data(initial.astype("float32"))
    mx.nd.waitall()
    if is_master_worker:
        return

    batches, test, labels = samples(given.data_slice_idx, workers)
    step = train(given, net, kv, trainer, batches)
    right = float((net(test).argmax(axis=1) == labels).mean().asscalar())
    digest = float(sum(param.data().abs().sum().asscalar() for param in params))
    print(f"{given.shape}: {step} steps, Test Acc {right:.4f}, weights {digest!r}, {kv.type}", flush=True)


def train(given: argparse.Namespace, net: Any, kv: Any, trainer: Any, batches: Any) -> int:
    """Train, and return the number of steps."""
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    params = list(net.collect_params().values())
    k1 = int(os.getenv("MXNET_KVSTORE_HFA_K1", "0"))
    step = 0
    for _ in range(given.epoch):
        for images, classes in batches:
            with mx.autograd.record():
                loss = loss_of(net(images), classes)
            loss.backward()
            step += 1
            if given.shape == "cnn_hfa":
                trainer.step(BATCH)
                mx.nd.waitall()
            for idx, param in enumerate(params):
                if given.shape == "cnn_hfa":
                    if step % k1 == 0:
                        kv.push(idx, param.data() / kv.num_workers, priority=-idx)
                        kv.pull(idx, param.data(), priority=-idx)
                elif given.shape == "cnn":
                    kv.push(idx, param.grad() / BATCH, priority=-idx)
                    kv.pull(idx, param.data(), priority=-idx)
                else:
                    buffer = cast(param.grad(), given.shape)
                    kv.push(idx, buffer / BATCH, priority=-idx)
                    kv.pull(idx, buffer, priority=-idx)
                    param.grad()[:] = buffer.astype("float32")
            mx.nd.waitall()
            if given.shape not in ("cnn", "cnn_hfa"):
                trainer.step(kv.num_all_workers)
                for param in params:
                    param.zero_grad()
    return step


def cast(array: Any, shape: str) -> Any:
    """Return a tensor as cnn_fp16.py and cnn_mpq.py send it: all, or small ones, as float16."""
    if shape == "cnn_fp16":
        return array.astype("float16")
    bound = int(os.getenv("MXNET_KVSTORE_SIZE_LOWER_BOUND", "200000")) if shape == "cnn_mpq" else 0
    return array if array.size > bound else array.astype("float16")


def samples(part: int, parts: int) -> tuple[list[tuple[Any, Any]], Any, Any]:
    """Return the batches of one part of the training samples, and the images and labels to test on."""
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target.astype("float32")
    order = np.random.RandomState(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    size = 1280 // parts
    starts = range(size * part, size * (part + 1) - BATCH + 1, BATCH)
    batches = [
        (mx.nd.array(images[start : start + BATCH]), mx.nd.array(labels[start : start + BATCH]))
        for start in starts
    ]
    return batches, mx.nd.array(images[1280:]), mx.nd.array(labels[1280:])


if __name__ == "__main__":
    main()
