"""The processes of a job, and their names in messages."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Final, NewType

__all__ = ["SCHEDULER", "Member", "in_words", "outcome"]

Member = NewType("Member", int)
"""A node's rank, or `SCHEDULER`."""

SCHEDULER: Final = Member(-1)


def in_words(members: Iterable[Member]) -> str:
    """Return the processes as text, such as "ranks 0-3, 5 and the scheduler"."""
    left = set(members)
    ranks = sorted(left - {SCHEDULER})
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
    return " and ".join(parts + ["the scheduler"] * (SCHEDULER in left))


def outcome(code: int) -> str:
    """Return an exit code as text. A code above 128 means a signal, as in shells."""
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"
