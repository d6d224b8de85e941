"""The `netstorm` command. Each subcommand is a module of its own, which is imported when it is run.

A subcommand is one line in `COMMANDS`, and a function of the same name in `netstorm.cli.NAME` or, for those
of `MODULES`, where that says. The function's parameters are its options, as typer reads them. So
`netstorm --help` imports neither ZeroMQ nor NumPy.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from netstorm import __version__

__all__ = ["COMMANDS", "app", "function_of"]

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "launch": "Start a scheduler and N nodes, and run the job to its end.",
        "demo": "Train between four data centres that are emulated on this machine.",
        "new": "Write a training script to start from, for PyTorch, MXNet or NumPy.",
        "scheduler": "Run the scheduler of one job until all its nodes have left.",
        "top": "Show a running job: nodes, links, trees, times, and why the policy changed.",
        "dashboard": "Show jobs in a browser: the network, trees, curves and events, live or recorded.",
        "record": "Record what a scheduler says of its jobs, for netstorm dashboard and report.",
        "report": "Make one HTML file of a recording, which shows it in any browser.",
        "simulate": "Simulate how long a round takes under each scheme, over many networks.",
        "bench": "Run a benchmark of a checkout, such as real systems on an emulated network.",
        "plan": "Compare topologies on a network: time, traffic, distance from the optimum.",
        "wan": "Emulate a network on this machine, in namespaces, for any program.",
        "checkpoint": "Show the checkpoints of a job, or convert those of a former format.",
        "keys": "Make the key of a job, or of one of its nodes.",
        "doctor": "Find what is wrong with hosts, or between them, or was with a job; and what to do.",
        "check": "Check an installation: two ranks form a sum, with each framework.",
        "env": "Print every setting, its value and its source.",
    }
)
"""Subcommand to its line in `netstorm --help`, in the order in which users should meet them."""


MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "launch": "netstorm.cli.launch.command",
        "report": "netstorm.cli.record",
        "doctor": "netstorm.cli.doctor.command",
        "plan": "netstorm.lab.commands.plan",
        "demo": "netstorm.lab.commands.demo",
        "simulate": "netstorm.lab.commands.simulate",
        "bench": "netstorm.lab.commands.bench",
        "wan": "netstorm.lab.commands.wan",
    }
)
"""The modules of subcommands that are not `netstorm.cli.NAME`."""


def function_of(name: str) -> Any:
    """Return what `netstorm NAME` runs: a function, or a `typer.Typer` that has subcommands."""
    return getattr(_module_of(name), name)


def _module_of(name: str) -> ModuleType:
    return import_module(MODULES.get(name, f"netstorm.cli.{name}"))


class LazyGroup(TyperGroup):
    """A group that knows its subcommands' names and help, and imports the one that is run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that the command line names, ready to run; usage errors are typer's."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(name), rest


@functools.cache
def _load(name: str | None) -> Any:
    if name is None:  # typer has found no such subcommand, and says so itself
        return None
    function = function_of(name)
    if isinstance(function, typer.Typer):  # a subcommand that has subcommands
        return typer.main.get_command(function)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, help=function.__doc__, context_settings=getattr(_module_of(name), "CONTEXT", None))(
        function
    )
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback is for a bug report: plain, complete, without colours
    help="Data-parallel training across data centres, along topologies that follow the network.",
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"netstorm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options that come before the subcommand."""
    del version  # its callback has printed it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 shows "?" for what it lacks
            stream.reconfigure(errors="replace")
