"""Paths by number of hops, on bare adjacency."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Hops", "next_hops", "reached_from"]

Hops: TypeAlias = tuple[tuple[int, ...], ...]
"""By target, then by node: the next node on the way (-1: there is no way, or it is the target itself)."""


def reached_from(start: int, targets: Sequence[Sequence[int]]) -> set[int]:
    """Return `start` and all nodes with a path from it; `targets` gives each node's links."""
    reached = {start}
    frontier = [start]
    while frontier:
        for target in targets[frontier.pop()]:
            if target not in reached:
                reached.add(target)
                frontier.append(target)
    return reached


def next_hops(targets: Sequence[Sequence[int]]) -> Hops:
    """Return the next node on the way with the fewest hops, between all pairs; the lowest rank among equals.

    It depends on the target alone, as in IP routing: what joins a route stays on it. O(N·E).
    """
    sources: list[list[int]] = [[] for _ in targets]
    for source, ends in enumerate(targets):
        for target in ends:
            sources[target].append(source)
    return tuple(_towards(target, targets, sources) for target in range(len(targets)))


def _towards(
    target: int, targets: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    away = {target: 0}
    queue = deque([target])
    while queue:
        node = queue.popleft()
        for source in sources[node]:
            if source not in away:
                away[source] = away[node] + 1
                queue.append(source)
    nearer = (
        [end for end in ends if away.get(end, -1) == away.get(node, -1) - 1 >= 0]
        for node, ends in enumerate(targets)
    )
    return tuple(min(ends, default=-1) for ends in nearer)
