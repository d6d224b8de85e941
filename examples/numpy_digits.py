#!/usr/bin/env python3
"""Trains a network with NumPy alone, on one or many nodes, which may come and go if the job is elastic.

netstorm launch -n 3 -- python examples/numpy_digits.py
NETSTORM_ELASTIC=2:4 netstorm launch -n 3 --restarts 3 -- python examples/numpy_digits.py
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

import netstorm
from digits.data import Dataset, Samples, load
from digits.errors import ExampleError, usage_errors
from digits.options import positive_number, whole_number

Floats = NDArray[np.float32]
Weights = dict[str, Floats]


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Trains a network with NumPy alone on one or many nodes.")
    parser.add_argument("--steps", type=whole_number, default=300)
    parser.add_argument("--batch-size", type=whole_number, default=32, help="samples in a batch of one rank")
    parser.add_argument("--hidden", type=whole_number, default=64, help="units of the hidden layer")
    parser.add_argument("--lr", type=positive_number, default=0.5, help="learning rate")
    parser.add_argument("--seed", type=int, default=1, help="of initial weights and of the batches")
    options = parser.parse_args()
    with usage_errors():
        data = load("digits", None)
        try:
            group = netstorm.Group()
        except netstorm.UsageError as error:  # nobody has started a job
            raise ExampleError(str(error)) from None
    with group:
        train(group, data, options)


def train(group: netstorm.Group, data: Dataset, options: argparse.Namespace) -> None:
    """Train together with the other ranks, each on batches of its own."""
    inputs, labels = pixels(data.train, data.white), data.train.labels
    state: dict[str, Any] = {"step": 0, "weights": drawn(inputs.shape[1], options, data.classes)}
    while (state := group.share_state(state))["step"] < options.steps:
        chance = np.random.default_rng((options.seed, state["step"], group.rank))
        batch = chance.integers(0, len(labels), options.batch_size)
        loss, gradients = loss_and_gradients(state["weights"], inputs[batch], labels[batch])
        mean = group.allreduce({"loss": loss, **gradients}, "mean")
        weights = {
            name: value - np.float32(options.lr) * mean[name] for name, value in state["weights"].items()
        }
        state = {"step": state["step"] + 1, "weights": weights}
        if group.rank == 0 and state["step"] % 50 == 0:
            reached = accuracy(weights, data)
            print(f"step {state['step']}  loss {mean['loss']:.4f}  accuracy {reached:.4f}", flush=True)
    content = b"".join(state["weights"][name].tobytes() for name in sorted(state["weights"]))
    print(f"rank {group.rank}: weights sha256 {hashlib.sha256(content).hexdigest()}", flush=True)


def drawn(inputs: int, options: argparse.Namespace, classes: int) -> Weights:
    """Return initial weights: the same at all ranks, which draw them from the same seed."""
    chance = np.random.default_rng(options.seed)
    scale = np.sqrt(2 / inputs)
    return {
        "hidden": (scale * chance.standard_normal((inputs, options.hidden))).astype(np.float32),
        "hidden_bias": np.zeros(options.hidden, np.float32),
        "output": np.zeros((options.hidden, classes), np.float32),
        "output_bias": np.zeros(classes, np.float32),
    }


def pixels(samples: Samples, white: int) -> Floats:
    """Return the images as rows of numbers from 0 to 1."""
    return samples.images.reshape(len(samples), -1).astype(np.float32) / np.float32(white)


def forward(weights: Weights, inputs: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer's values, and the probabilities of the classes."""
    hidden: Floats = np.maximum(inputs @ weights["hidden"] + weights["hidden_bias"], 0)
    scores = hidden @ weights["output"] + weights["output_bias"]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def loss_and_gradients(
    weights: Weights, inputs: Floats, labels: NDArray[np.uint8]
) -> tuple[np.float32, Weights]:
    """Return the cross-entropy of a batch, and its gradient for each of the weights."""
    hidden, found = forward(weights, inputs)
    rows = np.arange(len(labels))
    loss = -np.log(found[rows, labels] + np.float32(1e-9)).mean()
    found[rows, labels] -= 1
    found /= len(labels)
    back = (found @ weights["output"].T) * (hidden > 0)
    return loss, {
        "hidden": inputs.T @ back,
        "hidden_bias": back.sum(axis=0),
        "output": hidden.T @ found,
        "output_bias": found.sum(axis=0),
    }


def accuracy(weights: Weights, data: Dataset) -> float:
    """Return the share of test samples that the network gets right."""
    _, found = forward(weights, pixels(data.test, data.white))
    return float((found.argmax(1) == data.test.labels).mean())


if __name__ == "__main__":
    main()
