"""The table of settings: one row each, for `netstorm env` and docs/reference/settings.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from netstorm.settings.values import Settings, Source, declarations, unknown_variables

__all__ = ["SettingRow", "describe", "notes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting as `netstorm env` shows it."""

    name: str
    """The attribute of `Settings`, and the argument that overrides the variable."""
    variable: str
    value: object
    value_text: str
    source: Source
    default: object
    default_text: str
    unit: str
    allowed: str
    meaning: str


def describe(settings: Settings) -> list[SettingRow]:
    """Return a row for each setting."""
    return [
        SettingRow(
            name=name,
            variable=declaration.variable,
            value=getattr(settings, name),
            value_text=declaration.kind.display(getattr(settings, name)),
            source=settings.source(name),
            default=declaration.default,
            default_text=declaration.kind.display(declaration.default),
            unit=declaration.unit,
            allowed=declaration.kind.allowed,
            meaning=declaration.meaning,
        )
        for name, declaration in declarations().items()
    ]


def notes(settings: Settings, environ: Iterable[str] | None = None) -> list[str]:
    """Return warnings: settings that are allowed, but probably do not do what the user expects.

    Args:
        settings: the settings of this process.
        environ: names of the variables that are set; this process's if None.
    """
    found = unknown_variables(environ)
    if settings.num_servers:
        found.append(
            f"DMLC_NUM_SERVER={settings.num_servers} is ignored: there are no servers, every node aggregates"
        )
    return found
