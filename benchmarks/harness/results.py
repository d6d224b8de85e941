"""The results of a comparison: kept as they come, written as JSON, shown as a table of ratios."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.arguments import megabytes
from race.policy_log import PolicyChange
from systems.base import Case, System

__all__ = ["Results", "Row"]

_NOTICEABLE_SHARE = 0.05


@dataclass(slots=True, kw_only=True)
class Row:
    """One system in one case."""

    system: System
    case: Case
    rounds_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    """When each round began, since the first that counts; where the network changes, since that began."""
    policies: list[PolicyChange] = field(default_factory=list)
    """Of a NetStorm job, at times as those of `starts_s`."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of all its processes in each round."""
    machine_cpu_shares: list[float] = field(default_factory=list)
    """Of all cores, whatever used them, in each round."""
    link_bytes: list[dict[str, int]] = field(default_factory=list)
    """What each link carried in each round, where links are metered."""
    idle_cpu_share: float | None = None
    """Share of one core used while it was another system's turn: what it took from them."""
    interleaved: str = "by round"
    peak_rss: int | None = None
    helper_peak_rss: int | None = None
    baseline_rss: int | None = None
    """Peak of a worker with the same arrays and without a store."""
    error: str | None = None

    @property
    def median_s(self) -> float | None:
        """Median of the rounds, or None if there were none."""
        return statistics.median(self.rounds_s) if self.rounds_s else None

    @property
    def memory_in_models(self) -> float | None:
        """Peak memory of a worker over one without a store, in sizes of what is reduced."""
        if self.peak_rss is None or self.baseline_rss is None:
            return None
        return (self.peak_rss - self.baseline_rss) / self.case.bytes

    def as_json(self) -> dict[str, Any]:
        """Return what is written."""
        return {
            "system": self.system.name,
            "nodes": self.case.nodes,
            "bytes": self.case.bytes,
            "keys": self.case.keys,
            "rounds_s": self.rounds_s,
            "median_s": self.median_s,
            "cpu_s": self.cpu_s,
            "idle_cpu_share": self.idle_cpu_share,
            "interleaved": self.interleaved,
            "settings": dict(self.system.settings),
            "peak_rss_bytes": self.peak_rss,
            "helper_peak_rss_bytes": self.helper_peak_rss,
            "baseline_rss_bytes": self.baseline_rss,
            "peak_over_baseline_in_models": self.memory_in_models,
            "error": self.error,
        }


@dataclass(slots=True, kw_only=True)
class Results:
    """All rows so far."""

    machine: dict[str, Any]
    options: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    def save(self, path: Path | None) -> None:
        """Write the JSON file, if one is wanted."""
        if path is None:
            return
        content = {
            "machine": self.machine,
            "options": self.options,
            "interrupted": self.interrupted,
            "results": [row.as_json() for row in self.rows],
        }
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(path)

    def show(self, console: Console) -> None:
        """Print the table: for each system its time as a multiple of each other system's."""
        names = list(dict.fromkeys(row.system.name for row in self.rows))
        references = [name for name in names if name != "netstorm"]
        table = Table(title="All-reduce of float32 among processes of one machine")
        table.add_column("nodes", justify="right", no_wrap=True)
        table.add_column("size", justify="right", no_wrap=True)
        table.add_column("system", no_wrap=True)
        table.add_column("median", justify="right", no_wrap=True)
        table.add_column("range", justify="right", no_wrap=True)
        for name in references:
            table.add_column("/ " + name.replace("-", "-\n  ", 1), justify="right", no_wrap=True)
        table.add_column("CPU", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        previous: Case | None = None
        for row in self.rows:
            if previous is not None and row.case != previous:
                table.add_section()
            previous = row.case
            table.add_row(*self._cells(row, references))
        console.print(table)
        for line in self._notes():
            console.print(line, highlight=False, markup=False)

    def _notes(self) -> list[str]:
        notes = [
            "/ SYSTEM: the median divided by that of SYSTEM. CPU: processor time of a round, all processes.",
            "memory: peak of a node over a run without a store, in sizes of what is reduced (with --memory).",
        ]
        for row in self.rows:
            what = f"{row.system.name}, {row.case.nodes} nodes, {megabytes(row.case.bytes)}"
            if row.error:
                notes.append(f"{what}: {row.error}")
            if row.interleaved != "by round":
                notes.append(f"{what}: not all systems fit into memory at once; rounds ran {row.interleaved}")
            if (row.idle_cpu_share or 0) > _NOTICEABLE_SHARE:
                notes.append(f"{what}: idle, but used {row.idle_cpu_share:.0%} of a core")
        return notes

    def _cells(self, row: Row, references: list[str]) -> list[str]:
        cells = [str(row.case.nodes), megabytes(row.case.bytes), row.system.name]
        median = row.median_s
        if median is None:
            return [*cells, "failed" if row.error else "-"]
        others = {other.system.name: other.median_s for other in self.rows if other.case == row.case}
        memory = row.memory_in_models
        return [
            *cells,
            f"{median:.4f} s",
            f"{min(row.rounds_s):.4f} to {max(row.rounds_s):.4f}",
            *(self._ratio(row, others.get(name)) if name != row.system.name else "" for name in references),
            f"{statistics.median(row.cpu_s):.2f} s",
            "" if memory is None else f"{memory:.1f}",
        ]

    @staticmethod
    def _ratio(row: Row, other: float | None) -> str:
        return "-" if row.median_s is None or other is None else f"{row.median_s / other:.2f}"
