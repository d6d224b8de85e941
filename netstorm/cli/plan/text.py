"""A comparison of schemes as text: tables and trees for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Drawing

from netstorm.cli.plan.codecs import CodecPlan
from netstorm.cli.plan.compare import BASELINES, Comparison, Outcome, Use
from netstorm.cli.quantities import size_text, time_text
from netstorm.topology.network import Network
from netstorm.topology.tree import Tree
from netstorm.units import format_bytes, format_fraction

__all__ = ["as_json", "print_comparison"]

_MOST_DRAWN: Final = 6
"""Most drawings of trees: a packing of 32 nodes has 60 trees."""
_LONG_CHAIN: Final = 3
"""Nodes below each other without a branch that are still drawn one in each line."""
_LARGEST_MATRIX: Final = 10
"""Nodes: more columns do not fit a terminal of 80."""
_MOST_LISTED: Final = 16
"""Links, where there is no room for a matrix."""
_BUSY: Final = ((0.9, "bold red"), (0.6, "yellow"), (0.0, "green"))


def as_json(comparison: Comparison, codecs: CodecPlan | None = None) -> dict[str, object]:
    """Return the comparison for JSON, in bytes and seconds."""
    chosen = comparison.outcomes[comparison.chosen]
    return {
        "bytes": comparison.nbytes,
        "tensors": len(comparison.tensors),
        "chunk_bytes": comparison.chunk_bytes,
        "nodes": comparison.network.size,
        "optimum_s": comparison.optimum_s,
        "latency_bound_s": comparison.latency_bound_s,
        "schemes": {name: _scheme(comparison, name) for name in comparison.outcomes},
        "not_applicable": comparison.errors,
        "chosen": comparison.chosen,
        "reason": chosen.policy.reason,
        "codecs": None
        if codecs is None
        else {"compute_s": codecs.compute_s, "times_s": codecs.times, "chosen": codecs.chosen},
        "trees": [
            {
                "share": share,
                "root": tree.root,
                "reduce_parent": tree.reduce_parent,
                "broadcast_parent": tree.broadcast_parent,
            }
            for share, tree in _by_share(chosen)
        ],
    }


def _scheme(comparison: Comparison, name: str) -> dict[str, object]:
    outcome = comparison.outcomes[name]
    return {
        "fluid_s": outcome.fluid_s,
        "predicted_s": outcome.predicted_s,
        "of_optimum": comparison.of_optimum(name),
        "over_star": comparison.speedup("star", name),
        "over_sharded": comparison.speedup("sharded", name),
        "formation_s": outcome.formation_s,
        "trees": len(outcome.policy.trees),
        "link_bytes": {use.name: round(use.nbytes) for use in outcome.uses},
    }


def print_comparison(comparison: Comparison, console: Console, codecs: CodecPlan | None = None) -> None:
    """Print the schemes, the codec if one was asked for, the chosen scheme's links, and its trees."""
    network = comparison.network
    count = len(comparison.tensors)
    console.print(
        f"{size_text(comparison.nbytes)} in {count} tensor{'s' * (count > 1)}, in chunks of "
        f"{format_bytes(comparison.chunk_bytes)}, among {network.size} nodes.\n"
        f"The optimum, in the fluid model: {time_text(comparison.optimum_s)}; with latencies, nothing "
        f"takes less than {time_text(max(comparison.optimum_s, comparison.latency_bound_s))}.",
        highlight=False,
    )
    console.print()
    console.print(_schemes(comparison))
    for name, error in comparison.errors.items():
        console.print(f"{name} does not apply: {error}", style="dim", highlight=False)
    chosen = comparison.outcomes[comparison.chosen]
    console.print()
    console.print(Text.assemble("chosen: ", (comparison.chosen, "bold green"), f" ({chosen.policy.reason})"))
    if codecs is not None:
        times = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in codecs.times.items())
        fits = codecs.times[codecs.chosen] <= codecs.compute_s
        why = "which takes no longer" if fits else "the fastest, since all take longer"
        text = f" ({why}). A step computes for {time_text(codecs.compute_s)}; its sums take: {times}"
        console.print(Text.assemble("compression: ", (codecs.chosen, "bold green"), text))
    console.print()
    _print_links(comparison.network, chosen, console)
    console.print()
    _print_trees(comparison.network, chosen, console)


def _schemes(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("scheme", no_wrap=True)
    for heading in (
        "trees",
        "predicted",
        *(f"× {name}" for name in BASELINES),
        "fluid",
        "of optimum",
        "formed in",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    by_time = sorted(comparison.outcomes, key=lambda name: comparison.outcomes[name].predicted_s)
    for name in by_time:
        outcome = comparison.outcomes[name]
        table.add_row(
            name,
            str(len(outcome.policy.trees)),
            time_text(outcome.predicted_s),
            *(_ratio(comparison.speedup(baseline, name)) for baseline in BASELINES),
            time_text(outcome.fluid_s),
            f"{comparison.of_optimum(name):.0%}",
            time_text(outcome.formation_s),
            style="bold green" if name == comparison.chosen else "",
        )
    return table


def _print_links(network: Network, outcome: Outcome, console: Console) -> None:
    links = [use for use in outcome.uses if use.ends is not None]
    caps = [use for use in outcome.uses if use.ends is None]
    if network.size <= _LARGEST_MATRIX:
        console.print(*_matrix(network, links), sep="\n")
        listed = sorted(caps, key=lambda use: -use.busy)
    else:
        listed = sorted(outcome.uses, key=lambda use: -use.busy)
    if listed:
        table = Table(box=None, pad_edge=False, show_edge=False)
        for heading in ("access link" if len(listed) == len(caps) else "link", "bytes", "busy"):
            table.add_column(heading, justify="left" if "link" in heading else "right", no_wrap=True)
        for use in listed[:_MOST_LISTED]:
            table.add_row(use.name, size_text(use.nbytes), f"{use.busy:.0%}", style=_colour(use))
        if len(listed) > _MOST_LISTED:
            table.add_row(f"and {len(listed) - _MOST_LISTED} that are less busy", "", "", style="dim")
        console.print(table)


def _matrix(network: Network, links: Sequence[Use]) -> tuple[Text, Table]:
    largest = max((use.nbytes for use in links), default=0.0)
    scales = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    factor, unit = next((scale for scale in scales if largest >= 10 * scale[0]), (1.0, "B"))
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for rank in network.ranks:
        table.add_column(str(rank), justify="right", no_wrap=True)
    by_ends = {use.ends: use for use in links}
    for source in network.ranks:
        cells = []
        for target in network.ranks:
            use = by_ends.get((source, target))
            cells.append(
                Text("·", "dim") if use is None else Text(f"{use.nbytes / factor:.0f}", _colour(use))
            )
        table.add_row(_label(network, source), *cells)
    title = f"{unit} from (rows) to (columns), and how busy: red from 90 %, yellow from 60 %"
    return Text(title, "dim"), table


def _print_trees(network: Network, outcome: Outcome, console: Console) -> None:
    trees = _by_share(outcome)
    directed = any(tree.reduce_parent != tree.broadcast_parent for _, tree in trees)
    drawn = trees[: _MOST_DRAWN // 2 if directed else _MOST_DRAWN]
    console.print(Columns(_drawings(network, drawn), padding=(1, 3)))
    if len(trees) > len(drawn):
        share = sum(share for share, _ in trees[len(drawn) :])
        console.print(
            f"and {len(trees) - len(drawn)} more trees, with {format_fraction(share)} of the bytes together "
            "(--json has them)",
            style="dim",
            highlight=False,
        )


def _drawings(network: Network, trees: Sequence[tuple[float, Tree]]) -> Iterator[Drawing]:
    for share, tree in trees:
        title = f"{format_fraction(float(f'{share:.3g}'))} of the bytes"
        if tree.reduce_parent == tree.broadcast_parent:
            yield _drawing(network, tree.root, tree.reduce_children, title)
        else:
            yield _drawing(network, tree.root, tree.reduce_children, f"{title}, up")
            yield _drawing(network, tree.root, tree.broadcast_children, f"{title}, down")


def _drawing(network: Network, root: int, children: Sequence[Sequence[int]], title: str) -> Drawing:
    drawing = Drawing(Text.assemble((title, "dim"), "\n", (_label(network, root), "bold")), guide_style="dim")
    branches = {root: drawing}
    order = [root]
    for rank in order:
        for child in children[rank]:
            chain = _chain(child, children)
            text = _label(network, child) if len(chain) == 1 else " ── ".join(map(str, chain))
            branches[chain[-1]] = branches[rank].add(Text(text))
            order.append(chain[-1])
    return drawing


def _chain(first: int, children: Sequence[Sequence[int]]) -> list[int]:
    """Return the chain that begins at `first`, if it is long: a ring is a single long chain."""
    chain = [first]
    while len(children[chain[-1]]) == 1:
        chain.append(children[chain[-1]][0])
    return chain if len(chain) > _LONG_CHAIN else [first]


def _by_share(outcome: Outcome) -> list[tuple[float, Tree]]:
    policy = outcome.policy
    total = sum(policy.weights)
    shares = [(weight / total, tree) for weight, tree in zip(policy.weights, policy.trees, strict=True)]
    return sorted(shares, key=lambda pair: (-pair[0], pair[1].root))


def _label(network: Network, rank: int) -> str:
    return f"{rank} {network.nodes[rank].site}".rstrip()


def _colour(use: Use) -> str:
    return "dim" if use.nbytes < 1 else next(colour for least, colour in _BUSY if use.busy >= least)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ×"
