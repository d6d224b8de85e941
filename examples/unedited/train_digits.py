"""Handwritten digits with `Module.fit`, in the manner of image-classification's train_mnist.py.

python -m netstorm launch -n 3 -- python -m netstorm.run train_digits.py --kv-store dist_sync
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

from fitting.fit import add_fit_args, fit


def iterators(args: argparse.Namespace, kv: Any) -> tuple[Any, Any]:
    """Return this worker's part of the training samples, and all of the test samples."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]
    test = len(images) - args.num_examples
    part = slice(test + kv.rank, None, kv.num_workers)
    full = _epoch(args, kv) * args.batch_size
    train = mx.io.NDArrayIter(images[part][:full], digits.target[part][:full], args.batch_size, shuffle=True)
    return train, mx.io.NDArrayIter(images[:test], digits.target[:test], args.batch_size)


def _epoch(args: argparse.Namespace, kv: Any) -> int:
    """Return how many whole batches every worker has: all must have the same number."""
    return int(args.num_examples // kv.num_workers // args.batch_size)


def mlp(classes: int) -> Any:
    """Return a multi-layer perceptron."""
    data = mx.sym.Flatten(mx.sym.var("data"))
    for number, width in enumerate((64, 32), 1):
        data = mx.sym.FullyConnected(data, num_hidden=width, name=f"fc{number}")
        data = mx.sym.Activation(data, act_type="relu", name=f"relu{number}")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=classes, name="fc3"), name="softmax")


def convolutions(classes: int) -> Any:
    """Return a small convolutional network with batch normalisation."""
    data = mx.sym.var("data")
    for number, filters in enumerate((8, 16), 1):
        data = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=filters, name=f"conv{number}")
        data = mx.sym.BatchNorm(data, fix_gamma=False, name=f"bn{number}")
        data = mx.sym.Activation(data, act_type="relu", name=f"relu{number}")
        data = mx.sym.Pooling(data, kernel=(2, 2), stride=(2, 2), pool_type="max", name=f"pool{number}")
    data = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(data, name="softmax")


def main() -> None:
    """Train, and print how good the model is and which weights it has."""
    parser = argparse.ArgumentParser(description="train on digits", allow_abbrev=False)
    parser.add_argument("--network", choices=["mlp", "conv"], default="mlp")
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--num-examples", type=int, default=1536, help="training samples of all workers")
    add_fit_args(parser)
    args = parser.parse_args()
    mx.random.seed(1)
    np.random.seed(1)  # noqa: NPY002 -- NDArrayIter shuffles with it
    network = {"mlp": mlp, "conv": convolutions}[args.network](args.num_classes)
    model = fit(args, network, iterators)
    validation = iterators(args, mx.kvstore.create("local"))[1]
    print("accuracy", dict(model.score(validation, "acc"))["accuracy"])
    weights = b"".join(value.asnumpy().tobytes() for _, value in sorted(model.get_params()[0].items()))
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
