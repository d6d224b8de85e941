"""Outer optimizers: what becomes of values that all ranks have when they have averaged what they learnt.

DiLoCo (arXiv 2311.08105) takes an *outer gradient*, the last global value minus the average of the ranks'
own values, for a gradient of the global value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError

__all__ = ["OuterSGD", "merge"]

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """SGD on NumPy's arrays, as `torch.optim.SGD` has it. The defaults are those of DiLoCo's paper.

    Raises:
        UsageError: a value that is not allowed.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1) or (self.nesterov and not self.momentum):
            raise UsageError(
                f"{self}: expected an lr above 0 and a momentum from 0 to below 1, with nesterov above 0"
            )

    def step(self, values: Floats, gradient: Floats, velocity: Floats | None) -> None:
        """Take a step in place.

        Args:
            values: that all ranks have.
            gradient: outer; not changed.
            velocity: zeros at first; None without a momentum.
        """
        if velocity is None:
            values -= self.lr * gradient
            return
        velocity *= self.momentum
        velocity += gradient
        values -= self.lr * (gradient + self.momentum * velocity if self.nesterov else velocity)


def merge(values: Floats, shared: Floats, alpha: float) -> None:
    """Make a rank's own values (1 - alpha) of those that all have, and alpha of its own, in place."""
    if alpha:
        values *= alpha
        values += (1 - alpha) * shared
    else:
        values[:] = shared
