"""The environment of child processes, and the variables of other programs that NetStorm reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from netstorm.errors import UsageError
from netstorm.settings.problems import not_allowed, raise_problems
from netstorm.settings.values import declarations, unknown_variables

__all__ = ["FOREIGN_VARIABLES", "child_environment", "foreign_variable", "set_for_children"]

# Variables of other programs whose values matter here, each with the reason.
FOREIGN_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MXNET_ENGINE_TYPE": "under NaiveEngine MXNet's operations block, so they cannot overlap",
        "RANK": "PyTorch's rank of this process, for which an elastic job has a place",
        "LOCAL_RANK": "which of a machine's nodes this one is, so that they share no port",
        "WORLD_SIZE": "PyTorch's number of ranks; a group of fewer has a scheduler of its own",
        "TORCHELASTIC_RESTART_COUNT": "ranks that torchrun starts again find their own scheduler",
        "OMP_NUM_THREADS": "several nodes on one machine share its cores; a user's own choice is kept",
    }
)


def foreign_variable(name: str) -> str | None:
    """Return a variable of another program, or None if it is not set.

    Raises:
        UsageError: `name` is not in `FOREIGN_VARIABLES`.
    """
    if name not in FOREIGN_VARIABLES:
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
