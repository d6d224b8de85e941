"""`netstorm plan`: which topology suits a network, before anything runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from netstorm.cli.usage_errors import exit_on_usage_error
from netstorm.errors import UsageError

if TYPE_CHECKING:
    from netstorm.cli.plan.compare import Comparison

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
        int, typer.Option(metavar="N", min=0, help="Number of roots of fapt; 0: all nodes.")
    ] = 0,
    hub: Annotated[
        int, typer.Option(metavar="RANK", min=-1, help="Rank of a star's hub; -1: the best placed.")
    ] = -1,
    custom: Annotated[
        str, typer.Option(metavar="FILE", help="YAML file with the trees of --topology custom.")
    ] = "",
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
    fluid model. Then it prints the bytes on each link, and the trees, of the chosen scheme.

    The exit code is 2 if a file or an option is wrong.
    """
    from netstorm.cli.plan.codecs import plan_codec

    with exit_on_usage_error():
        draw = None if plot is None else _plotter(plot)
        comparison = _compare(
            network, model=model, topology=topology, chunk=chunk, roots=roots, hub=hub, custom=custom
        )
        codecs = plan_codec(comparison, compute) if compute else None
        if draw is not None and plot is not None:
            draw(comparison, plot, title=f"{network.name}, {model}")
    if as_json:
        import json

        from netstorm.cli.plan.text import as_json as to_json

        typer.echo(json.dumps(to_json(comparison, codecs), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from netstorm.cli.plan.text import print_comparison

        print_comparison(comparison, Console(), codecs)


def _plotter(path: Path) -> Callable[..., None]:
    """Return the function that draws, after checking that it can: the comparison may take minutes."""
    try:
        from netstorm.cli.plan.plot import FORMATS, plot_comparison
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
    path: Path, *, model: str, topology: str, chunk: str, roots: int, hub: int, custom: str
) -> Comparison:
    from netstorm.cli.plan.compare import compare, scheme_names
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
        custom=custom,
    )
    with _progress() as step:
        return compare(load_network(path), topology, options, step)


@contextmanager
def _progress() -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Show on standard error, if it is a terminal, the present step and its duration."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        @contextmanager
        def step(name: str) -> Iterator[None]:
            task = progress.add_task(name, total=None)
            try:
                yield
            finally:
                progress.remove_task(task)

        yield step
