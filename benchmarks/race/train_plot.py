"""A picture of training: how good the net is against time, and how many samples a second a store trains."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

__all__ = ["draw_training"]

_COLOURS = ("#9aa5b1", "#d58a3a", "#2b6ca3", "#4f9d69", "#8a63a8", "#c44e52")


def draw_training(content: Mapping[str, Any], path: Path) -> None:
    """Draw the systems that have trained an epoch (needs matplotlib); the format is that of the file name.

    Args:
        content: of the JSON file of `train.py`. A point is an epoch: at the time of its end, which counts
            training alone, the share of the test samples that the net knows then.
        path: where to.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - not everybody has it
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [row for row in content["results"] if row["epochs"]]
    with rc_context({"svg.hashsalt": "netstorm", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        course, rates = figure.subplots(1, 2, width_ratios=(1.6, 1))
        for row, colour in zip(rows, _colours(len(rows)), strict=True):
            times = accumulate(epoch["seconds"] for epoch in row["epochs"])
            accuracies = [100 * epoch["accuracy"] for epoch in row["epochs"]]
            course.plot(list(times), accuracies, marker="o", markersize=4, color=colour, label=row["system"])
        course.axhline(100 * content["options"]["target"], color="#333333", linestyle="--", linewidth=0.8)
        course.set_xlim(left=0)
        course.set_xlabel("seconds of training")
        course.set_ylabel("accuracy on test samples, %")
        course.legend(frameon=False, loc="lower right")
        _bars(rates, rows)
        for axes in (course, rates):
            axes.spines[["top", "right"]].set_visible(False)
        parameters = f"{rows[0]['parameters'] / 1e6:.2g} million parameters"
        figure.suptitle(f"{Path(content['network']).stem}, {parameters}", fontsize=10)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {})


def _bars(axes: Any, rows: list[Mapping[str, Any]]) -> None:
    """One bar a system, in the colours of the lines, with its multiple of the first one's rate."""
    first = rows[0]["samples_per_s"]
    for place, (row, colour) in enumerate(zip(rows, _colours(len(rows)), strict=True)):
        rate = row["samples_per_s"]
        axes.barh(place, rate, color=colour)
        axes.text(rate, place, f" {rate:.0f} ({rate / first:.1f} x)", va="center")
    axes.set_yticks(range(len(rows)), [row["system"].replace("-", "-\n", 1) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(row["samples_per_s"] for row in rows))
    axes.set_xlabel("samples a second, all ranks together")


def _colours(number: int) -> list[str]:
    return [_COLOURS[place % len(_COLOURS)] for place in range(number)]
