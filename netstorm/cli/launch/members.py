"""The processes of a job, and how they are called in messages."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Final, NewType

__all__ = ["SCHEDULER", "Member", "in_words", "outcome"]

Member = NewType("Member", int)
"""A node's rank, or `SCHEDULER`."""

SCHEDULER: Final = Member(-1)


def in_words(members: Iterable[Member]) -> str:
    """Return such as "ranks 0-3, 5 and the scheduler"."""
    everybody = set(members)
    ranks = sorted(everybody - {SCHEDULER})
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        if len(run) < 3:
            texts += [str(rank) for rank in run]
        else:
            texts.append(f"{run[0]}-{run[-1]}")
    parts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"] if ranks else []
    return " and ".join(parts + ["the scheduler"] * (SCHEDULER in everybody))


def outcome(code: int) -> str:
    """Return an exit code in words. Above 128 it is taken for a signal's, as shells do it."""
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"
