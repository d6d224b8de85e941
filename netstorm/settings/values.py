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

from netstorm.errors import UsageError
from netstorm.settings.declare import Declaration, Source, not_allowed, raise_problems, unknown_name
from netstorm.settings.sections import (
    Sections,
    completed,
    conflicts,
    preset_values,
    with_num_nodes,
    with_standbys,
)

__all__ = [
    "FOREIGN_VARIABLES",
    "WITHOUT_EFFECT",
    "SettingRow",
    "Settings",
    "Source",
    "child_environment",
    "declarations",
    "describe",
    "foreign_variable",
    "notes",
    "set_for_children",
    "unknown_variables",
]


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
                What is not given either way is as NETSTORM_PRESET says.

        Raises:
            SettingsError: names every wrong value, where it came from and what is allowed.
        """
        environ = with_standbys(os.environ if environ is None else environ)
        known = declarations()
        preset = str(_given("preset", known["preset"], environ, overrides, {})[0])
        environ = with_num_nodes(environ, preset)
        problems = [unknown_name("argument", name, known) for name in overrides if name not in known]
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for name, declaration in known.items():
            given, sources[name] = _given(name, declaration, environ, overrides, preset_values(preset))
            try:
                values[name] = declaration.kind.read(given)
            except ValueError:
                problems.append(not_allowed(name, declaration, given, sources[name]))
        raise_problems(problems)
        completed(values, {name for name, source in sources.items() if source == "preset"})
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
        preset = preset_values(self.preset)
        return {
            declaration.variable: declaration.kind.write(getattr(self, name))
            for name, declaration in declarations().items()
            if getattr(self, name) != declaration.default or name in preset
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

_INSTEAD: Final = {
    "each node's data centre is its NETSTORM_SITE, and one scheduler has the whole job": (
        "DMLC_ENABLE_CENTRAL_WORKER", "DMLC_NUM_GLOBAL_SERVER", "DMLC_NUM_GLOBAL_WORKER",
        "DMLC_PS_GLOBAL_ROOT_PORT", "DMLC_PS_GLOBAL_ROOT_URI",
    ),
    "trees follow what nodes measure (ENABLE_AWARENESS)": ("ENABLE_INTER_TS", "ENABLE_INTRA_TS"),
    "NETSTORM_EXPLORE_SHARE says how much is explored": ("MAX_GREED_RATE_TS",),
    "keys are cut into chunks (CHUNK_SIZE), and higher priorities go first on every link": (
        "ENABLE_P3", "MXNET_KVSTORE_BIGARRAY_BOUND", "MXNET_KVSTORE_SLICE_THRESHOLD",
    ),
    "the transport is ZeroMQ over TCP, which delivers exactly once; NETSTORM_WINDOW bounds its memory": (
        "DMLC_LOCAL", "DMLC_PS_VAN_TYPE", "DMLC_PS_WATER_MARK", "PS_DROP_MSG", "PS_RESEND",
        "PS_RESEND_TIMEOUT",
    ),
    "NETSTORM_RANK asks for a rank": ("DMLC_RANK",),
    "MXNet's operators add up the arrays of devices": (
        "MXNET_ENABLE_GPU_P2P", "MXNET_KVSTORE_LOGTREE", "MXNET_KVSTORE_REDUCTION_NTHREADS",
        "MXNET_KVSTORE_SERIAL_PUSH", "MXNET_KVSTORE_TREE_ARRAY_BOUND", "MXNET_KVSTORE_TREE_BACKTRACK",
        "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY", "MXNET_KVSTORE_USETREE",
    ),
    "PS_VERBOSE says what is logged": ("MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE",),
}  # fmt: skip
"""What does the job here of variables of MXNet and GeoMX that do nothing; more in the guides
moving-from-dist-sync.md and geomx.md."""

WITHOUT_EFFECT: Final = frozenset(name for names in _INSTEAD.values() for name in names)
"""Variables of MXNet and GeoMX that their users may have set, and that do nothing here."""


def unknown_variables(environ: Iterable[str] | None = None) -> list[str]:
    """Return a message for each variable that is no setting and is probably a misspelled one, and one for
    those without effect that the same replaces.
    """
    known = [declaration.variable for declaration in declarations().values()]
    names = [name for name in (os.environ if environ is None else environ) if name not in known]
    problems = [
        unknown_name("variable", name, known)
        for name in names
        if name.startswith("NETSTORM_") or (name not in WITHOUT_EFFECT and _is_misspelled(name, known))
    ]
    for instead, idle in _INSTEAD.items():
        if given := [name for name in idle if name in names]:
            problems.append(f"{', '.join(given)}: without effect here; {instead}")
    return problems


def _is_misspelled(name: str, known: Iterable[str]) -> bool:
    return any(
        name.startswith(prefix)
        and difflib.get_close_matches(name, [one for one in known if one.startswith(prefix)], 1, _LIKE)
        for prefix in _OTHERS_PREFIXES
    )


def _given(
    name: str,
    declaration: Declaration,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
    preset: Mapping[str, str],
) -> tuple[object, Source]:
    if overrides.get(name) is not None:
        return overrides[name], "argument"
    if text := environ.get(declaration.variable, "").strip():
        return text, "environment"
    return (preset[name], "preset") if name in preset else (declaration.default, "default")


# The environment of child processes, and the variables of other programs that NetStorm reads.

# Variables of other programs whose values matter here, each with the reason.
FOREIGN_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MXNET_ENGINE_TYPE": "under NaiveEngine MXNet's operations block, so they cannot overlap",
        "RANK": "PyTorch's rank of this process, for which an elastic job has a place; also NumPy's",
        "LOCAL_RANK": "which of a machine's nodes this one is, so that they share no port",
        "WORLD_SIZE": "PyTorch's number of ranks; a group of fewer has a scheduler of its own; also NumPy's",
        "TORCHELASTIC_RESTART_COUNT": "ranks that torchrun starts again find their own scheduler",
        "DMLC_ROLE_GLOBAL": "GeoMX's: a process of its upper level, which has nothing to do here",
        "DMLC_ROLE_MASTER_WORKER": "GeoMX's: a worker without data, which has nothing to do here",
        "DMLC_NUM_ALL_WORKER": "GeoMX's number of nodes of all data centres, which are one job here",
        "OMP_NUM_THREADS": "several nodes on one machine share its cores; a user's own choice is kept",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "OpenTelemetry's: where the scheduler sends its metrics, if at all",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "the same, for metrics alone",
        "OTEL_METRIC_EXPORT_INTERVAL": "how often, in milliseconds",
    }
)

LAUNCHER_VARIABLES: Final = frozenset(
    {
        *("DMLC_NUM_WORKER", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("SLURM_SUBMIT_HOST", "SSH_CONNECTION"),  # whose browser is elsewhere
        *("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_HOSTNAME"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_RESTART_COUNT"),
    }
)
"""By which MPI's and Slurm's launchers tell a process its rank (netstorm/launchers.py). Those of other hosts,
and what is started from here, have others, so `netstorm launch` does not pass them on.
"""


def foreign_variable(name: str) -> str | None:
    """Return a variable of another program, or None if it is not set.

    Raises:
        UsageError: `name` is neither in `FOREIGN_VARIABLES` nor in `LAUNCHER_VARIABLES`.
    """
    if name not in FOREIGN_VARIABLES and name not in LAUNCHER_VARIABLES:
        raise UsageError(
            f"{name} is not in FOREIGN_VARIABLES: declare it there, with the reason for reading it"
        )
    return os.environ.get(name)


def child_environment(base: Mapping[str, str] | None = None, **variables: object) -> dict[str, str]:
    """Return the environment of a child process: some variables changed.

    Args:
        base: variables to start from; this process's if None.
        variables: new values; None removes a variable, True and False become 1 and 0.

    Raises:
        SettingsError: a value that the child would refuse, or a variable `NETSTORM_*` that is no setting.
    """
    environment = dict(os.environ if base is None else base)
    by_variable = {declaration.variable: (name, declaration) for name, declaration in declarations().items()}
    problems = unknown_variables(name for name in variables if name.startswith("NETSTORM_"))
    for variable, value in variables.items():
        if value is None:
            environment.pop(variable, None)
            continue
        environment[variable] = str(int(value)) if isinstance(value, bool) else str(value)
        if variable in by_variable and environment[variable]:
            name, declaration = by_variable[variable]
            try:
                declaration.kind.read(environment[variable])
            except ValueError:
                problems.append(not_allowed(name, declaration, value, "environment"))
    raise_problems(problems)
    return environment


def set_for_children(**variables: object) -> None:
    """Set variables of this process, so that processes which a script starts by itself have them, too.

    Args:
        variables: as for `child_environment`.

    Raises:
        SettingsError: a value that a child would refuse, or a variable `NETSTORM_*` that is no setting.
    """
    changed = child_environment(None, **variables)
    for name in variables:
        if name in changed:
            os.environ[name] = changed[name]
        else:
            os.environ.pop(name, None)


# The table of settings: one row each, for `netstorm env` and docs/reference/settings.md.


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
    if settings.preset:
        found.append(
            f"NETSTORM_PRESET={settings.preset}: values from the preset are those of arXiv 2404.11352; "
            "whatever is given wins"
        )
    return found
