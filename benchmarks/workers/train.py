"""One rank of `train.py`: trains an epoch on command, and tells how long it took and how good the net is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import netstorm.frontends.mxnet  # noqa: F401 - registers dist_sync_netstorm
from digits.data import load
from digits.shards import Shard, in_order
from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx

_SEED = 1


class Training:
    """A net, its trainer and this rank's samples."""

    def __init__(self, store: str, *, width: int, batch_size: int) -> None:
        self.store: Any = mx.kv.create(store)
        self.data = load("digits", None)
        self.ranks = self.store.num_workers
        self.batch_size = batch_size
        self.shard = Shard(
            self.data.train, rank=self.store.rank, ranks=self.ranks, batch_size=batch_size, seed=_SEED
        )
        mx.random.seed(_SEED)
        nn = mx.gluon.nn
        self.net: Any = nn.HybridSequential()
        self.net.add(nn.Dense(width, activation="relu"), nn.Dense(width, activation="relu"), nn.Dense(10))
        self.net.initialize(mx.init.Xavier())
        self.net(self._pixels(self.data.test.images[:1]))
        self.trainer = mx.gluon.Trainer(
            self.net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=self.store
        )
        self.loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def train(self, epoch: int) -> Answer:
        """Train one epoch; the accuracy is of the test samples, after it and outside of its time."""
        start, losses, samples = time.monotonic(), [], 0
        for images, labels in self.shard.batches(epoch):
            with mx.autograd.record():
                loss = self.loss_of(self.net(self._pixels(images)), mx.nd.array(labels))
            loss.backward()
            self.trainer.step(self.batch_size * self.ranks)
            losses.append(loss.mean())
            samples += len(labels)
        mx.nd.waitall()
        finish = time.monotonic()
        mean = sum(loss.asscalar() for loss in losses) / len(losses)
        return {
            "start": start,
            "finish": finish,
            "samples": samples,
            "loss": float(mean),
            "accuracy": self._accuracy(),
        }

    def _accuracy(self) -> float:
        right = total = 0
        for images, labels in in_order(self.data.test, 64):
            chosen = self.net(self._pixels(images)).argmax(axis=1).asnumpy()
            right += int((chosen == labels).sum())
            total += len(labels)
        return right / total

    def _pixels(self, images: Any) -> Any:
        return mx.nd.array(images.reshape(len(images), -1) / self.data.white)


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job with the net that the command line describes."""
    store, width, batch_size = sys.argv[1:]
    training = Training(store, width=int(width), batch_size=int(batch_size))
    return {"rank": training.store.rank}, lambda command: training.train(command["epoch"])


if __name__ == "__main__":
    serve(join)
