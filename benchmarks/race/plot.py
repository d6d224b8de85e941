"""Pictures of a race, from what was written of it: medians side by side, or rounds against time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from harness.arguments import megabytes

__all__ = ["BEST", "IN_WORDS", "draw_race"]

BEST: Final = "mxnet-star-best"
"""What all others are compared with."""

IN_WORDS: Final = MappingProxyType(
    {
        "gloo": "Gloo",
        "mxnet-star-best": "MXNet, one server at the best site",
        "mxnet-star-mean": "MXNet, one server at an average site",
        "mxnet-star-worst": "MXNet, one server at the worst site",
        "mxnet-sharded": "MXNet, a server at every site",
        "netstorm-fapt": "NetStorm, fastest path trees",
        "netstorm-packing": "NetStorm, packed trees",
    }
)
"""Systems as people read them."""

_OURS, _PEERS, _OPTIMUM = "#2b6ca3", "#9aa5b1", "#c44e52"
_LINES = ("#9aa5b1", "#d58a3a", "#2b6ca3", "#4f9d69", "#8a63a8", "#c2a12f", "#53a5b8", "#6b4c3b")


def draw_race(content: Mapping[str, Any], path: Path, *, title: str = "") -> None:
    """Draw a race (needs matplotlib); the format is that of the file name.

    Args:
        content: of the JSON file of a race.
        title: above the picture; empty: that in `content`, or the network and its rates.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - not everybody has it
    from matplotlib.figure import Figure  # noqa: PLC0415

    sizes = list(dict.fromkeys(row["bytes"] for row in content["results"]))
    rows = {size: [row for row in content["results"] if row["bytes"] == size] for size in sizes}
    with rc_context({"svg.hashsalt": "netstorm", "svg.fonttype": "none", "font.size": 10}):
        if content["network"]["dynamic"]:
            figure = Figure(figsize=(9, 4.2 * len(sizes)), layout="constrained")
            for axes, size in zip(figure.subplots(len(sizes), 1, squeeze=False)[:, 0], sizes, strict=True):
                _course(axes, rows[size], content["network"]["course"][str(size)], size)
        else:
            order = _slowest_first(rows[sizes[0]])
            width = 8 if len(sizes) == 1 else 3 + 4.2 * len(sizes)
            figure = Figure(figsize=(width, 1.3 + 0.42 * len(order)), layout="constrained")
            columns = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
            for axes, size in zip(columns, sizes, strict=True):
                _bars(axes, rows[size], order, content["network"]["optimum_s"][str(size)], size)
        figure.suptitle(title or content.get("title") or _title(content["network"]), fontsize=11)
        extra = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=110, metadata=extra)


def _title(network: Mapping[str, Any]) -> str:
    loss = "" if network["loss"] == "as in the file" else f", loss {network['loss']}"
    rates = "" if network["rates_scale"] == 1 else f", rates x {network['rates_scale']:g}"
    return f"{Path(network['file']).stem}, {network['nodes']} nodes{rates}{loss}"


def _slowest_first(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    done = [row for row in rows if row["median_s"] is not None]
    return [row["system"] for row in sorted(done, key=lambda row: -row["median_s"])]


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]], order: Sequence[str], best: float, size: int) -> None:
    """One bar a system as long as its median, with a line from its fastest to its slowest round."""
    known = {row["system"]: row for row in rows if row["median_s"] is not None}
    for place, system in enumerate(order):
        row = known.get(system)
        if row is None:
            continue
        axes.barh(place, row["median_s"], color=_OURS if system.startswith("netstorm") else _PEERS)
        axes.plot([row["fastest_s"], row["slowest_s"]], [place, place], color="#333333", linewidth=1)
        faster = row["vs_star_best"]
        times = "" if faster is None or system == BEST else f"  ({faster:.1f} x)"
        axes.annotate(
            f"{row['median_s']:.2f} s{times}",
            (row["slowest_s"], place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(best, color=_OPTIMUM, linestyle="--", linewidth=1.5)
    axes.set_yticks(range(len(order)), [_in_words(system) for system in order])
    axes.set_xlim(0, 1.3 * max((row["slowest_s"] for row in known.values()), default=1.0))
    compared = "\nin brackets: times as fast as MXNet at the best site" if BEST in known else ""
    axes.set_xlabel(f"seconds a round of {megabytes(size)}; dashed: optimum, {best:.2f} s{compared}")
    axes.spines[["top", "right"]].set_visible(False)


def _course(axes: Any, rows: Sequence[Mapping[str, Any]], course: Mapping[str, Any], size: int) -> None:
    """Each round as long as it took, at the height of what it took; the network's changes as lines."""
    begins, optima = course["begins_s"], course["optima_s"]
    colours = iter(_LINES * (1 + len(rows)))
    end = begins[-1]
    for row in rows:
        parts = [part for part in row["parts"].values() if part["rounds_s"]]
        if not parts:
            continue
        colour = next(colours)
        share = "" if row["of_optimum"] is None else f", {row['of_optimum']:.0%} of the optimum"
        for place, part in enumerate(parts):
            times, heights = _steps(part["starts_s"], part["rounds_s"])
            label = f"{_shown(row['system'], ', ')}: {row['mean_s'] or math.nan:.2f} s{share}"
            axes.plot(times, heights, color=colour, linewidth=1.4, label=label if place == 0 else None)
            changed = [
                change["at_s"] for change in part.get("policies", []) if 0 <= change["at_s"] <= times[-1]
            ]
            at_round = [max(0, bisect_right(part["starts_s"], at) - 1) for at in changed]
            axes.plot(
                changed, [part["rounds_s"][index] for index in at_round], "v", color=colour, markersize=5
            )
            end = max(end, times[-1])
    edges = [*begins, end]
    times = [time for begin, until in pairwise(edges) for time in (begin, until)]
    axes.plot(times, [best for best in optima for _ in range(2)], "--", color=_OPTIMUM, label="optimum")
    for begin in begins[1:]:
        axes.axvline(begin, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds; grey lines: the links' rates change; triangles: a new policy")
    axes.set_ylabel(f"seconds a round of {megabytes(size)}")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.14), ncol=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _in_words(system: str) -> str:
    name, _, settings = system.partition("@")
    return IN_WORDS.get(name, name) + (f"\n{_shown(settings, ', ')}" if settings else "")


def _shown(system: str, break_: str) -> str:
    return system.replace("@NETSTORM_TOPOLOGY=", break_).replace("@", break_)


def _steps(starts: Sequence[float], rounds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners of a line that is as high as each round took while it lasted."""
    times = [time for start, took in zip(starts, rounds, strict=True) for time in (start, start + took)]
    return times, [took for took in rounds for _ in range(2)]
