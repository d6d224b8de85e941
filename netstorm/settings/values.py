"""All settings of one process: how they are read from the environment, checked and passed to children."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from netstorm.settings.conflicts import conflicts
from netstorm.settings.kinds import Declaration, Source
from netstorm.settings.problems import not_allowed, raise_problems, unknown_name
from netstorm.settings.rendezvous import with_standbys
from netstorm.settings.sections import Sections

__all__ = ["Settings", "Source", "declarations", "unknown_variables"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings(Sections):
    """All settings of one process. Values are checked on construction.

    Raises:
        SettingsError: names every wrong value, where it came from and what is allowed.
    """

    sources: Mapping[str, Source] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """Where each value came from, by attribute. A value that is not listed was given to the constructor."""

    def __post_init__(self) -> None:
        problems = [
            not_allowed(name, declaration, getattr(self, name), self.source(name))
            for name, declaration in declarations().items()
            if not declaration.kind.fits(getattr(self, name))
        ]
        raise_problems(problems or conflicts(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
        """Read the settings of this process. Unknown variables `NETSTORM_*` are logged.

        Args:
            environ: variables; this process's if None. An empty variable counts as not set, because scripts
                export empty ones.
            overrides: values by attribute, typed or as text; they win over variables. None means not given.

        Raises:
            SettingsError: names every wrong value, where it came from and what is allowed.
        """
        environ = with_standbys(os.environ if environ is None else environ)
        known = declarations()
        problems = [unknown_name("argument", name, known) for name in overrides if name not in known]
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for name, declaration in known.items():
            given, sources[name] = _given(name, declaration, environ, overrides)
            try:
                values[name] = declaration.kind.read(given)
            except ValueError:
                problems.append(not_allowed(name, declaration, given, sources[name]))
        raise_problems(problems)
        for problem in unknown_variables(environ):
            _logger.warning("%s", problem)
        return cls(**values, sources=sources)

    def changed(self, **overrides: object) -> Settings:
        """Return a copy with these values, typed or as text; their source becomes "argument"."""
        copy = Settings.from_environment(self.as_variables(), **overrides)
        kept = {name: self.source(name) for name in declarations() if overrides.get(name) is None}
        return dataclasses.replace(copy, sources={**copy.sources, **kept})

    def source(self, name: str) -> Source:
        """Return where the value of an attribute came from."""
        untouched = getattr(self, name) == declarations()[name].default
        return self.sources.get(name, "default" if untouched else "argument")

    def as_variables(self) -> dict[str, str]:
        """Return the variables that give another process these settings, without defaults."""
        return {
            declaration.variable: declaration.kind.write(getattr(self, name))
            for name, declaration in declarations().items()
            if getattr(self, name) != declaration.default
        }


_DECLARATIONS: Final[Mapping[str, Declaration]] = MappingProxyType(
    {field.name: field.metadata["declaration"] for field in dataclasses.fields(Settings) if field.metadata}
)


def declarations() -> Mapping[str, Declaration]:
    """Return the declaration of each setting, by attribute, in the order in which users should meet them."""
    return _DECLARATIONS


def unknown_variables(environ: Iterable[str] | None = None) -> list[str]:
    """Return a message for each variable `NETSTORM_*` that is no setting: it is probably misspelled."""
    known = [declaration.variable for declaration in declarations().values()]
    names = os.environ if environ is None else environ
    return [
        unknown_name("variable", name, known)
        for name in names
        if name.startswith("NETSTORM_") and name not in known
    ]


def _given(
    name: str, declaration: Declaration, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> tuple[object, Source]:
    if overrides.get(name) is not None:
        return overrides[name], "argument"
    text = environ.get(declaration.variable, "").strip()
    return (text, "environment") if text else (declaration.default, "default")
