#!/usr/bin/env python3
"""Fits a line with JAX: a compiled step averages its gradients over all ranks. Needs `pip install jax`.

netstorm launch -n 3 -- python examples/jax_allreduce.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

import netstorm


def main() -> None:
    """Fit y = 3x - 1 to points of which each rank has its own."""
    with netstorm.Group() as group:

        def mean(gradients: Any) -> Any:
            return group.allreduce(gradients, "mean")

        def step(weights: dict[str, Any], x: Any, y: Any) -> tuple[dict[str, Any], Any]:
            def loss_of(weights: dict[str, Any]) -> Any:
                return jnp.mean((weights["slope"] * x + weights["offset"] - y) ** 2)

            loss, gradients = jax.value_and_grad(loss_of)(weights)
            # ordered: all ranks must make the same calls in the same order, and JAX may leave out or repeat
            # what a pure_callback does.
            gradients = io_callback(mean, gradients, gradients, ordered=True)
            return jax.tree.map(lambda value, change: value - 0.3 * change, weights, gradients), loss

        compiled = jax.jit(step)
        x = jax.random.uniform(jax.random.key(group.rank), (100,), minval=-1.0)
        y = 3 * x - 1
        weights = {"slope": jnp.zeros(()), "offset": jnp.zeros(())}
        for number in range(60):
            weights, loss = compiled(weights, x, y)
            if group.rank == 0 and number % 20 == 0:
                print(f"step {number}  loss {float(loss):.4f}", flush=True)
        jax.effects_barrier()  # the last call has been made before the group leaves the job
        slope, offset = float(weights["slope"]), float(weights["offset"])
        print(f"rank {group.rank}: y = {slope:.3f}x {offset:+.3f}", flush=True)


if __name__ == "__main__":
    main()
