"""SGD with a momentum and delay compensation, on one block of values. Pure.

Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017, equation
10 and algorithm 2. A momentum is over corrected gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError

__all__ = ["Floats", "UpdateRule"]

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """What happens to a block when a gradient comes; the learning rate comes with each gradient.

    Raises:
        UsageError: a value that is not allowed.
    """

    momentum: float = 0.0
    lamda: float = 0.0
    """Weight of the correction; 0: none."""
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and self.lamda >= 0 and self.weight_decay >= 0):
            raise UsageError(
                f"momentum={self.momentum}, lamda={self.lamda}, weight_decay={self.weight_decay}: expected a "
                "momentum from 0 to below 1, and the others not negative"
            )

    @property
    def fingerprint(self) -> str:
        """Names the rule: all ranks must have the same."""
        return f"DCASGD momentum={self.momentum!r} lamda={self.lamda!r} weight_decay={self.weight_decay!r}"

    def update(
        self, weight: Floats, velocity: Floats | None, gradient: Floats, *, base: Floats, rate: float
    ) -> None:
        """Update a block in place.

        Args:
            weight: the block.
            velocity: of the same size, zeros at first; None without a momentum.
            gradient: of one rank.
            base: the weight that it was computed on.
            rate: the learning rate of that rank.
        """
        found = gradient + self.weight_decay * weight
        if self.lamda:
            found += self.lamda * gradient * gradient * (weight - base)
        if velocity is None:
            weight -= rate * found
        else:
            velocity *= self.momentum
            velocity -= rate * found
            weight += velocity
