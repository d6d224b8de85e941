"""DCASGD on owners, on three ranks with real MXNet: corrected by what each rank itself has pulled."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, on_nodes

STORE = "dist_async_netstorm"

SHAPE = (41, 301)
"""Several blocks, of several owners."""

RATE, LAMDA = 0.25, 0.5

PLAN = ("0>", "1>", "1<", "0>", "2>", "0<", "1>", "2>", "2<", "2>", "0>", "1<", "1>")
"""Ranks that push (>) and pull (<), one after the other."""


def pulled(kv: Any, key: Any) -> Any:
    out = mx.nd.zeros(SHAPE)
    kv.pull(key, out=out)
    return out.asnumpy()


def push(kv: Any, rank: int, step: int) -> None:
    kv.push("w", mx.nd.array(gradient(rank, step)))


def gradient(rank: int, step: int) -> Any:
    return np.random.RandomState(100 * rank + step).uniform(-2, 2, SHAPE).astype(np.float32)


class Reference:
    """Algorithm 2 of the paper, with a momentum."""

    def __init__(self, value: Any, momentum: float = 0.0, decay: float = 0.0) -> None:
        self.value = value.astype(np.float64)
        self.backups = [self.value.copy() for _ in range(NODES)]
        self._momentum, self._decay = momentum, decay
        self._velocity = np.zeros(SHAPE)

    def push(self, rank: int, step: int) -> None:
        found = gradient(rank, step).astype(np.float64)
        found += LAMDA * found * found * (self.value - self.backups[rank]) + self._decay * self.value
        self._velocity = self._momentum * self._velocity - RATE * found
        self.value = self.value + self._velocity

    def pull(self, rank: int) -> None:
        self.backups[rank] = self.value.copy()


def in_turn(kv: Any, rank: int, what: Any) -> None:
    """Have one rank do something, while the others wait."""
    if kv.rank == rank:
        what()
        mx.nd.waitall()
    kv._barrier()


def check(kv: Any, **options: float) -> None:
    kv.set_optimizer(
        mx.optimizer.DCASGD(
            learning_rate=RATE,
            lamda=LAMDA,
            momentum=options.get("momentum", 0.0),
            wd=options.get("decay", 0.0),
        )
    )
    start = np.random.RandomState(1).uniform(-1, 1, SHAPE).astype(np.float32)
    kv.init("w", mx.nd.array(start))
    reference = Reference(start, **options)
    for step, turn in enumerate(
        ["0>", "1>", "1<", "0>", "2>", "0<", "1>", "2>", "2<", "2>", "0>", "1<", "1>"]
    ):
        rank = int(turn[0])
        if turn[1] == ">":
            in_turn(kv, rank, partial(push, kv, rank, step))
            reference.push(rank, step)
        else:
            in_turn(kv, rank, partial(pulled, kv, "w"))
            reference.pull(rank)
    np.testing.assert_allclose(pulled(kv, "w"), reference.value, rtol=2e-5, atol=2e-5)
    kv._barrier()


@on_nodes
def test_a_gradient_is_corrected_by_what_its_own_rank_has_pulled(kv: Any) -> None:
    check(kv)


@on_nodes
def test_a_momentum_and_weight_decay_are_over_corrected_gradients(kv: Any) -> None:
    check(kv, momentum=0.5, decay=0.01)


@on_nodes
def test_a_rank_that_trains_alone_is_not_corrected(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.DCASGD(learning_rate=RATE, lamda=1000.0))
    kv.init("w", mx.nd.zeros(SHAPE))
    expected = np.zeros(SHAPE)
    for step in range(4):
        expected -= RATE * gradient(0, step)
        if kv.rank == 0:
            kv.push("w", mx.nd.array(gradient(0, step)))
            np.testing.assert_allclose(pulled(kv, "w"), expected, rtol=1e-5, atol=1e-6)
    kv._barrier()


@on_nodes
def test_states_can_be_saved_and_loaded(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.DCASGD(learning_rate=RATE, lamda=LAMDA, momentum=0.5))
    kv.init("w", mx.nd.ones(SHAPE))
    kv.push("w", mx.nd.ones(SHAPE))
    pulled(kv, "w")
    kv._barrier()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "states")
        kv.save_optimizer_states(file)
        kv._barrier()
        kv.load_optimizer_states(file)
    before = pulled(kv, "w")
    kv._barrier()
    if kv.rank == 0:
        kv.push("w", mx.nd.zeros(SHAPE))
        momentum = pulled(kv, "w") - before
        assert (momentum < -0.1).all()
    kv._barrier()


def test_mxnets_own_class_fails_with_a_momentum_which_is_why_owners_do_not_call_it() -> None:
    optimizer = mx.optimizer.DCASGD(learning_rate=RATE, momentum=0.5)
    weight = mx.nd.ones((3,))
    with pytest.raises(ValueError, match="ambiguous"):
        optimizer.update("w", weight, mx.nd.ones((3,)), optimizer.create_state("w", weight))
