"""The plot of `netstorm simulate`: each scheme's round times as a box, beside the optimum."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from netstorm.cli.simulate.study import Study
from netstorm.errors import UsageError
from netstorm.simulation.summary import quartiles
from netstorm.units import format_bytes

__all__ = ["check", "plot"]

_SUFFIXES: Final = (".png", ".svg", ".pdf")
_BOX: Final = "#4878a8"
_OPTIMUM: Final = "#2a7f3f"
_LOGARITHMIC_FROM: Final = 8.0
"""Slowest over fastest median, beyond which a linear axis would hide the fast ones."""


def check(path: Path) -> None:
    """Check, before hours of work, that a plot can be written.

    Raises:
        UsageError: it cannot; says why.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {path}: expected a file name that ends in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'netstorm[plot]'")


def plot(study: Study, path: Path) -> None:
    """Write the plot, of all schemes with times.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    times = {name: list(study.times(name).values()) for name in study.options.topologies}
    shown = sorted((name for name in times if times[name]), key=lambda name: -quartiles(times[name])[1])
    options, experiment = study.options, study.options.experiment
    figure = Figure(figsize=(8.0, 1.6 + 0.45 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    places = range(1, len(shown) + 1)
    for place, name in zip(places, shown, strict=True):
        q1, median, q3 = quartiles(times[name])
        axes.hlines(place, min(times[name]), max(times[name]), color=_BOX, linewidth=1)
        axes.barh(place, q3 - q1, left=q1, height=0.6, facecolor=_BOX, alpha=0.35, edgecolor=_BOX)
        axes.vlines(median, place - 0.3, place + 0.3, color=_BOX, linewidth=2)
        axes.plot(times[name], [place] * len(times[name]), ".", color=_BOX, markersize=4)
        summary = study.summary(name)
        if summary is not None and summary.of_optimum is not None:
            text = f" {summary.of_optimum:.0%} of the optimum"
            axes.annotate(text, (max(times[name]), place), va="center", fontsize=8, xytext=(4, 0),
                          textcoords="offset points")  # fmt: skip
    if study.optima:
        q1, median, q3 = quartiles(list(study.optima.values()))
        axes.axvspan(q1, q3, color=_OPTIMUM, alpha=0.15)
        axes.axvline(median, color=_OPTIMUM, linewidth=2, label="optimum: median and quartiles")
        axes.legend(loc="upper right", fontsize=8)
    medians = [quartiles(times[name])[1] for name in shown]
    if medians and max(medians) > _LOGARITHMIC_FROM * min(medians):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0.0)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 1.25)  # room for the text beside the boxes
    axes.set_yticks(list(places), shown)
    axes.set_xlabel("time of a round, s")
    generated = f"{options.family} networks of {options.nodes} nodes, {len(options.seeds)} seeds"
    size, network = format_bytes(experiment.bytes), options.path or generated
    axes.set_title(f"{size} on {network} ({options.engine.value})", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from None
