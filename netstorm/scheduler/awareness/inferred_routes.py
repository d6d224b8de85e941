"""Which pairs of nodes have no link of their own: infer it from latencies, where no network file says. Pure.

Where the path from i to j leads past k, its latency is the sum of those from i to k and from k to j, within
what the routers there take. Such pairs share lines with others and are no independent links: trees over
them get other rates than planned, and the next policy is formed for those. Nothing is lost by planning
without such a pair, since its traffic uses the same lines by way of k.

Latencies may also fit by chance. So routes are a hypothesis about the whole network, and decoys measure
chance: how many pairs would fit if the sum were somewhat more or less. Without clearly more pairs than that,
no pair is left out.

The ways there and back may lead past different nodes, and only their sum is measured. So once there are
routes, pairs that take longer than three other pairs in a row count as routes, too.

Source of all thresholds: docs/measurements/awareness.md, "Pairs whose ways lead past other nodes" (160
networks), and of what finding routes gains: "Without a network file: a backbone".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["InferredRoutes", "routed_pairs"]

_Matrix: TypeAlias = npt.NDArray[np.float64]

_PART: Final = 0.02
_LEAST_S: Final = 0.001
"""Tolerance of a sum of two latencies: the routers and lines of the middle node's own site take that."""

_HOP: Final = 3.0
"""Tolerances that each of the two latencies must have at least: nodes of one site are equally far from all
others, and none of them is on the path of another. This also keeps all nodes joined.
"""

_DECOYS: Final = (-8.0, -5.0, 5.0, 8.0)
"""Tolerances that are added to a sum to count pairs that fit by chance."""

_LEAST_PAIRS: Final = 6
_LEAST_SHARE: Final = 0.3
_OVER_CHANCE: Final = 2.0
"""Routes are believed if so many pairs fit, such a share of those that are far enough apart, and so many
times as many as by chance. Of 80 random meshes of nine nodes one had as many, and all of 40 backbones did.
"""

_KNOWN: Final = 0.75
"""Share of the pairs whose latencies must be known."""

_STAYS: Final = 2.0
"""Hysteresis: known routes stay within twice the tolerance, and while half as many pairs fit."""

_SAME_LATENCY: Final = 0.02
"""Latencies that differ by less are the same."""


class InferredRoutes:
    """The inferred routes of one network.

    Attributes:
        found: (source, target) pairs whose paths lead past other nodes.
        changed_at: when a latency last changed.
    """

    def __init__(self, size: int) -> None:
        """Begin with all pairs as links; `size`: the number of nodes."""
        self.found: frozenset[tuple[int, int]] = frozenset()
        self.changed_at = -np.inf
        self._size: Final = size
        self._latencies: Final[dict[tuple[int, int], float]] = {}
        self._is_new = False

    def record(self, pair: tuple[int, int], latency: float, now: float) -> None:
        """Record the one-way latency of a pair, in s."""
        before = self._latencies.get(pair, 0.0)
        if abs(latency - before) > _SAME_LATENCY * before:
            self._latencies[pair] = latency
            self._is_new, self.changed_at = True, now

    def update(self) -> bool:
        """Infer again if latencies are new; return whether the first routes were found."""
        if not self._is_new:
            return False
        self._is_new, before = False, self.found
        self.found = routed_pairs(self._latencies, self._size, before)
        return bool(self.found) and not before


def routed_pairs(
    latencies: Mapping[tuple[int, int], float], size: int, before: frozenset[tuple[int, int]] = frozenset()
) -> frozenset[tuple[int, int]]:
    """Return the (source, target) pairs whose paths lead past other nodes; O(N³).

    The other pairs join all nodes that `latencies` join.

    Args:
        latencies: known one-way latencies, in s.
        size: number of nodes, N.
        before: the routes that were found before.
    """
    known = {pair: seconds for pair, seconds in latencies.items() if seconds > 0.0}
    if len(known) < max(_LEAST_PAIRS, _KNOWN * size * (size - 1)):
        return before
    latency = _matrix(known, size, np.inf)
    allowed = _PART * latency + _LEAST_S
    wider = np.where(_matrix(dict.fromkeys(before, 1.0), size, 0.0) > 0.0, _STAYS * allowed, allowed)
    found = np.zeros((size, size), bool)
    decoys = np.zeros((len(_DECOYS), size, size), bool)
    with np.errstate(invalid="ignore"):  # of pairs that are not known
        for middle in range(size):
            there, on = latency[:, middle, None], latency[None, middle, :]
            hops = np.minimum(there, on) >= _HOP * allowed
            longer = there + on - latency
            found |= hops & (abs(longer) <= wider)
            for place, times in enumerate(_DECOYS):
                decoys[place] |= hops & (abs(longer - times * allowed) <= allowed)
    chance = float(decoys.sum()) / len(_DECOYS)
    far = int((latency >= 2 * _HOP * allowed)[np.isfinite(latency)].sum())
    least = max(_LEAST_PAIRS, _LEAST_SHARE * far, _OVER_CHANCE * chance)
    if found.sum() < (least / _STAYS if before else least):
        return frozenset()
    found |= _longer_than_three(np.where(found, np.inf, latency))
    return frozenset((int(source), int(target)) for source, target in np.argwhere(found))


def _longer_than_three(lines: _Matrix) -> npt.NDArray[np.bool_]:
    """Return (N, N) which of the remaining pairs take longer than three or four others of them in a row.

    Where the ways there and back lead past different nodes, half a round trip is no sum of two others, but
    longer than the shorter way. Each of the others is shorter, so these keep all nodes joined.
    """
    far = np.where(lines >= _HOP * _LEAST_S, lines, np.inf)
    three = _concatenated(_concatenated(far, far), far)
    return np.isfinite(lines) & (np.minimum(three, _concatenated(three, far)) < lines)


def _concatenated(one: _Matrix, other: _Matrix) -> _Matrix:
    """Return (N, N) the least latency of a pair of `one` followed by a pair of `other`."""
    least = np.full(one.shape, np.inf)
    for middle in range(len(one)):
        np.minimum(least, one[:, middle, None] + other[None, middle, :], out=least)
    return least


def _matrix(values: Mapping[tuple[int, int], float], size: int, other: float) -> _Matrix:
    """Return `values` as an (N, N) matrix by source and target; `other` where there is none."""
    matrix = np.full((size, size), other)
    for pair, value in values.items():
        matrix[pair] = value
    return matrix
