"""`netstorm bench`: run a benchmark of a checkout. They are scripts beside the package, not part of it."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm.cli.support import exit_on_usage_error
from netstorm.errors import UsageError

__all__ = ["CONTEXT", "bench"]

CONTEXT: Final = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""For typer: all options after the benchmark's name are the benchmark's, --help too."""


def bench(
    *,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="NAME [OPTIONS]", help="wan, loopback, train, ...")
    ] = None,
) -> None:
    """Run a benchmark of a checkout. Without a name, or with --help, its benchmarks are listed.

    \b
      netstorm bench wan examples/networks/internet2.yaml --systems mxnet-star-best,gloo,netstorm-packing
      netstorm bench wan --help
    """
    with exit_on_usage_error():
        name, *rest = arguments or ["--help"]
        folder = _folder()
        known = sorted(path.stem for path in folder.glob("*.py") if path.read_bytes().startswith(b"#!"))
        if name in ("--help", "-h"):
            about = inspect.cleandoc(bench.__doc__ or "").replace("\b\n", "")
            usage = f"Usage: netstorm bench NAME [OPTIONS]\n\n{about}\n"
            typer.echo(f"{usage}\nBenchmarks in {folder}: {', '.join(known)}")
            return
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {close[0]}? There are" if close else "there are"
            raise UsageError(f"no benchmark {name!r} in {folder}; {meant} {', '.join(known)}")
        _become([sys.executable, str(folder / f"{name}.py"), *rest])


def _folder() -> Path:
    """Return the benchmarks of the checkout that this package, or the working directory, belongs to."""
    places = [Path(__file__).parents[3] / "benchmarks", Path.cwd() / "benchmarks"]
    for place in places:
        if (place / "wan.py").is_file():
            return place
    raise UsageError(
        "netstorm bench needs a checkout of NetStorm: benchmarks/ is not part of the installed package; "
        f"there is none at {places[0].parent}, nor in the working directory; "
        "git clone it, and run netstorm bench in it"
    )


def _become(command: list[str]) -> None:
    """Replace this process by the benchmark, so that signals and the exit code are its own."""
    from netstorm.settings import child_environment

    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, child_environment().get("PYTHONPATH", "").split(os.pathsep))]
    sys.stdout.flush()
    os.execve(command[0], command, child_environment(PYTHONPATH=os.pathsep.join(paths)))
