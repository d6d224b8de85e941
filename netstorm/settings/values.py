"""All settings of one process: how they are read from the environment, checked and passed to children."""

from __future__ import annotations

import dataclasses
import difflib
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

__all__ = ["WITHOUT_EFFECT", "Settings", "Source", "declarations", "unknown_variables"]

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
        """Read the settings of this process. Variables that are probably meant as settings are
        logged.

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


_OTHERS_PREFIXES: Final = ("ENABLE_", "DMLC_", "PS_", "MXNET_KVSTORE_")
"""Of settings whose names are older than NetStorm. Other programs have variables that begin so, too."""

_LIKE: Final = 0.85
"""How like a setting's name one with such a prefix must be, to be a misspelling of it (difflib's ratio)."""

WITHOUT_EFFECT: Final = frozenset(
    {
        "ADAPTIVE_K_FLAG", "DMLC_ENABLE_CENTRAL_WORKER", "DMLC_LOCAL", "DMLC_NUM_ALL_WORKER",
        "DMLC_NUM_GLOBAL_SERVER", "DMLC_NUM_GLOBAL_WORKER", "DMLC_PS_GLOBAL_ROOT_PORT",
        "DMLC_PS_GLOBAL_ROOT_URI", "DMLC_PS_VAN_TYPE", "DMLC_PS_WATER_MARK", "DMLC_RANK", "DMLC_ROLE_GLOBAL",
        "DMLC_ROLE_MASTER_WORKER", "DMLC_UDP_CHANNEL_NUM", "ENABLE_INTER_TS", "ENABLE_INTRA_TS", "ENABLE_P3",
        "MAX_GREED_RATE_TS", "MXNET_ENABLE_GPU_P2P", "MXNET_KVSTORE_BIGARRAY_BOUND",
        "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE", "MXNET_KVSTORE_LOGTREE",
        "MXNET_KVSTORE_REDUCTION_NTHREADS", "MXNET_KVSTORE_SERIAL_PUSH",
        "MXNET_KVSTORE_SLICE_THRESHOLD", "MXNET_KVSTORE_TREE_ARRAY_BOUND", "MXNET_KVSTORE_TREE_BACKTRACK",
        "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY", "MXNET_KVSTORE_USETREE", "PS_DROP_MSG", "PS_RESEND",
        "PS_RESEND_TIMEOUT",
    }
)  # fmt: skip
"""Variables of MXNet and GeoMX that their users may have set, and that do nothing here. What there is instead
say docs/guides/moving-from-dist-sync.md and docs/guides/geomx.md."""


def unknown_variables(environ: Iterable[str] | None = None) -> list[str]:
    """Return a message for each variable that is no setting and is probably a misspelled one, and one for all
    that have no effect here.
    """
    known = [declaration.variable for declaration in declarations().values()]
    names = [name for name in (os.environ if environ is None else environ) if name not in known]
    problems = [
        unknown_name("variable", name, known)
        for name in names
        if name.startswith("NETSTORM_") or (name not in WITHOUT_EFFECT and _is_misspelled(name, known))
    ]
    idle = sorted(WITHOUT_EFFECT.intersection(names))
    if idle:
        problems.append(
            f"{', '.join(idle)}: without effect here; docs/guides/moving-from-dist-sync.md and "
            "docs/guides/geomx.md say what there is instead"
        )
    return problems


def _is_misspelled(name: str, known: Iterable[str]) -> bool:
    return any(
        name.startswith(prefix)
        and difflib.get_close_matches(name, [one for one in known if one.startswith(prefix)], 1, _LIKE)
        for prefix in _OTHERS_PREFIXES
    )


def _given(
    name: str, declaration: Declaration, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> tuple[object, Source]:
    if overrides.get(name) is not None:
        return overrides[name], "argument"
    text = environ.get(declaration.variable, "").strip()
    return (text, "environment") if text else (declaration.default, "default")
