"""Ranks that push one round after the other, while something fails."""

from __future__ import annotations

import numpy as np


def endless_rounds(cluster, size=200):
    """Let every rank push the next round of "w" as soon as it has the last one; return what all wait for."""
    pending = []

    def push(node):
        if not node.alive or node.failure is not None:
            return
        one = node.push("w", np.full(size, node.rank, np.float32))
        pending.append((node, one))

        one.then(lambda: one.error is None and push(node))

    for node in cluster.nodes:
        push(node)
    return pending


def some_rounds(cluster, rounds):
    """Let every rank do `rounds` rounds of "w", one after the other, and finish; return what all wait for."""
    pending = []

    def go_on(node, left):
        one = node.push("w", np.full(100, node.rank, np.float32)) if left else node.finish()
        pending.append(one)
        if left:
            one.then(lambda: one.error is None and go_on(node, left - 1))

    for node in cluster.nodes:
        go_on(node, rounds)
    return pending
