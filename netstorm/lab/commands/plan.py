"""`netstorm plan`: which topology suits a network, before anything runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Drawing

from netstorm.cli.support import exit_on_usage_error, size_text, time_text
from netstorm.errors import UsageError
from netstorm.lab.commands.comparison import BASELINES, CodecPlan, Comparison, SchemeOutcome, Use
from netstorm.topology.network import Network
from netstorm.topology.tree import Tree
from netstorm.units import format_bytes, format_fraction

__all__ = ["plan"]


def plan(
    network: Annotated[Path, typer.Argument(metavar="NETWORK.yaml", help="Network file to plan for.")],
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Tensors of a round: alexnet, resnet50, a size such as 244MB, or a .json file of tensors.",
        ),
    ] = "alexnet",
    topology: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="all: the best of all schemes; auto: as a job would choose; or one scheme."
        ),
    ] = "all",
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Size of a chunk: 1MB, 256KiB.")] = "256KiB",
    roots: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of roots of fapt and k-ary; 0: all nodes.")
    ] = 0,
    hub: Annotated[
        int, typer.Option(metavar="RANK", min=-1, help="Rank of a star's hub; -1: the best placed.")
    ] = -1,
    degree: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most children of a node in balanced and k-ary trees.")
    ] = 2,
    custom: Annotated[
        str, typer.Option(metavar="FILE", help="YAML file with the trees of --topology custom.")
    ] = "",
    objective: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What decides among all schemes: time; money, by the prices of links in the file; or both: "
            "the fastest and the cheapest are shown.",
        ),
    ] = "time",
    compute: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Time that a step computes: say which compression keeps the network from being slower.",
        ),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw network, trees and schemes: .png, .svg or .pdf. Needs matplotlib."
        ),
    ] = None,
) -> None:
    """Compare topologies on a network: time, traffic, and how far each is from the optimum.

    For each scheme it prints the time that a simulation of all chunks predicts, the speed-up over a parameter
    server (star) and over one that is spread over all nodes (sharded), and the fraction of the optimum in the
    fluid model. Then it prints the bytes on each link, and the trees, of the chosen scheme, or of both.

    The exit code is 2 if a file or an option is wrong.
    """
    from netstorm.lab.commands.comparison import plan_codec

    with exit_on_usage_error():
        draw = None if plot is None else _plotter(plot)
        comparison = _compare(
            network, model=model, topology=topology, chunk=chunk, roots=roots, hub=hub, degree=degree,
            custom=custom, objective=objective,
        )  # fmt: skip
        codecs = plan_codec(comparison, compute) if compute else None
        if draw is not None and plot is not None:
            draw(comparison, plot, title=f"{network.name}, {model}")
    if as_json:
        import json

        typer.echo(json.dumps(to_json(comparison, codecs), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        print_comparison(comparison, Console(), codecs)


def _plotter(path: Path) -> Callable[..., None]:
    """Return the function that draws, after checking that it can: the comparison may take minutes."""
    try:
        from netstorm.lab.commands.plan_plot import FORMATS, plot_comparison
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--plot needs {error.name}, which is not installed: pip install 'netstorm[plot]'"
        ) from error
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    return plot_comparison


def _compare(
    path: Path,
    *,
    model: str,
    topology: str,
    chunk: str,
    roots: int,
    hub: int,
    degree: int,
    custom: str,
    objective: str,
) -> Comparison:
    from netstorm.lab.commands.comparison import compare, scheme_names
    from netstorm.topology.files import load_network, tensors_of
    from netstorm.topology.form import Options
    from netstorm.topology.network import Rank
    from netstorm.units import parse_bytes

    scheme_names(topology, custom=bool(custom))  # report a wrong name first
    options = Options(
        num_roots=roots,
        hub=None if hub == -1 else Rank(hub),
        chunk_bytes=parse_bytes(chunk),
        tensors=tensors_of(model),
        degree=degree,
        custom=custom,
    )
    with _progress() as step:
        return compare(load_network(path), topology, options, step, objective=objective)


@contextmanager
def _progress() -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Show on standard error, if it is a terminal, the present step and its duration."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.file.isatty()) as progress:

        @contextmanager
        def step(name: str) -> Iterator[None]:
            task = progress.add_task(name, total=None)
            try:
                yield
            finally:
                progress.remove_task(task)

        yield step


# A comparison of schemes as text: tables and trees for people, a dictionary for programs.

_MOST_DRAWN: Final = 6
"""Most drawings of trees: a packing of 32 nodes has 60 trees."""
_LONG_CHAIN: Final = 3
"""Nodes below each other without a branch that are still drawn one in each line."""
_LARGEST_MATRIX: Final = 10
"""Nodes: more columns do not fit a terminal of 80."""
_MOST_LISTED: Final = 16
"""Links, where there is no room for a matrix."""
_BUSY: Final = ((0.9, "bold red"), (0.6, "yellow"), (0.0, "green"))


def to_json(comparison: Comparison, codecs: CodecPlan | None = None) -> dict[str, object]:
    """Return the comparison for JSON, in bytes and seconds."""
    return {
        "bytes": comparison.nbytes,
        "tensors": len(comparison.tensors),
        "chunk_bytes": comparison.chunk_bytes,
        "nodes": comparison.network.size,
        "optimum_s": comparison.optimum_s,
        "bound_s": comparison.bound.seconds,
        "certificate": comparison.bound.certificate(),
        "proof": {
            "sets": comparison.optimum.sets,
            "resources": [
                {"name": price.name, "bit_per_s": price.capacity, "share": price.share}
                for price in comparison.optimum.prices
            ],
        },
        "schemes": {name: _scheme(comparison, name) for name in comparison.outcomes},
        "front": comparison.front() if comparison.has_prices else None,
        "not_applicable": comparison.errors,
        **_choice(comparison, comparison.chosen[0]),
        "cheapest": _choice(comparison, comparison.chosen[1]) if comparison.chosen[1:] else None,
        "codecs": None
        if codecs is None
        else {"compute_s": codecs.compute_s, "times_s": codecs.times, "chosen": codecs.chosen},
    }


def _choice(comparison: Comparison, name: str) -> dict[str, object]:
    outcome = comparison.outcomes[name]
    return {
        "chosen": name,
        "reason": outcome.policy.reason,
        "trees": [
            {
                "share": share,
                "root": tree.root,
                "reduce_parent": tree.reduce_parent,
                "broadcast_parent": tree.broadcast_parent,
            }
            for share, tree in _by_share(outcome)
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
        "cost": outcome.cost if comparison.has_prices else None,
        "trees": len(outcome.policy.trees),
        "link_bytes": {use.name: round(use.nbytes) for use in outcome.uses},
    }


def print_comparison(comparison: Comparison, console: Console, codecs: CodecPlan | None = None) -> None:
    """Print the schemes, the codec if one was asked for, and links and trees of each that is chosen."""
    network = comparison.network
    count = len(comparison.tensors)
    console.print(
        f"{size_text(comparison.nbytes)} in {count} tensor{'s' * (count > 1)}, in chunks of "
        f"{format_bytes(comparison.chunk_bytes)}, among {network.size} nodes.\n"
        f"The optimum, in the fluid model: {time_text(comparison.optimum_s)}.",
        highlight=False,
    )
    if comparison.bound.reason:
        console.print(f"{comparison.bound.text()}.", highlight=False)
    console.print()
    console.print(_schemes(comparison))
    for name, error in comparison.errors.items():
        console.print(f"{name} does not apply: {error}", style="dim", highlight=False)
    if comparison.has_prices:
        front = [(name, comparison.outcomes[name]) for name in comparison.front()]
        texts = [f"{name} ({time_text(one.predicted_s)}, {one.cost:.3g})" for name, one in front]
        console.print(f"none is both faster and cheaper than {', '.join(texts)}", highlight=False)
    console.print()
    chosen = [(name, comparison.outcomes[name]) for name in comparison.chosen]
    titles = ("fastest", "cheapest") if chosen[1:] else ("chosen",)
    for title, (name, outcome) in zip(titles, chosen, strict=True):
        console.print(Text.assemble(f"{title}: ", (name, "bold green"), f" ({outcome.policy.reason})"))
    if chosen[1:]:
        (_, fast), (_, cheap) = chosen
        longer, saved = cheap.predicted_s / fast.predicted_s, 1 - cheap.cost / fast.cost
        text = f"the cheapest takes {longer:.2f} × as long and costs {saved:.0%} less"
        console.print(text, highlight=False)
    if codecs is not None:
        times = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in codecs.times.items())
        fits = codecs.times[codecs.chosen] <= codecs.compute_s
        why = "which takes no longer" if fits else "the fastest, since all take longer"
        text = f" ({why}). A step computes for {time_text(codecs.compute_s)}; its sums take: {times}"
        console.print(Text.assemble("compression: ", (codecs.chosen, "bold green"), text))
    for name, outcome in chosen:
        console.print()
        if chosen[1:]:
            console.print(f"[bold green]{name}[/]:")
        _print_links(network, outcome, console)
        console.print()
        _print_trees(network, outcome, console)


def _schemes(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("scheme", no_wrap=True)
    for heading in (
        "trees",
        "predicted",
        *(f"× {name}" for name in BASELINES),
        "fluid",
        "of optimum",
        "cost" if comparison.has_prices else "formed in",  # there is no room for both
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
            f"{outcome.cost:.3g}" if comparison.has_prices else time_text(outcome.formation_s),
            style="bold green" if name in comparison.chosen else "",
        )
    return table


def _print_links(network: Network, outcome: SchemeOutcome, console: Console) -> None:
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


def _print_trees(network: Network, outcome: SchemeOutcome, console: Console) -> None:
    trees = _by_share(outcome)
    directed = any(tree.reduce_parent != tree.broadcast_parent for _, tree in trees)
    drawn = trees[: _MOST_DRAWN // 2 if directed else _MOST_DRAWN]
    console.print(Columns(_drawings(network, drawn), padding=(1, 3)))
    if len(trees) > len(drawn):
        share = sum(share for share, _ in trees[len(drawn) :])
        console.print(
            f"and {len(trees) - len(drawn)} more, with {format_fraction(share)} of the bytes together "
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


def _by_share(outcome: SchemeOutcome) -> list[tuple[float, Tree]]:
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
