"""`netstorm new`: writes a training script to start from."""

from __future__ import annotations

import shlex
from enum import Enum
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm.cli.support import exit_on_usage_error
from netstorm.errors import UsageError

__all__ = ["Framework", "new"]


class Framework(str, Enum):
    """What a script trains with."""

    TORCH = "torch"
    MXNET = "mxnet"
    NUMPY = "numpy"


_NAMES: Final = {Framework.TORCH: "PyTorch", Framework.MXNET: "MXNet", Framework.NUMPY: "NumPy"}

_INSTALL: Final = {"torch": "'netstorm[torch]'", "mxnet": "'netstorm[mxnet]'", "sklearn": "scikit-learn"}
"""By module, what pip installs; NumPy comes with NetStorm."""


def new(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="File to write, such as train.py.")],
    *,
    framework: Annotated[
        Framework | None,
        typer.Option(
            help="What it trains with. Default: the first of these that is installed.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
) -> None:
    """Write a training script to start from.

    \b
      netstorm new train.py --framework torch
      netstorm launch -n 3 -- python train.py

    It trains a small network on scikit-learn's digits, each rank with its share of them. Put your own data
    and model in their place.

    The exit code is 2 if the file cannot be written, or is there already.
    """
    with exit_on_usage_error():
        chosen = framework or next(each for each in Framework if find_spec(each.value))
        template = resources.files("netstorm.cli") / "templates" / f"{chosen.value}.txt"
        text, is_new = template.read_text(encoding="utf-8"), not script.exists()
        try:
            with script.open("w" if force else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError(f"{script} is there already: give another name, or --force") from None
        except OSError as error:
            if is_new:  # the disk is full
                script.unlink(missing_ok=True)
            raise UsageError(
                f"{script} cannot be written ({error.strerror}): expected the name of a new file, in a "
                "folder that is there"
            ) from None
    typer.echo(f"{script}: trains a small network on scikit-learn's digits, with {_NAMES[chosen]}")
    needed = [module for module in (chosen.value, "sklearn") if find_spec(module) is None]
    if missing := [_INSTALL[module] for module in needed]:
        typer.echo(f"install what it needs: pip install {' '.join(missing)}")
    typer.echo(f"run it: netstorm launch -n 3 -- python {shlex.quote(str(script))}")
