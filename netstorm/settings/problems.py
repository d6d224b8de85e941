"""Error messages about settings. Each names the value, where it came from and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from netstorm.errors import SettingsError
from netstorm.settings.kinds import Declaration, Source

__all__ = ["not_allowed", "raise_problems", "unknown_name"]


def not_allowed(name: str, declaration: Declaration, value: object, source: Source) -> str:
    """Return the error message for a value that its setting does not allow."""
    variable = declaration.variable
    place = (
        f"{variable}={value!r}"
        if source == "environment"
        else f"{name}={value!r} (an argument, for {variable})"
    )
    about = declaration.meaning.split(";")[0]
    return f"{place}: expected {declaration.kind.allowed} ({about})"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for a name that is no setting, with the closest name that is."""
    # The prefix that all have in common would make any two names look alike.
    by_rest = {other.removeprefix("NETSTORM_"): other for other in known}
    close = difflib.get_close_matches(name.removeprefix("NETSTORM_"), by_rest, n=1)
    hint = f"did you mean {by_rest[close[0]]}?" if close else "`netstorm env` lists all settings"
    return f"{name}: there is no setting of that name ({what}); {hint}"


def raise_problems(problems: list[str]) -> None:
    """Raise one `SettingsError` with all messages; do nothing if there are none."""
    if len(problems) == 1:
        raise SettingsError(problems[0])
    if problems:
        raise SettingsError(
            f"{len(problems)} settings are wrong:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
