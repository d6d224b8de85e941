"""`netstorm keys`: makes the key of a job, or of one of its nodes, and shows the public part of a node's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm.cli.support import exit_on_usage_error

__all__ = ["keys"]

keys: Final = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Make the key that lets processes take part in a job.",
)


@keys.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to make; it must not exist.")],
    *,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Make the key of one node of this name, for lists of NETSTORM_ALLOW."
        ),
    ] = None,
    scheduler: Annotated[
        bool, typer.Option("--scheduler", help="Make the key of a job's schedulers: NETSTORM_SCHEDULER_KEY.")
    ] = False,
) -> None:
    """Make a key, in a file that only you can read.

    \b
      netstorm keys new job.key
      netstorm keys new --node tokyo tokyo.key >> nodes.allow

    Without --node it is a job's key: copy it to every host, and set NETSTORM_KEY_FILE to the copy for the
    scheduler and all nodes. Whoever has it can take part in the job.

    With --node it is a node's own key, for its NETSTORM_NODE_KEY. The line that is printed has no secret: it
    belongs into the file that NETSTORM_ALLOW names.

    With --scheduler it is the key of a job's schedulers, for NETSTORM_SCHEDULER_KEY of the first one, and of
    those that may take the job over. No node gets it.

    The exit code is 2 if the file exists or cannot be written.
    """
    from netstorm.errors import UsageError
    from netstorm.pslite.keys import JobKey, NodeKey, SchedulerKey

    with exit_on_usage_error():
        if scheduler:
            if node is not None:
                raise UsageError(f"--scheduler with --node {node}: expected one of them")
            SchedulerKey.create(file)
            what = "the key of a job's schedulers; set NETSTORM_SCHEDULER_KEY to it for them alone"
        elif node is None:
            JobKey.create(file)
            what = "the job's key; set NETSTORM_KEY_FILE to it, or to a copy, for the scheduler and all nodes"
        else:
            typer.echo(NodeKey.create(file, node).line)
            what = f"the key of node {node}; set NETSTORM_NODE_KEY to it there"
    typer.echo(f"netstorm: {file} (mode 0600): {what}", err=True)


@keys.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A node's key.")],
) -> None:
    """Print the line of an allow list that admits a node's key. It has no secret.

    The exit code is 2 if the file is no node's key, or others can read it.
    """
    from netstorm.pslite.keys import NodeKey

    with exit_on_usage_error():
        typer.echo(NodeKey.load(file).line)
