"""Which pairs of nodes talk by a way that leads past other nodes, where nobody says: by latencies. Pure.

Pairs whose ways share a line are no independent links, and to plan as if they were throws away more than
planning gains: each edge of a tree slows others, so whatever trees are formed, rates are other ones than
those that they were formed for, and the next policy is formed for these.

Latencies tell. Where the way from i to j leads past k, it takes as long as those from i to k and from k to j
together, to within what the routers there take. To plan without such a pair loses nothing then: what goes by
way of k uses the same lines, and can be added up there. But ways may be equally long by chance: in a mesh of
nine nodes whose latencies are drawn at random one pair in ten is. So it is a hypothesis about the network as
a whole, with chance measured by decoys: how many pairs would take as long as two others together if that were
a little more, or less, than it is. Routes cause many more than chance does; where there are not, no pair is
left out.

There and back ways may lead past different nodes, and only their sum is known. So if there are routes, pairs
that take longer than three others in a row are taken for such.

What a pair has carried may disprove it: no way carries more than a part of it. That says something once only
links have been used for a while: before, they shared their lines with such pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Routes", "routed_pairs"]

_Matrix: TypeAlias = npt.NDArray[np.float64]

_PART: Final = 0.02
_LEAST_S: Final = 0.001
"""By how much a way past a node may differ from the two ways there and on: the routers and lines of the
node's own site take that, and measuring is no more exact."""

_HOP: Final = 3.0
"""Either of the two must be so many times as long as that: nodes of one site are equally far from all others,
and none of them is on the way of another. It also keeps all nodes joined: a way consists of shorter ones."""

_DECOYS: Final = (-8.0, -5.0, 5.0, 8.0)
"""Ways that are longer than two others by so many times what is allowed are no ways past anybody."""

_LEAST_PAIRS: Final = 6
_LEAST_SHARE: Final = 0.3
_OVER_CHANCE: Final = 2.0
"""So many pairs, such a share of those that are far enough apart, and so many times what chance brings, must
lead past other nodes. Of 80 meshes of nine nodes, drawn at random, one had more; of 40 networks of 14 lines
all had, .61 and more."""

_KNOWN: Final = 0.75
"""Share of the pairs whose latencies must be known."""

_STAYS: Final = 2.0
"""What was found holds while it is true within so many times what is allowed, and of half as many pairs: or
it would come and go with every reading."""

_CLEARLY: Final = 1.25
"""As many times as a link carries a pair must have carried not to lead over it."""

_OTHER: Final = 0.02
"""A latency that has changed by less is the same."""

_AGAIN_S: Final = 5.0
_MANY: Final = 32
"""How often it is looked at whether rates disprove it; with more nodes than that less often, as a look takes
longer.
"""

_SETTLED_S: Final = 10.0
"""How long links are used before that: rates of their first seconds say little."""


class Routes:
    """What is thought of one network.

    Attributes:
        found: (source, target) whose ways lead past other nodes.
        news_at: when a latency last was another one than before.
    """

    def __init__(self, size: int) -> None:
        """Think of all pairs as links; `size`: the number of nodes."""
        self.found: frozenset[tuple[int, int]] = frozenset()
        self.news_at = -np.inf
        self._size: Final = size
        self._every_s: Final = _AGAIN_S * max(1.0, size / _MANY) ** 3
        self._took: Final[dict[tuple[int, int], float]] = {}
        self._news = False
        self._looked_at = self._found_at = -np.inf
        self._most: Final[dict[tuple[int, int], float]] = {}
        """Bit/s that links have carried at most since ways were found."""

    def take(self, pair: tuple[int, int], latency: float, now: float) -> None:
        """Take the latency of a pair, in s one way."""
        before = self._took.get(pair, 0.0)
        if abs(latency - before) > _OTHER * before:
            self._took[pair] = latency
            self._news, self.news_at = True, now

    def look(self, rates: Iterable[tuple[tuple[int, int], float]], now: float) -> bool:
        """Think again, if there is something new; return whether ways have been found that were not known of.

        Args:
            rates: bit/s of each pair, as far as they are measured.
            now: the time.
        """
        if not self._news and (not self.found or now < self._looked_at + self._every_s):
            return False
        self._news, self._looked_at = False, now
        carried, before = dict(rates), self.found
        for pair, rate in carried.items():
            if pair not in before:
                self._most[pair] = max(rate, self._most.get(pair, 0.0))
        settled = before and now >= self._found_at + _SETTLED_S
        most = self._most if settled else {}
        self.found = routed_pairs(self._took, self._size, before, carried=carried, most=most)
        if before or not self.found:
            return False
        self._found_at = now
        self._most.clear()
        return True


def routed_pairs(
    latencies: Mapping[tuple[int, int], float],
    size: int,
    before: frozenset[tuple[int, int]] = frozenset(),
    *,
    carried: Mapping[tuple[int, int], float] | None = None,
    most: Mapping[tuple[int, int], float] | None = None,
) -> frozenset[tuple[int, int]]:
    """Return the (source, target) whose ways lead past other nodes; O(N³).

    The others join all nodes that `latencies` join.

    Args:
        latencies: seconds one way, as far as they are known.
        size: number of nodes, N.
        before: what was found before.
        carried: bit/s of pairs when they were last used.
        most: bit/s that links carry at most, as far as that is known.
    """
    known = {pair: latency for pair, latency in latencies.items() if latency > 0.0}
    if len(known) < max(_LEAST_PAIRS, _KNOWN * size * (size - 1)):
        return before
    took = _matrix(known, size, np.inf)
    allowed = _PART * took + _LEAST_S
    wider = np.where(_matrix(dict.fromkeys(before, 1.0), size, 0.0) > 0.0, _STAYS * allowed, allowed)
    shown, carries = _matrix(carried or {}, size, 0.0), _CLEARLY * _matrix(most or {}, size, np.inf)
    found = np.zeros((size, size), bool)
    decoys = np.zeros((len(_DECOYS), size, size), bool)
    with np.errstate(invalid="ignore"):  # of pairs that are not known
        for middle in range(size):
            there, on = took[:, middle, None], took[None, middle, :]
            hops = np.minimum(there, on) >= _HOP * allowed
            longer = there + on - took
            possible = shown <= np.minimum(carries[:, middle, None], carries[None, middle, :])
            found |= hops & possible & (abs(longer) <= wider)
            for place, times in enumerate(_DECOYS):
                decoys[place] |= hops & (abs(longer - times * allowed) <= allowed)
    chance = float(decoys.sum()) / len(_DECOYS)
    far = int((took >= 2 * _HOP * allowed)[np.isfinite(took)].sum())
    least = max(_LEAST_PAIRS, _LEAST_SHARE * far, _OVER_CHANCE * chance)
    if found.sum() < (least / _STAYS if before else least):
        return frozenset()
    found |= _longer_than_others(np.where(found, np.inf, took))
    return frozenset((int(source), int(target)) for source, target in np.argwhere(found))


def _longer_than_others(lines: _Matrix) -> npt.NDArray[np.bool_]:
    """Return which (N, N) of the pairs that are left take longer than three or four others of them in a row.

    Where the ways there and back lead past different nodes a round trip is no sum of two others. It is longer
    than twice the shorter way. Each of the others is shorter, so these keep all nodes joined.
    """
    far = np.where(lines >= _HOP * _LEAST_S, lines, np.inf)
    three = _in_a_row(_in_a_row(far, far), far)
    return np.isfinite(lines) & (np.minimum(three, _in_a_row(three, far)) < lines)


def _in_a_row(one: _Matrix, other: _Matrix) -> _Matrix:
    """Return (N, N) the least seconds of a way of `one` and then one of `other`."""
    least = np.full(one.shape, np.inf)
    for middle in range(len(one)):
        np.minimum(least, one[:, middle, None] + other[None, middle, :], out=least)
    return least


def _matrix(values: Mapping[tuple[int, int], float], size: int, other: float) -> _Matrix:
    """Return (N, N) the values by source and target."""
    matrix = np.full((size, size), other)
    for pair, value in values.items():
        matrix[pair] = value
    return matrix
