"""How a subcommand reports a usage error: one line on standard error and an exit code, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from netstorm.errors import UsageError

__all__ = ["USAGE_ERROR", "exit_on_usage_error"]

USAGE_ERROR: Final = 2
"""Exit code when the user's settings or arguments are wrong: as getopt and typer do."""


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Turn a `UsageError` into its message and exit code 2."""
    try:
        yield
    except UsageError as error:
        typer.echo(f"netstorm: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from error
