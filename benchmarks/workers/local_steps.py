"""One rank of `studies/local_steps.py`: trains on digits, with steps that take at least a given time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import netstorm.frontends.mxnet  # noqa: F401 - registers dist_sync_netstorm
from digits.data import load
from digits.shards import Batch, Shard, in_order
from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import ESync, LocalSGD

_WIDTH = 64
_DATA = load("digits", None)


def _store(system: str) -> Any:
    kind, _, number = system.partition(":")
    if kind == "esync":
        return ESync(least_steps=int(number or 1))
    return LocalSGD(int(number)) if kind == "local_sgd" else mx.kv.create("dist_sync_netstorm")


class _Training:
    """A net, its trainer and this rank's samples."""

    def __init__(self, command: Answer) -> None:
        self.store = _store(command["system"])
        self.batch_size, self.seed = command["batch_size"], command["seed"]
        mx.random.seed(self.seed)
        nn = mx.gluon.nn
        self.net: Any = nn.HybridSequential()
        self.net.add(nn.Dense(_WIDTH, activation="relu"), nn.Dense(_WIDTH, activation="relu"), nn.Dense(10))
        self.net.initialize(mx.init.Xavier())
        self.net(_pixels(_DATA.test.images[:1]))
        self.trainer = mx.gluon.Trainer(
            self.net.collect_params(),
            "sgd",
            {"learning_rate": command["learning_rate"], "momentum": 0.9},
            kvstore=self.store,
        )
        # Gradients of the synchronous store are sums over all ranks; elsewhere they are this rank's own.
        self.divisor = self.batch_size * (1 if hasattr(self.store, "averages") else self.store.num_workers)
        self.loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.batches = self._batches()

    def _batches(self) -> Iterator[Batch]:
        shard = Shard(
            _DATA.train,
            rank=self.store.rank,
            ranks=self.store.num_workers,
            batch_size=self.batch_size,
            seed=self.seed,
        )
        epoch = 0
        while True:
            yield from shard.batches(epoch)
            epoch += 1

    def step(self) -> int:
        """Take a step, and return how many exchanges there have been with it."""
        images, labels = next(self.batches)
        with mx.autograd.record():
            loss = self.loss_of(self.net(_pixels(images)), mx.nd.array(labels))
        loss.backward()
        loss.wait_to_read()
        for parameter in self.net.collect_params().values():
            parameter.grad().wait_to_read()
        self._compute_longer()
        self.trainer.step(self.divisor)
        return int(getattr(self.store, "averages", self._steps))

    def run(self, exchanges: int, step_s: float) -> Answer:
        """Train until there have been so many exchanges, with steps of at least `step_s`."""
        self._steps, self._step_s = 0, step_s
        self.store._barrier()  # noqa: SLF001 - MXNet has no other
        began = self._step_began = time.monotonic()
        snapshots, done = [], 0
        while done < exchanges:
            self._steps += 1
            now_done = self.step()
            if now_done > done:
                done = now_done
                values = [parameter.data().asnumpy() for parameter in self.net.collect_params().values()]
                snapshots.append((time.monotonic() - began, self._steps, values))
                self._step_began = time.monotonic()
        seconds = time.monotonic() - began
        told = snapshots if self.store.rank == 0 else snapshots[-1:]
        return {
            "seconds": seconds,
            "steps": self._steps,
            "snapshots": [(at, steps, _accuracy(values)) for at, steps, values in _some(told)],
        }

    def _compute_longer(self) -> None:
        """Stand in for a larger model: a step takes its time, whatever the machine."""
        left = self._step_began + self._step_s - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._step_began = time.monotonic()


def _accuracy(values: list[np.ndarray[Any, Any]]) -> float:
    """Return the share of test samples that a net with these weights and biases gets right."""
    right = 0
    for images, labels in in_order(_DATA.test, 64):
        found = images.reshape(len(images), -1) / _DATA.white
        for weight, bias in zip(values[::2], values[1::2], strict=True):
            found = np.maximum(found, 0) @ weight.T + bias  # pixels are not negative
        right += int((found.argmax(axis=1) == labels).sum())
    return right / len(_DATA.test)


def _some(snapshots: list[Any]) -> list[Any]:
    """Return at most about 120 of them, with the last."""
    every = max(1, len(snapshots) // 120)
    return [*snapshots[:-1:every], snapshots[-1]]


def _pixels(images: Any) -> Any:
    return mx.nd.array(images.reshape(len(images), -1) / _DATA.white)


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job."""
    rank = mx.kv.create("dist_sync_netstorm").rank

    def train(command: Answer) -> Answer:
        slow = rank == command["slow_rank"]
        return _Training(command).run(
            command["exchanges"], command["step_s"] * (command["slow"] if slow else 1)
        )

    return {"rank": rank}, train


if __name__ == "__main__":
    serve(join)
