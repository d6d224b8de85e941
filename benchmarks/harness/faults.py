"""Faults that a seed draws in advance, and which of them the lost time of a job is owed to. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "LostTime", "PlannedFault", "Span", "longest_gaps", "lost_time", "plan_faults", "union_s"]

KINDS: Final = {"kill": 4, "stop": 2, "cut": 3, "scheduler": 1}
"""Kinds of fault, and how often each is drawn."""

_STOP_S: Final = (0.1, 4.0)
_AWAY_S: Final = (0.0, 1.0)
"""Until what was killed is started again."""
_SPREAD: Final = (0.4, 1.6)
"""Of the time between two faults, around its mean."""
_GAP: Final = 3.0
"""Usual times of a step from which on a step counts as held up; a shorter one is only slow."""

SLOW: Final = "(slower steps)"
NOTHING: Final = "(nothing known)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault, whichever system it meets."""

    at: float
    """In s from the beginning."""
    kind: str
    who: float
    """From 0 to below 1: which of the ranks that could be hit."""
    lasts_s: float
    """How long a process is stopped, or until what was killed is started again."""


def plan_faults(seed: int, kinds: Iterable[str], every_s: float, duration_s: float) -> list[PlannedFault]:
    """Draw the faults of a run; the same arguments draw the same."""
    chance = random.Random(seed)
    weights = {kind: KINDS[kind] for kind in kinds}
    faults = []
    at = 0.0
    while at < duration_s:
        [kind] = chance.choices(list(weights), list(weights.values()))
        who, how_long = chance.random(), chance.random()
        least, most = _STOP_S if kind == "stop" else _AWAY_S
        faults.append(PlannedFault(at=at, kind=kind, who=who, lasts_s=least + how_long * (most - least)))
        at += every_s * chance.uniform(*_SPREAD)
    return faults


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which something may hold all ranks up."""

    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTime:
    """Where a job's time went.

    Attributes:
        lost_s: all that it lost: the time without the steps that it made, as long as they usually take.
        by: the same in parts, by all that was the matter at the time, joined by "+".
        held_s: how long some rank was stopped.
    """

    lost_s: float
    by: dict[str, float]
    held_s: float


def lost_time(
    completed: Sequence[float], begin: float, end: float, usual_s: float, spans: Sequence[Span]
) -> LostTime:
    """Say what the time between `begin` and `end` was lost to.

    A step that took more than three times as long as usual was held up, and what exceeds the usual time is
    shared out, second by second, over what was the matter. While a rank is stopped that alone counts: no sum
    of all ranks can go on without it.

    Args:
        completed: when steps were completed, in order.
        begin: of the time in question.
        end: of the time in question.
        usual_s: how long a step takes when nothing is the matter.
        spans: when something was the matter; those named "stop" are stopped ranks.
    """
    inside = [at for at in completed if begin < at < end]
    by: dict[str, float] = {}

    def add(what: str, seconds: float) -> None:
        by[what] = by.get(what, 0.0) + seconds

    for start, stop in itertools.pairwise([begin, *inside, end]):
        excess = stop - start - (usual_s if stop != end else 0.0)
        if stop - start <= _GAP * usual_s:
            add(SLOW, excess)
            continue
        for what, seconds in _shares(start, stop, spans).items():
            add(what, seconds * excess / (stop - start))
    lost = end - begin - len(inside) * usual_s
    held = union_s([span for span in spans if span.what == "stop"], begin, end)
    return LostTime(lost_s=lost, by=dict(sorted(by.items(), key=lambda item: -item[1])), held_s=held)


def union_s(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return for how long of a time some of these spans lasted."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, min(span.end, end) - max(span.begin, reached))
        reached = max(reached, min(span.end, end))
    return total


def longest_gaps(
    completed: Sequence[float], begin: float, end: float, spans: Sequence[Span], most: int
) -> list[dict[str, object]]:
    """Return the longest times without a step, and what was the matter meanwhile; times in s from `begin`."""
    inside = [begin, *(at for at in completed if begin < at < end), end]
    gaps = sorted(itertools.pairwise(inside), key=lambda gap: gap[0] - gap[1])[:most]
    return [
        {
            "at_s": round(start - begin, 2),
            "seconds": round(stop - start, 2),
            "meanwhile": [
                [span.what, round(span.begin - begin, 2), round(span.end - begin, 2)]
                for span in spans
                if span.begin < stop and span.end > start
            ],
        }
        for start, stop in sorted(gaps)
    ]


def _shares(start: float, stop: float, spans: Sequence[Span]) -> dict[str, float]:
    """Return how much of a time each combination of spans has."""
    near = [span for span in spans if span.begin < stop and span.end > start]
    edges = {start, stop, *(edge for span in near for edge in (span.begin, span.end) if start < edge < stop)}
    shares: dict[str, float] = {}
    for begin, end in itertools.pairwise(sorted(edges)):
        names = {span.what for span in near if span.begin < end and span.end > begin}
        what = "stop" if "stop" in names else "+".join(sorted(names)) or NOTHING
        shares[what] = shares.get(what, 0.0) + end - begin
    return shares
