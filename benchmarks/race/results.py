"""What a race has found: one row a system and size, kept as rounds come, as JSON, table and plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.arguments import megabytes
from harness.emulated import DROPPED
from harness.results import Row
from race.course import Course
from race.plot import IN_WORDS
from systems.base import Case
from systems.entrants import Entrant

__all__ = ["RaceResults", "RaceRow"]

_BEST = "mxnet-star-best"
_MEAN = "mxnet-star-mean"
_SHARDED = "mxnet-sharded"
_DDP = "torch-gloo"
_RATIOS = {
    _BEST: ("vs_star_best", "x best star"),
    _MEAN: ("vs_star_mean", "x mean star"),
    _SHARDED: ("vs_sharded", "x N servers"),
    _DDP: ("vs_torch_gloo", "x torch-gloo"),
}
"""By system, how the others are compared with it: name in the JSON, heading of the table."""


@dataclass(slots=True, kw_only=True)
class RaceRow:
    """One entrant at one size; its round is the mean of those of its parts."""

    entrant: Entrant
    case: Case
    optimum_s: float
    """The fluid optimum for links of the network file's rates."""
    bound_s: float
    """What no system takes less than on such links: with latencies and the headers of IP and TCP."""
    goodput: float
    """What of a rate is left for data below TCP's and IP's headers."""
    parts: dict[str, Row] = field(default_factory=dict)
    course: Course | None = None
    """Of a network that changes: rounds are then averaged over its course, and not compared one by one."""
    bounds: Course | None = None
    """The same with the bound of each moment in place of the optimum."""

    @property
    def rounds_s(self) -> list[float]:
        """Rounds that all parts have done, each the mean over the parts; with a course, every part's."""
        if self.course is not None:
            return [seconds for row in self.parts.values() for seconds in row.rounds_s]
        times = zip(*(row.rounds_s for row in self.parts.values()), strict=False)
        return [statistics.mean(together) for together in times]

    @property
    def median_s(self) -> float | None:
        """Median of the rounds, or None if there were none."""
        rounds = self.rounds_s
        return statistics.median(rounds) if rounds else None

    @property
    def mean_s(self) -> float | None:
        """Mean of the rounds, over the parts alike, or None if a part has none."""
        parts = [row.rounds_s for row in self.parts.values()]
        return statistics.mean(map(statistics.mean, parts)) if parts and all(parts) else None

    @property
    def typical_s(self) -> float | None:
        """What systems are compared by: the median; over a course the mean, which is one over the speed."""
        return self.median_s if self.course is None else self.mean_s

    @property
    def of_optimum(self) -> float | None:
        """What part it reaches of what the rates allow, at each moment of a course."""
        if self.course is not None:
            return self._of(self.course)
        return None if self.median_s is None else self.optimum_s / self.median_s

    @property
    def of_bound(self) -> float | None:
        """The bound over what a round takes, at each moment of a course; None: there are no rounds."""
        if self.bounds is not None:
            return self._of(self.bounds)
        return None if self.median_s is None else self.bound_s / self.median_s

    def _of(self, course: Course) -> float | None:
        """Return the rounds done over those of a course in the same time."""
        shares = [
            course.of_optimum(zip(row.starts_s, row.rounds_s, strict=True)) for row in self.parts.values()
        ]
        known = [share for share in shares if share]
        return statistics.harmonic_mean(known) if known and len(known) == len(shares) else None

    @property
    def error(self) -> str | None:
        """Why there is no time, or what went wrong."""
        errors = [row.error for row in self.parts.values() if row.error]
        return self.entrant.why_not or "; ".join(errors) or None

    def times_over(self, other: RaceRow | None) -> float | None:
        """Return how many times as fast as another one it is."""
        mine = self.typical_s
        theirs = None if other is None else other.typical_s
        return None if mine is None or theirs is None else theirs / mine

    def as_json(self, others: Mapping[str, RaceRow]) -> dict[str, Any]:
        """Return what is written; `others` are those of the same size, by name."""
        median, rounds, share = self.median_s, self.rounds_s, self.of_optimum
        parts = list(self.parts.values())
        links: dict[str, list[int]] = {}
        for row in parts:
            for carried in row.link_bytes:
                for link, count in carried.items():
                    links.setdefault(link, []).append(count)
        return {
            "system": self.entrant.name,
            "bytes": self.case.bytes,
            "tensors": len(self.case.sizes),
            "rounds_s": rounds,
            "median_s": median,
            "mean_s": self.mean_s,
            "fastest_s": min(rounds, default=None),
            "slowest_s": max(rounds, default=None),
            "of_optimum": share,
            "of_bound": self.of_bound,
            "of_goodput_optimum": None if share is None else share / self.goodput,
            "vs_star_best": self.times_over(others.get(_BEST)),
            "vs_star_mean": self.times_over(others.get(_MEAN)),
            "vs_sharded": self.times_over(others.get(_SHARDED)),
            "vs_torch_gloo": self.times_over(others.get(_DDP)),
            "parts": {
                name: {
                    "starts_s": row.starts_s,
                    "rounds_s": row.rounds_s,
                    "policies": [asdict(change) for change in row.policies],
                    "error": row.error,
                }
                for name, row in self.parts.items()
            },
            "bytes_per_link": {
                link: round(statistics.mean(counts))
                for link, counts in links.items()
                if not link.endswith(DROPPED)
            },
            "dropped_per_link": {
                link.removesuffix(DROPPED): round(statistics.mean(counts))
                for link, counts in links.items()
                if link.endswith(DROPPED)
            },
            "cpu_s": _mean([value for row in parts for value in row.cpu_s]),
            "machine_cpu_share": _mean([value for row in parts for value in row.machine_cpu_shares]),
            "peak_rss_bytes": max((row.peak_rss for row in parts if row.peak_rss is not None), default=None),
            "interleaved": parts[0].interleaved if parts else None,
            "settings": dict(parts[0].system.settings) if parts else {},
            "error": self.error,
        }


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


@dataclass(slots=True, kw_only=True)
class RaceResults:
    """All rows so far."""

    network: dict[str, Any]
    machine: dict[str, Any]
    options: dict[str, Any]
    rows: list[RaceRow] = field(default_factory=list)
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return what is written."""
        return {
            "network": self.network,
            "machine": self.machine,
            "options": self.options,
            "interrupted": self.interrupted,
            "results": [row.as_json(self._others(row)) for row in self.rows],
        }

    def save(self, path: Path | None) -> None:
        """Write the JSON file, if one is wanted; whoever reads it finds a complete one at any time."""
        if path is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(self.as_json(), indent=2) + "\n")
            part.replace(path)

    def show(self, console: Console) -> None:
        """Print the table and what must be known to read it."""
        table = Table(title=f"All-reduce of float32 on {self.network['file']}")
        table.add_column("system", no_wrap=True)
        table.add_column("size", justify="right", no_wrap=True)
        middle = "mean" if self.network.get("dynamic") else "median"
        ratios = self._ratios()
        for heading in (middle, "range", *ratios.values(), "optimum", "bound", "CPU"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("machine", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*self._cells(row.as_json(self._others(row)), middle, list(ratios)))
        console.print(table)
        known = self.network
        loss, backend, congestion = known["loss"], known["backend"], known["congestion"]
        lines = [
            f"{known['nodes']} nodes, rates x {known['rates_scale']:g}, loss {loss}; {backend}; {congestion}",
            f"x SYSTEM: its {middle} over this one's. optimum: what part of the possible at full rates,",
            f"headers not counted ({known['goodput']:.3f} of a rate is left for data); bound: of what",
            "is possible with latencies and the headers of IP and TCP.",
            "CPU: processor time of a round, all its processes. machine: share of all cores meanwhile.",
        ]
        lines += [
            f"{megabytes(int(size))}: {certificate}."
            for size, certificate in known.get("certificates", {}).items()
            if certificate
        ]
        lines += [f"{row.entrant.name}: {row.error}" for row in self.rows if row.error]
        for line in lines:
            console.print(line, highlight=False, markup=False)

    def show_shortly(self, console: Console) -> None:
        """Print a small table for whoever sees such a race for the first time."""
        table = Table(title=f"Adding up {megabytes(self.rows[0].case.bytes)} of gradients of all sites")
        table.add_column("", no_wrap=True)
        for heading in ("a round", "times as fast"):
            table.add_column(heading, justify="right", no_wrap=True)
        first = self.rows[0]
        for row in self.rows:
            faster, seconds = row.times_over(first), row.typical_s
            name = IN_WORDS.get(row.entrant.name, row.entrant.name)
            cells = (
                "-" if seconds is None else f"{seconds:.2f} s",
                "" if faster is None else f"{faster:.1f} x",
            )
            table.add_row(name, *cells)
        console.print(table)
        for row in self.rows:
            if row.error:
                console.print(f"{row.entrant.name}: {row.error}", highlight=False, markup=False)

    def _others(self, row: RaceRow) -> dict[str, RaceRow]:
        return {other.entrant.name: other for other in self.rows if other.case == row.case}

    def _ratios(self) -> dict[str, str]:
        """Return the columns that compare, by their names in the JSON: those whose system takes part."""
        names = {row.entrant.name for row in self.rows}
        return {field: heading for system, (field, heading) in _RATIOS.items() if system in names}

    @staticmethod
    def _cells(row: Mapping[str, Any], typical: str, ratios: list[str]) -> list[str]:
        cells = [str(row["system"]), megabytes(row["bytes"])]
        if row[f"{typical}_s"] is None:
            return [*cells, "-"]

        def shown(name: str, form: str) -> str:
            return "" if row[name] is None else format(row[name], form)

        return [
            *cells,
            f"{row[f'{typical}_s']:.2f} s",
            f"{row['fastest_s']:.2f}-{row['slowest_s']:.2f}",
            *(shown(name, ".2f") for name in (*ratios, "of_optimum", "of_bound")),
            f"{shown('cpu_s', '.2f')} s",
            shown("machine_cpu_share", ".0%"),
            "" if row["peak_rss_bytes"] is None else f"{row['peak_rss_bytes'] / 1e6:.0f} MB",
        ]
