"""One rank of `train.py`: trains an epoch on command, and tells how long it took and how good the net is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import netstorm.frontends.mxnet  # noqa: F401 - registers dist_sync_netstorm
from digits import models
from digits.data import load
from digits.shards import Batch, Shard, in_order
from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import LocalSGD

ALEXNET_PIXELS = 63
"""Of a side of AlexNet's images: the fewest that it takes."""


class Training:
    """A net, its trainer and this rank's samples."""

    def __init__(self, store: str, shape: dict[str, Any]) -> None:
        local, batch_size = shape["local_steps"], shape["batch_size"]
        self.store: Any = LocalSGD(local) if local else mx.kv.create(store)
        self.sent = getattr(self.store, "statistics", lambda: {"bytes_sent": 0.0})
        if shape["compression"] is not None:
            self.store.set_gradient_compression(shape["compression"])
        self.data = load("digits", None)
        ranks = self.store.num_workers
        self.shard = Shard(
            self.data.train, rank=self.store.rank, ranks=ranks, batch_size=batch_size, seed=shape["seed"]
        )
        self.batches = self._batches()
        self.model = shape["model"]
        self.input = models.InputShape(channels=3, size=ALEXNET_PIXELS)
        mx.random.seed(shape["seed"])
        self.net: Any = _net(self.model, shape["width"])
        self.net.initialize(mx.init.Xavier())
        self.net(self._pixels(self.data.test.images[:1]))
        for parameter in self.net.collect_params().values():
            # A forward pass leaves convolutions' weights in oneDNN's layout. MXNet's store does not wait
            # until its server has such values; another rank asks for them, and it ends ("init 3 first").
            parameter.set_data(mx.nd.array(parameter.data().asnumpy()))
        settings = {"learning_rate": shape["lr"]}
        if self.model != "alexnet":  # which has Adam, as the paper trains it
            settings["momentum"] = 0.9 if shape["momentum"] else 0.0
        self.trainer = mx.gluon.Trainer(
            self.net.collect_params(),
            "adam" if self.model == "alexnet" else "sgd",
            settings,
            kvstore=self.store,
        )
        self.divisor = batch_size * (1 if local else ranks)  # gradients are sums over all ranks, or one's own
        self.loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def train(self, steps: int | None) -> Answer:
        """Train so many steps, or once through the samples.

        The accuracy is rank 0's, of the test samples, and measured outside of the time.
        """
        before = self.sent()["bytes_sent"]
        start, losses, samples = time.monotonic(), [], 0
        for images, labels in islice(self.batches, steps or self.shard.steps):
            with mx.autograd.record():
                loss = self.loss_of(self.net(self._pixels(images)), mx.nd.array(labels))
            loss.backward()
            self.trainer.step(self.divisor)
            losses.append(loss.mean())
            samples += len(labels)
        mx.nd.waitall()
        finish = time.monotonic()
        mean = sum(loss.asscalar() for loss in losses) / len(losses)
        return {
            "start": start,
            "finish": finish,
            "steps": len(losses),
            "samples": samples,
            "bytes_sent": self.sent()["bytes_sent"] - before,
            "loss": float(mean),
            "accuracy": self._accuracy() if self.store.rank == 0 else None,
        }

    def _batches(self) -> Iterator[Batch]:
        for epoch in count():
            yield from self.shard.batches(epoch)

    def _accuracy(self) -> float:
        right = total = 0
        for images, labels in in_order(self.data.test, 64):
            chosen = self.net(self._pixels(images)).argmax(axis=1).asnumpy()
            right += int((chosen == labels).sum())
            total += len(labels)
        return right / total

    def _pixels(self, images: Any) -> Any:
        if self.model == "alexnet":
            return models.prepare(images, self.input, self.data.white)
        shaped = images.reshape(len(images), -1) if self.model == "mlp" else images
        return mx.nd.array(shaped / self.data.white)


def _net(model: str, width: int) -> Any:
    if model == "alexnet":
        return models.build("alexnet", classes=10)
    return _mlp(width) if model == "mlp" else cnn(width)


def _mlp(width: int) -> Any:
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Dense(width, activation="relu"), nn.Dense(width, activation="relu"), nn.Dense(10))
    return net


def cnn(width: int) -> Any:
    """Return the network of the examples, in which width is 64."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(width // 4, kernel_size=3, padding=1, activation="relu"),
        nn.MaxPool2D(),
        nn.Conv2D(width // 2, kernel_size=3, padding=1, activation="relu"),
        nn.MaxPool2D(),
        nn.Dense(width, activation="relu"),
        nn.Dense(10),
    )
    return net


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job with the net that the command line describes."""
    store, shape = sys.argv[1:]
    training = Training(store, json.loads(shape))
    return {"rank": training.store.rank}, lambda command: training.train(command["steps"])


if __name__ == "__main__":
    serve(join)
