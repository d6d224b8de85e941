#!/usr/bin/env python3
"""The demo: trains a CNN on every node, shows what the network does, and compares the nodes' weights.

scripts/demo.sh
netstorm launch -n 4 --no-prefix -- python examples/demo.py --folder /tmp/demo
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from digits.data import Dataset, load
from digits.framework import create_store, mx
from digits.models import build
from digits.results import save_weights
from digits.shards import Shard, in_order

COLUMNS = ("epoch", "loss", "accuracy", "samples/s", "MB sent by a node", "waiting for the network")


def main() -> int:
    """Train, then compare."""
    parser = argparse.ArgumentParser(description="Trains a CNN on digits and compares the nodes' weights.")
    parser.add_argument("--folder", type=Path, required=True, help="where the nodes leave their weights")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    kv = create_store("dist_sync_netstorm")
    weights = train(kv, load("digits", None), options.epochs)
    save_weights(weights_of(options.folder, kv.rank), weights)
    kv._barrier()  # noqa: SLF001 - MXNet's own name for it
    return compare(options.folder, kv.live_ranks) if kv.rank == kv.live_ranks[0] else 0


def train(kv: Any, data: Dataset, epochs: int) -> dict[str, Any]:
    """Train on this rank's shard, and return the weights; rank 0 writes a table."""
    shard = Shard(data.train, rank=kv.rank, ranks=kv.num_workers, batch_size=16, seed=1)
    mx.random.seed(1)
    net = build("cnn", data.classes)
    net.initialize(mx.init.MSRAPrelu(factor_type="in", slope=0))
    net(mx.nd.zeros((1, 1, 8, 8)))
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=kv
    )
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    if kv.rank == 0:
        print("  ".join(COLUMNS), flush=True)
    for epoch in range(epochs):
        began, before, waited, losses = time.monotonic(), kv.statistics(), 0.0, []
        for images, labels in shard.batches(epoch):
            with mx.autograd.record():
                loss = loss_of(net(pixels(images)), mx.nd.array(labels))
            loss.backward()
            losses.append(loss.mean().asscalar())
            mx.nd.waitall()  # the gradients are there: what is waited for below is the network and the update
            ready = time.monotonic()
            trainer.step(16 * kv.num_workers)
            mx.nd.waitall()
            waited += time.monotonic() - ready
        seconds = time.monotonic() - began
        if kv.rank == 0:
            sent = kv.statistics()["bytes_sent"] - before["bytes_sent"]
            cells = (
                f"{epoch + 1}/{epochs}",
                f"{np.mean(losses):.4f}",
                f"{accuracy_of(net, data):.1%}",
                f"{shard.steps * 16 * kv.num_workers / seconds:.0f}",
                f"{sent / 1e6:.1f}",
                f"{waited:.1f} of {seconds:.1f} s",
            )
            print(
                "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, COLUMNS, strict=True)),
                flush=True,
            )
    return {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}


def pixels(images: Any) -> Any:
    """Return a batch of images as the network wants it."""
    return mx.nd.array(images.reshape(-1, 1, 8, 8) / 16)


def accuracy_of(net: Any, data: Dataset) -> float:
    """Return the share of test samples that the network gets right."""
    metric = mx.metric.Accuracy()
    for images, labels in in_order(data.test, 64):
        metric.update([mx.nd.array(labels)], [net(pixels(images))])
    return float(metric.get()[1])


def weights_of(folder: Path, rank: int) -> Path:
    """Return where a rank leaves its weights."""
    return folder / f"weights-of-rank-{rank}.npz"


def compare(folder: Path, ranks: Sequence[int]) -> int:
    """Compare these ranks' weights byte by byte, say what came of it, and return the exit code."""
    with np.load(weights_of(folder, ranks[0])) as first:
        expected = {name: first[name].tobytes() for name in first.files}
    for rank in ranks[1:]:
        with np.load(weights_of(folder, rank)) as other:
            found = {name: other[name].tobytes() for name in other.files}
        wrong = sorted(
            name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
        )
        if wrong:
            print(f"The weights of rank {rank} differ from those of rank {ranks[0]}: {', '.join(wrong)}")
            return 1
    size = sum(map(len, expected.values()))
    print(f"\nThe weights of all {len(ranks)} nodes are the same, byte for byte:")
    print(f"{len(expected)} tensors, {size} bytes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
