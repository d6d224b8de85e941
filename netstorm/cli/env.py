"""`netstorm env`: every setting, its value, and where the value came from."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from netstorm.cli.usage_errors import exit_on_usage_error
from netstorm.settings import Settings
from netstorm.settings.table import SettingRow, describe, notes

__all__ = ["env", "markdown_page"]


def env(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print docs/settings.md: the defaults, whatever the environment says."
        ),
    ] = False,
) -> None:
    """Print every setting, its value and its source.

    The exit code is 2 if a setting is wrong.
    """
    if as_markdown:
        typer.echo(markdown_page(), nl=False)
        return
    with exit_on_usage_error():
        settings = Settings.from_environment()
    if as_json:
        typer.echo(_json(settings))
    else:
        _print_table(describe(settings))
        for note in notes(settings):
            typer.echo(f"note: {note}", err=True)


def markdown_page() -> str:
    """Return docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Made by `netstorm env --markdown > docs/settings.md`. A test fails if it is stale. -->",
        "",
        "Every setting is an environment variable; an argument of the same meaning wins over it. A wrong one",
        "stops the program at once, and names the variable, the value and what is allowed. An empty variable",
        "counts as not set. `netstorm env` prints the values in force, and where each came from.",
        "",
        "| variable | default | unit | meaning | allowed |",
        "|---|---|---|---|---|",
    ]
    for row in describe(Settings()):
        default = f"`{row.default_text}`" if row.default_text else "empty"
        cells = (f"`{row.variable}`", default, row.unit, row.meaning, row.allowed)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _json(settings: Settings) -> str:
    rows = [dataclasses.asdict(row) for row in describe(settings)]
    return json.dumps({"settings": rows, "notes": notes(settings)}, indent=2)


def _print_table(rows: list[SettingRow]) -> None:
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("setting", ratio=1, min_width=30)
    for heading in ("value", "from", "default", "unit"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        changed = row.source != "default"
        name = Group(Text(row.variable, style="bold"), Padding(Text(row.meaning, style="dim"), (0, 0, 0, 2)))
        value = Text(row.value_text or "(empty)", style="bold green" if changed else "")
        table.add_row(name, value, row.source, row.default_text or "(empty)", row.unit)
    Console().print(table)
