"""A comparison as one picture: the network, what the chosen policy sends over it, and all schemes' times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import networkx as nx
import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter

from netstorm.cli.support import size_text, time_text
from netstorm.errors import UsageError
from netstorm.lab.commands.comparison import BASELINES, Comparison, Use
from netstorm.topology.network import Link, Network, Rank
from netstorm.topology.resources import Floats
from netstorm.units import format_rate

__all__ = ["FORMATS", "places", "plot_comparison"]


FORMATS: Final = (".png", ".svg", ".pdf")

_WIDEST: Final = 7.0
"""Points of the fastest, or most loaded, link."""
_MOST_LABELS: Final = 18
"""Links whose rates are written beside them; more would cover each other."""
_LABEL_ROOM: Final = 0.16
"""Of the picture's width, between two nodes with a label between them."""
_CHOSEN: Final = "#1b7837"
_OTHER: Final = "#7f9fbf"
_OPTIMUM: Final = "#b2182b"
_BUSY: Final = LinearSegmentedColormap.from_list(
    "busy", ["#7fb7d9", "#4393c3", "#f0a030", "#e4572e", "#b2001f"]
)
_HALO: Final = (withStroke(linewidth=3, foreground="white"),)

Colour: TypeAlias = str | npt.NDArray[np.float64]
Places: TypeAlias = Mapping[Rank, tuple[float, float]]


def plot_comparison(comparison: Comparison, path: Path, *, title: str) -> None:
    """Draw a comparison into a file.

    Raises:
        UsageError: the file cannot be written.
    """
    count = len(comparison.chosen)
    figure = Figure(figsize=(11 + 6 * count, 7.5), dpi=110, layout="constrained")
    figure.suptitle(_heading(comparison, title), fontsize=14)
    network, *chosen, schemes = figure.subplots(1, 2 + count, width_ratios=(1.05, *[1.05] * count, 0.85))
    where = places(comparison.network)
    _draw_network(network, comparison.network, where)
    for axes, name in zip(chosen, comparison.chosen, strict=True):
        _draw_chosen(axes, comparison, name, where)
    _draw_schemes(schemes, comparison)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from error


def _heading(comparison: Comparison, title: str) -> str:
    name = comparison.chosen[0]
    took = time_text(comparison.outcomes[name].predicted_s)
    faster = comparison.speedup("star", name)
    than = f", {faster:.1f} times as fast as a parameter server" if faster is not None else ""
    return f"{title} ({size_text(comparison.nbytes)}): {name} takes {took}{than}"


def _draw_network(axes: Axes, network: Network, where: Places) -> None:
    rates = [link.rate for link in network.links] or [1.0]
    colours = ScalarMappable(Normalize(min(0.5 * max(rates), *rates), max(rates)), colormaps["viridis_r"])
    rate_of = {(link.source, link.target): link.rate for link in network.links}
    labelled = 0
    for link in sorted(network.links, key=lambda link: link.rate):
        back = rate_of.get((link.target, link.source))
        both = back == link.rate
        if both and link.source > link.target:
            continue
        _line(
            axes,
            where,
            link.source,
            link.target,
            width=0.6 + (_WIDEST - 0.6) * link.rate / max(rates),
            colour=colours.to_rgba(np.asarray(link.rate)),
            bent=not both,
            arrow=not both,
        )
        labelled += 1
        far = math.dist(where[link.source], where[link.target]) > _LABEL_ROOM
        if len(network.links) <= 2 * _MOST_LABELS and both and far:
            _label_rate(axes, where, link)
    _draw_nodes(axes, network, where, dict.fromkeys(network.ranks, 0.0), _caps(network))
    directions = (
        "each line is both directions"
        if 2 * labelled == len(network.links)
        else "each direction has a line of its own"
    )
    _finish(axes, f"The network: rates of the links\n{directions}")
    bar = axes.figure.colorbar(colours, ax=axes, orientation="horizontal", shrink=0.6, pad=0.02, aspect=40)
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: format_rate(rate)))
    bar.ax.locator_params(nbins=5)


def _label_rate(axes: Axes, where: Places, link: Link) -> None:
    (x, y), (u, v) = where[link.source], where[link.target]
    axes.text((x + u) / 2, (y + v) / 2, _short(link.rate), fontsize=7, ha="center", va="center",
              path_effects=_HALO, zorder=4)  # fmt: skip


def _draw_chosen(axes: Axes, comparison: Comparison, name: str, where: Places) -> None:
    outcome = comparison.outcomes[name]
    uses = [use for use in outcome.uses if use.ends is not None]
    most = max((use.nbytes for use in uses), default=0.0) or 1.0
    colours = ScalarMappable(Normalize(0, 1), _BUSY)
    for use in sorted(uses, key=lambda use: use.nbytes):
        _draw_use(axes, where, use, most, colours)
    policy = outcome.policy
    rooted = dict.fromkeys(comparison.network.ranks, 0.0)
    for tree, weight in zip(policy.trees, policy.weights, strict=True):
        rooted[tree.root] += weight / sum(policy.weights)
    busy: dict[Rank, float] = {}
    for use in outcome.uses:
        if use.capped is not None:
            busy[use.capped] = max(busy.get(use.capped, 0.0), use.busy)
    notes = {rank: f"access {part:.0%} busy" for rank, part in busy.items()}
    _draw_nodes(axes, comparison.network, where, rooted, notes)
    count = len(policy.trees)
    sent = "its tree sends" if count == 1 else f"its {count} trees send"
    _finish(
        axes,
        f"{name}: what {sent} over each link\nwidth: bytes, at most {size_text(most)}; dark nodes: roots",
    )
    bar = axes.figure.colorbar(colours, ax=axes, orientation="horizontal", shrink=0.6, pad=0.02, aspect=40)
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{part:.0%} busy"))
    bar.ax.locator_params(nbins=3)


def _draw_use(axes: Axes, where: Places, use: Use, most: float, colours: ScalarMappable) -> None:
    assert use.ends is not None
    source, target = use.ends
    if use.nbytes < 1:
        _line(axes, where, source, target, width=0.5, colour="#d0d0d0", bent=False)
        return
    width = 0.6 + (_WIDEST - 2.0) * use.nbytes / most
    _line(
        axes,
        where,
        source,
        target,
        width=width,
        colour=colours.to_rgba(np.asarray(use.busy)),
        bent=True,
        arrow=True,
    )


def _line(
    axes: Axes,
    where: Places,
    source: int,
    target: int,
    *,
    width: float,
    colour: Colour,
    bent: bool,
    arrow: bool = False,
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            where[Rank(source)],
            where[Rank(target)],
            arrowstyle=f"-|>,head_length={3 + width},head_width={1.5 + 0.6 * width}" if arrow else "-",
            connectionstyle=f"arc3,rad={0.12 if bent else 0.0}",
            shrinkA=9,
            shrinkB=11 if arrow else 9,
            mutation_scale=1,
            linewidth=width,
            color=colour,
            zorder=2,
        )
    )


def _caps(network: Network) -> dict[Rank, str]:
    notes = {}
    for node in network.nodes:
        caps = sorted({cap for cap in (node.egress, node.ingress) if cap is not None})
        if caps:
            notes[node.rank] = f"access {' / '.join(map(_short, caps))}"
    return notes


def _draw_nodes(
    axes: Axes, network: Network, where: Places, rooted: Mapping[Rank, float], notes: Mapping[Rank, str]
) -> None:
    """Draw the nodes, the darker the larger their part as roots is, with their sites and notes below."""
    small = network.size > 40
    shades = colormaps["Blues"]
    most = max(rooted.values()) or 1.0
    for node in network.nodes:
        x, y = where[node.rank]
        part = rooted[node.rank] / most
        axes.scatter([x], [y], s=60 if small else 330, color=shades(0.15 + 0.75 * part), edgecolors="#203040",
                     linewidths=1.2, zorder=5)  # fmt: skip
        if small:
            continue
        axes.text(x, y, str(node.rank), ha="center", va="center", fontsize=9, weight="bold",
                  color="white" if part > 0.5 else "#203040", zorder=6)  # fmt: skip
        lines = [node.site, notes.get(node.rank, "")]
        axes.annotate("\n".join(filter(None, lines)), (x, y), xytext=(0, -13), textcoords="offset points",
                      ha="center", va="top", fontsize=8, path_effects=_HALO, zorder=6)  # fmt: skip


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlim(-0.1, 1.1)
    axes.set_ylim(-0.14, 1.08)
    axes.axis("off")


def _draw_schemes(axes: Axes, comparison: Comparison) -> None:
    outcomes = comparison.outcomes
    names = sorted(outcomes, key=lambda name: -outcomes[name].predicted_s)
    # What is many times slower than the parameter servers of today would leave no room for the others.
    shown = [outcomes[name].predicted_s for name in (*BASELINES, *comparison.chosen) if name in outcomes]
    limit = 1.15 * max(shown) or 1.0
    left = 0.015 * limit
    for place, name in enumerate(names):
        outcome = outcomes[name]
        colour = _CHOSEN if name in comparison.chosen else _OTHER
        axes.barh(place, min(outcome.predicted_s, limit), height=0.7, color=colour, alpha=0.55)
        axes.barh(place, min(outcome.fluid_s, limit), height=0.3, color=colour)
        off = " →" if outcome.predicted_s > limit else ""
        took = f"{time_text(outcome.predicted_s)}{off}"
        text = f"{name}   {took},  {comparison.of_optimum(name):.0%} of the optimum"
        weight = "bold" if name in comparison.chosen else "normal"
        axes.text(
            left, place + 0.4, text, va="bottom", fontsize=9, weight=weight, path_effects=_HALO, zorder=4
        )
    optimum_s = comparison.optimum_s
    axes.axvline(optimum_s, color=_OPTIMUM, linestyle="--", linewidth=1.5)
    text = f"the optimum: {time_text(optimum_s)}"
    axes.text(optimum_s + left, len(names) - 0.1, text, color=_OPTIMUM, fontsize=9)
    axes.set_xlim(0, limit)
    axes.set_ylim(-0.6, len(names) + 0.2)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: time_text(seconds)))
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set_title("All schemes, the shorter the better\nlight: predicted; dark: fluid model", fontsize=10)


def _short(rate: float) -> str:
    return format_rate(rate).removesuffix("bit/s")


# Where to draw nodes: on the map if their sites are cities that we know, else by their links.

_CITIES: Final[Mapping[str, tuple[float, float]]] = {
    "amsterdam": (52.4, 4.9), "atlanta": (33.7, -84.4), "berlin": (52.5, 13.4), "boston": (42.4, -71.1),
    "california": (37.4, -121.9), "cape-town": (-33.9, 18.4), "chicago": (41.9, -87.6),
    "dallas": (32.8, -96.8), "denver": (39.7, -105.0), "dublin": (53.3, -6.3), "frankfurt": (50.1, 8.7),
    "hong-kong": (22.3, 114.2), "houston": (29.8, -95.4), "ireland": (53.3, -6.3),
    "kansas-city": (39.1, -94.6), "london": (51.5, -0.1), "los-angeles": (34.1, -118.2),
    "madrid": (40.4, -3.7), "milan": (45.5, 9.2), "montreal": (45.5, -73.6), "mumbai": (19.1, 72.9),
    "new-york": (40.7, -74.0), "ohio": (40.0, -83.0), "oregon": (45.8, -119.7), "osaka": (34.7, 135.5),
    "paris": (48.9, 2.4), "prague": (50.1, 14.4), "sao-paulo": (-23.6, -46.6), "seattle": (47.6, -122.3),
    "seoul": (37.6, 127.0), "singapore": (1.4, 103.8), "stockholm": (59.3, 18.1),
    "sunnyvale": (37.4, -122.0), "sydney": (-33.9, 151.2), "tokyo": (35.7, 139.7), "toronto": (43.7, -79.4),
    "vienna": (48.2, 16.4), "virginia": (38.9, -77.4), "washington": (38.9, -77.0), "zurich": (47.4, 8.5),
}  # fmt: skip
"""Latitude and longitude in degrees."""

_DENSE: Final = 0.6
"""Part of all possible links from which on their lengths say nothing: a circle shows them best."""
_APART: Final = 0.5
"""Least distance between two nodes, as a part of the side of the square that each would have to itself."""


def places(network: Network) -> Mapping[Rank, tuple[float, float]]:
    """Return x and y of each node, each from 0 to 1, none on top of another."""
    if network.size == 1:
        return {Rank(0): (0.5, 0.5)}
    if all(node.site in _CITIES for node in network.nodes):
        spread = _on_the_map(network)
    else:
        spread = _by_links(network)
    spread = _moved_apart(_fitted(spread))
    return {rank: (float(spread[rank, 0]), float(spread[rank, 1])) for rank in network.ranks}


def _on_the_map(network: Network) -> Floats:
    return np.array(
        [
            # Nodes of one site are on a spot; a tiny circle gives each a direction to move away in.
            (longitude + 0.01 * math.cos(node.rank), latitude + 0.01 * math.sin(node.rank))
            for node in network.nodes
            for latitude, longitude in [_CITIES[node.site]]
        ]
    )


def _by_links(network: Network) -> Floats:
    graph = network.graph().to_undirected()
    dense = graph.number_of_edges() >= _DENSE * network.size * (network.size - 1) / 2
    found = nx.circular_layout(graph) if dense else nx.kamada_kawai_layout(graph)
    return np.array([found[rank] for rank in network.ranks])


def _fitted(spread: Floats) -> Floats:
    low = spread.min(axis=0)
    extent = spread.max(axis=0) - low
    result: Floats = (spread - low) / np.where(extent > 1e-9, extent, 1.0)
    return result


def _moved_apart(spread: Floats) -> Floats:
    """Push nodes that are too near to each other apart, a little in each step."""
    least = _APART / math.sqrt(len(spread))
    for _ in range(200):
        away = spread[:, None] - spread[None, :]
        distance = np.maximum(np.hypot(away[..., 0], away[..., 1]), 1e-9)
        np.fill_diagonal(distance, np.inf)
        if distance.min() >= least:
            break
        push = np.maximum(0.0, least - distance) / distance
        spread = spread + 0.3 * (push[..., None] * away).sum(axis=1)
    return _fitted(spread)
