"""A small task, and an oracle for it: N ranks in one process, in NumPy and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

IN, MIDDLE, OUT = 3, 4, 2
LEARNING_RATE = 0.05

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Values: TypeAlias = list[Array]
"""W1, b1, W2, b2 of two linear layers."""

FRAGMENTS = ([0, 1], [2, 3])
"""Which of the values belong to which fragment."""


def batch(rank: int, step: int) -> tuple[Array, Array]:
    """Return inputs and targets, different for each rank and step."""
    numbers = np.random.default_rng([rank, step])
    return numbers.normal(size=(5, IN)), numbers.normal(size=(5, OUT))


def inner_step(values: Values, rank: int, step: int) -> Values:
    """Return `values` after a step of SGD on the mean squared error."""
    w1, b1, w2, b2 = values
    inputs, targets = batch(rank, step)
    middle = inputs @ w1.T + b1
    slope = 2 * (middle @ w2.T + b2 - targets) / targets.size
    back = slope @ w2
    gradients = [back.T @ inputs, back.sum(axis=0), slope.T @ middle, slope.sum(axis=0)]
    return [value - LEARNING_RATE * gradient for value, gradient in zip(values, gradients, strict=True)]


@dataclass
class Outer:
    """SGD with momentum, as torch.optim.SGD writes it."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    velocity: dict[int, Array] = field(default_factory=dict)

    def step(self, number: int, value: Array, gradient: Array) -> Array:
        if self.momentum:
            last = self.velocity.get(number)
            self.velocity[number] = gradient if last is None else self.momentum * last + gradient
            gradient = (
                gradient + self.momentum * self.velocity[number] if self.nesterov else self.velocity[number]
            )
        return value - self.lr * gradient


def averaged(start: Sequence[Array], ranks: int, steps: int, sync_every: int) -> Values:
    """Return the parameters of ranks that average them every `sync_every` steps."""
    local = [list(start) for _ in range(ranks)]
    for step in range(1, steps + 1):
        local = [inner_step(values, rank, step) for rank, values in enumerate(local)]
        if step % sync_every == 0:
            local = [[np.mean(parts, axis=0) for parts in zip(*local, strict=True)] for _ in local]
    return local[0]


def simulate(
    start: Sequence[Array],
    *,
    ranks: int,
    steps: int,
    sync_every: int,
    applied_at: Sequence[int],
    outer: Outer,
    delay: int = 0,
    alpha: float = 0.0,
) -> tuple[list[Values], Values]:
    """Return all ranks' local parameters, and the global ones.

    `applied_at` says in which step of an interval (1 to `sync_every`) each fragment is applied.
    """
    local = [list(start) for _ in range(ranks)]
    shared = list(start)
    caught: dict[int, Array] = {}
    for step in range(1, steps + 1):
        local = [inner_step(values, rank, step) for rank, values in enumerate(local)]
        for members, place in zip(FRAGMENTS, applied_at, strict=True):
            for number in members:
                if (step + delay) % sync_every == place % sync_every:
                    caught[number] = np.mean([shared[number] - values[number] for values in local], axis=0)
                if step % sync_every == place % sync_every and number in caught:
                    shared[number] = outer.step(number, shared[number], caught.pop(number))
                    for values in local:
                        values[number] = (1 - alpha) * shared[number] + alpha * values[number]
    return local, shared
