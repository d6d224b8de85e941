"""Shares as integer weights, and weights as an even sequence: exact, and so the same on every node."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from netstorm.errors import UsageError

__all__ = ["PARTS", "interleave", "quantise", "staggered"]

PARTS: Final = 1000
"""Shares are rounded to thousandths: far below the error of a link's rate."""

_PARTS_EACH: Final = 40
"""Average weight of a tree if there are many, since a thousandth is then no small part of a share. With 10,
rounding costs 2 % of the rate of 114 trees.
"""


def quantise(shares: Sequence[float]) -> tuple[int, ...]:
    """Return whole weights in proportion to positive `shares`: at least 1 each, 1000 in all.

    With more than 25 shares, 40 times their number in all. Largest remainders; of equals the larger share,
    then the first.

    Raises:
        UsageError: no shares, or one that is not positive and finite.
    """
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise UsageError(f"shares {list(shares)}: expected at least one, all positive and finite")
    spare = max(PARTS, _PARTS_EACH * len(shares)) - len(shares)  # what is left when each has its one part
    largest = max(shares)
    relative = [share / largest for share in shares]  # so that no sum overflows
    total = sum(relative)
    exact = [max(0.0, share / total * (spare + len(shares)) - 1) for share in relative]
    scale = spare / sum(exact)
    exact = [value * scale for value in exact]
    weights = [int(value) for value in exact]
    # To 9 digits, or noise in the last one would give a smaller share more than a larger one.
    by_remainder = sorted(range(len(shares)), key=lambda i: (round(weights[i] - exact[i], 9), -shares[i], i))
    for i in by_remainder[: spare - sum(weights)]:
        weights[i] += 1
    return tuple(weight + 1 for weight in weights)


def interleave(weights: Sequence[int]) -> tuple[int, ...]:
    """Return one period (of sum(weights) slots) of an even sequence in which index i occurs weights[i] times.

    After any number of slots from its start, the count of each index is within 1 of its exact share, and so
    within 2 in any window. Earliest deadline first among those that are not ahead of their share: the quota
    method [1]_, a smooth weighted round robin with a bound that the usual greedy rule does not keep.
    O(period · log n).

    References:
        .. [1] Balinski and Young, The quota method of apportionment, Amer. Math. Monthly 82 (1975).
    """
    period = sum(weights)
    due: list[list[int]] = [[] for _ in range(period + 1)]
    due[0] = list(range(len(weights)))
    counts = [0] * len(weights)
    ready: list[tuple[float, int]] = []
    sequence = []
    for slot in range(period):
        for i in due[slot]:
            # Quotients of whole numbers below 2**26, correctly rounded, are ordered as the exact ratios are.
            heapq.heappush(ready, ((counts[i] + 1) / weights[i], i))
        _, i = heapq.heappop(ready)
        sequence.append(i)
        counts[i] += 1
        due[max(slot + 1, counts[i] * period // weights[i])].append(i)
    return tuple(sequence)


def staggered(weights: Sequence[int], leads: Sequence[int]) -> tuple[int, ...]:
    """Return one period in which index i occurs weights[i] times, leads[i] slots earlier than evenly.

    Each of the weights[i] is due in the middle of its part of the period, less the lead; they come in the
    order in which they are due. So slow trees get none of the last chunks, for which all ranks wait.
    O(period · log period).
    """
    period = sum(weights)
    # Quotients of whole numbers below 2**53, correctly rounded: the same on every machine.
    due = sorted(
        (((2 * nth + 1) * period - 2 * weight * lead) / (2 * weight), i)
        for i, (weight, lead) in enumerate(zip(weights, leads, strict=True))
        for nth in range(weight)
    )
    return tuple(i for _, i in due)
