"""`netstorm simulate`: how long a round takes under each scheme, over many networks."""

from __future__ import annotations

import enum
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from netstorm.cli.usage_errors import exit_on_usage_error
from netstorm.errors import UsageError

if TYPE_CHECKING:
    from netstorm.cli.simulate.study import Study, StudyOptions

__all__ = ["simulate"]

_NODES: Final = 9
_FAMILY: Final = "mesh"
_SEEDS: Final = 10
_MOST_NODES: Final = 1024
"""A full mesh of more has over a million links."""

_STDOUT: Final = "-"
_INTERRUPTED: Final = 130


class EngineName(enum.Enum):
    """Values of --engine."""

    AUTO = "auto"
    CLUSTER = "cluster"
    PREDICTOR = "predictor"


def simulate(
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--nodes",
            metavar="N",
            help=f"Nodes of a generated network. Default: {_NODES}.",
            show_default=False,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Generated networks: mesh, internet2, cloud or asymmetric. Default: {_FAMILY}.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"How many networks, of seeds 0 to N-1. Default: {_SEEDS}; with --network 1.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network file, instead of generated networks.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Tensors of a round: a size, alexnet, resnet50, or a model.json."),
    ] = "244MB",
    topology: Annotated[
        str, typer.Option(metavar="NAMES", help="Schemes, separated by commas; all: each that needs no file.")
    ] = "all",
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Size of the largest chunk.")] = "1MB",
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of rounds, one after the other.")
    ] = 1,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="cluster: real nodes and the real scheduler on virtual time; predictor: for sizes beyond it."
        ),
    ] = EngineName.AUTO,
    limit: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit of a scheme for one network.")
    ] = "120s",
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write JSON to this file; -: print JSON only."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the times: .png, .svg or .pdf (needs matplotlib)."),
    ] = None,
) -> None:
    """Simulate or predict how long a round takes under each scheme, over many networks.

    \b
      netstorm simulate --nodes 9 --family internet2 --seeds 10
      netstorm simulate --nodes 512 --family cloud --topology fapt,star --json out.json
      netstorm simulate --network wan.yaml --model alexnet --rounds 20 --plot out.png

    Policies are formed for the network as it is at its start, and do not change. A scheme that exceeds the
    limit for one network is left out from then on; the output says so.

    The exit code is 1 if a scheme failed or there are no times, 2 if the arguments are wrong, 130 after
    Ctrl-C, which prints the results so far.
    """
    with exit_on_usage_error():
        options = _study_options(
            nodes=nodes, family=family, seeds=seeds, network=network, model=model, topology=topology,
            chunk=chunk, rounds=rounds, engine=engine, limit=limit,
        )  # fmt: skip
        if plot is not None:
            from netstorm.cli.simulate.plot import check

            check(plot)
        if json_file not in (None, _STDOUT) and not Path(str(json_file)).parent.is_dir():
            raise UsageError(f"--json {json_file}: there is no folder {Path(str(json_file)).parent}")
        study = _run(options)
        _report(study, json_file, plot)
    raise typer.Exit(_INTERRUPTED if study.interrupted else int(study.failed))


def _run(options: StudyOptions) -> Study:
    from netstorm.cli.simulate.report import progress
    from netstorm.cli.simulate.study import Study
    from netstorm.cli.simulate.worker_process import WorkerProcess

    study = Study(options)
    try:
        with closing(WorkerProcess()) as worker, progress(options.cases) as on_case:
            study.run(worker, on_case)
    except KeyboardInterrupt:
        study.interrupted = True
    return study


def _report(study: Study, json_file: str | None, plot: Path | None) -> None:
    import json

    from rich.console import Console

    from netstorm.cli.simulate.report import show

    text = json.dumps(study.as_json(), indent=2)
    if json_file == _STDOUT:
        typer.echo(text)
    else:
        show(study, Console())
    if json_file not in (None, _STDOUT):
        try:
            Path(str(json_file)).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {json_file}: cannot be written: {error.strerror}") from None
    if plot is not None and any(study.times(name) for name in study.options.topologies):
        from netstorm.cli.simulate.plot import plot as draw

        draw(study, plot)


def _study_options(
    *,
    nodes: int | None,
    family: str | None,
    seeds: int | None,
    network: Path | None,
    model: str,
    topology: str,
    chunk: str,
    rounds: int,
    engine: EngineName,
    limit: str,
) -> StudyOptions:
    from netstorm.cli.simulate.study import StudyOptions
    from netstorm.simulation.experiment import Engine, Experiment, choose_engine
    from netstorm.topology.files import load_network, tensors_of
    from netstorm.topology.network import FAMILIES
    from netstorm.units import parse_bytes, parse_duration

    changing = False
    if network is not None:
        for name, value in (("--nodes", nodes), ("--family", family)):
            if value is not None:
                raise UsageError(f"{name} {value} with --network {network}: expected one or the other")
        stored = load_network(network)
        size, changing = stored.size, bool(stored.changes)
    else:
        family, size = family or _FAMILY, _NODES if nodes is None else nodes
        if family not in FAMILIES:
            raise UsageError(f"--family {family!r}: expected one of {', '.join(FAMILIES)}")
        if not 2 <= size <= _MOST_NODES:
            raise UsageError(f"--nodes {size}: expected 2 to {_MOST_NODES}")
    limit_s = parse_duration(limit)
    if limit_s <= 0:
        raise UsageError(f"--limit {limit}: expected more than 0")
    experiment = Experiment(tensors=tensors_of(model), chunk_bytes=parse_bytes(chunk), rounds=rounds)
    used, reason = choose_engine(size, experiment)
    if engine is not EngineName.AUTO:
        used, reason = Engine(engine.value), "asked for"
    if used is Engine.CLUSTER:
        _check_memory(size, experiment.bytes)
    return StudyOptions(
        family=family,
        path=None if network is None else str(network),
        nodes=size,
        seeds=tuple(range(seeds or (1 if network is not None else _SEEDS))),
        changing=changing,
        topologies=_topologies(topology),
        experiment=experiment,
        engine=used,
        engine_reason=reason,
        limit_s=limit_s,
    )


def _check_memory(nodes: int, nbytes: int) -> None:
    import psutil

    from netstorm.units import format_bytes

    needed, free = 3 * nodes * nbytes, psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"--engine cluster: {nodes} nodes that sum {format_bytes(nbytes)} of real numbers need about "
            f"{needed / 1e9:.3g}GB of memory, of which {free / 1e9:.3g}GB is free: "
            "expected --engine predictor, fewer nodes or a smaller --model"
        )


def _topologies(text: str) -> tuple[str, ...]:
    from netstorm.topology.form import SCHEMES

    fit = [name for name in SCHEMES if name != "custom"]  # it needs a file of its own
    if text == "all":
        return tuple(fit)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in fit:
            raise UsageError(f"--topology {name!r}: expected all, or some of {', '.join(fit)}")
    return names
