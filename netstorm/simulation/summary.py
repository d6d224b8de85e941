"""Summary statistics over many seeds: median and quartiles of times, and the distance from the optimum."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Summary", "quartiles", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times of one scheme over all its seeds, in s."""

    seeds: int
    median_s: float
    q1_s: float
    q3_s: float
    of_optimum: float | None
    """Mean of optimum / time, over the seeds with a known optimum; None if there are none."""

    def as_json(self) -> dict[str, int | float | None]:
        """Return the fields of the JSON output."""
        return asdict(self)


def summarise(times: Mapping[int, float], optima: Mapping[int, float]) -> Summary:
    """Return the summary of a scheme's times, by seed; there must be one. Optima in s, by seed."""
    q1, median, q3 = quartiles(list(times.values()))
    shares = [optima[seed] / time for seed, time in times.items() if seed in optima]
    return Summary(
        seeds=len(times),
        median_s=median,
        q1_s=q1,
        q3_s=q3,
        of_optimum=statistics.fmean(shares) if shares else None,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile, interpolated between values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3
