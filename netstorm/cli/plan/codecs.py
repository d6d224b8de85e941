"""Which codec `auto` would choose on a network, for a given time that a step computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from netstorm.cli.plan.compare import Comparison
from netstorm.compression.auto import NAMES, Candidates
from netstorm.topology.resources import latency_bound

__all__ = ["CodecPlan", "plan_codec"]


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """The times of a round under each codec."""

    compute_s: float
    """A step computes so long."""
    times: dict[str, float]
    """Seconds of a round, by codec, the one that changes gradients least first."""
    chosen: str


def plan_codec(comparison: Comparison, compute_s: float) -> CodecPlan:
    """Return the first codec whose rounds under the chosen scheme take no longer than a step computes, else
    the fastest.

    Args:
        comparison: of the schemes. Of the predicted time, what latency takes stays, once for each round of a
            codec, and the rest goes with the bytes. Of tensors only the bytes are known here: they count as
            square matrices.
        compute_s: seconds that a step computes between two rounds.
    """
    predicted = comparison.outcomes[comparison.chosen].predicted_s
    fixed = min(predicted, latency_bound(comparison.network, 0))
    candidates = Candidates()
    shapes = [(max(1, math.isqrt(nbytes // 4)),) * 2 for nbytes in comparison.tensors]
    sizes = [max(1, nbytes) for nbytes in comparison.tensors]
    fractions = np.average([candidates.fractions(shape) for shape in shapes], axis=0, weights=sizes)
    rounds = [
        1 + max(len(candidates.of(shape)[place].parts(shape)) for shape in shapes)
        for place in range(len(NAMES))
    ]
    times = {
        name: fixed * count + (predicted - fixed) * float(fraction)
        for name, count, fraction in zip(NAMES, rounds, fractions, strict=True)
    }
    fitting = [name for name, seconds in times.items() if seconds <= compute_s]
    return CodecPlan(compute_s, times, fitting[0] if fitting else min(times, key=lambda name: times[name]))
