"""Kinds of setting: how a value is declared, parsed, checked and written. A new kind belongs here."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

from netstorm import units
from netstorm.addresses import split_host_port, without_brackets
from netstorm.errors import SettingsError

__all__ = [
    "Declaration",
    "Source",
    "ValueKind",
    "amount",
    "host",
    "host_ports",
    "not_allowed",
    "one_of",
    "raise_problems",
    "ratio",
    "seconds",
    "setting",
    "switch",
    "unknown_name",
    "whole",
    "words",
]


Source: TypeAlias = Literal["default", "preset", "environment", "argument"]
"""Where a value came from."""

T = TypeVar("T")
W = TypeVar("W", bound=str)


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[T]):
    """The values that a setting accepts."""

    allowed: str
    """The end of an error message that begins with "expected"."""
    parse: Callable[[str], T]
    """Converts text to a value; raises `ValueError`."""
    accepts: Callable[[T], bool]
    """Whether a value of the right type is in range."""
    types: tuple[type, ...]
    write: Callable[[T], str] = str
    """Converts a value to text that `parse` can read."""
    show: Callable[[T], str] | None = None
    """Converts a value to text for people; None: as `write`."""

    def fits(self, value: object) -> bool:
        """Return whether a value has the right type and is in range."""
        if isinstance(value, bool) and bool not in self.types:  # Python counts True as the whole number 1
            return False
        return isinstance(value, self.types) and self.accepts(cast("T", value))

    def read(self, given: object) -> T:
        """Return a value, parsed if it is text.

        Raises:
            ValueError: it is no value of this kind.
        """
        value = self.parse(given.strip()) if isinstance(given, str) else given
        if not self.fits(value):
            raise ValueError(value)
        return cast("T", value)

    def display(self, value: T) -> str:
        """Return a value as text for people."""
        return self.show(value) if self.show is not None else self.write(value)


@dataclass(frozen=True, slots=True)
class Declaration:
    """Everything about one setting except its value."""

    variable: str
    kind: ValueKind[Any]
    default: Any
    unit: str
    meaning: str


def setting(variable: str, kind: ValueKind[T], default: T, unit: str, meaning: str) -> T:
    """Declare a field of `Settings`. A setting without a unit has an empty `unit`."""
    declaration = Declaration(variable, kind, default, unit, meaning)
    field: T = dataclasses.field(default=default, metadata={"declaration": declaration})
    return field


def whole(least: int, most: int | None = None) -> ValueKind[int]:
    """Return the kind of whole numbers from `least` to `most`, both included."""
    allowed = (
        f"a whole number from {least} to {most}" if most is not None else f"a whole number, at least {least}"
    )
    return ValueKind(allowed, _whole, lambda n: least <= n and (most is None or n <= most), (int,))


def amount(least: int) -> ValueKind[int]:
    """Return the kind of sizes in bytes, with or without a unit."""
    return ValueKind(
        f"a size such as 65536 (bytes), 64MB or 64MiB, at least {units.format_bytes(least)}",
        lambda text: _whole(text) if text.isascii() and text.isdigit() else units.parse_bytes(text),
        lambda n: n >= least,
        (int,),
        show=units.format_bytes,
    )


def seconds(*, most: float = math.inf) -> ValueKind[float]:
    """Return the kind of durations above 0; a number without a unit means seconds."""
    limit = f" and at most {units.format_duration(most)}" if most < math.inf else ""
    return ValueKind(
        f"a duration such as 5 (seconds), 5s or 250ms, more than 0{limit}",
        lambda text: _decimal(text) if _is_bare(text) else units.parse_duration(text),
        lambda s: 0 < s <= most and s < math.inf,
        (int, float),
        write=repr,
        show=units.format_duration,
    )


def ratio(*, below_one: bool = False) -> ValueKind[float]:
    """Return the kind of fractions from 0 to 1, also written as percentages."""
    return ValueKind(
        f"a ratio such as 0.1 or 10%, from 0 to {'less than 1' if below_one else '1'}",
        lambda text: _decimal(text) if _is_bare(text) else units.parse_fraction(text),
        lambda r: 0 <= r < 1 or (r == 1 and not below_one),
        (int, float),
        write=repr,
    )


def switch() -> ValueKind[bool]:
    """Return the kind of on-off switches."""
    return ValueKind(
        "1 or 0 (also: true, false, yes, no, on, off)",
        _switch,
        lambda _: True,
        (bool,),
        lambda on: str(int(on)),
    )


def one_of(*allowed: W) -> ValueKind[W]:
    """Return the kind whose value is one of these words; upper and lower case are equal."""
    by_name = {word.lower(): word for word in allowed}
    return ValueKind(
        "one of " + ", ".join(allowed),
        lambda text: by_name.get(text.lower(), cast("W", text)),
        lambda word: word in allowed,
        (str,),
    )


def words(pattern: str, allowed: str) -> ValueKind[str]:
    """Return the kind of text that matches a pattern."""
    form = re.compile(pattern)
    return ValueKind(allowed, str, lambda text: form.fullmatch(text) is not None, (str,))


def host(*, or_empty: bool = False, or_any: bool = False) -> ValueKind[str]:
    """Return the kind of host names and addresses, without scheme or port."""
    name = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
    ipv6 = (
        r"[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]+)?"  # two colons; one would be a port's
    )
    more = (r"|\*" if or_any else "") + ("|" if or_empty else "")
    extra = (", or * for every interface" if or_any else "") + (", or empty" if or_empty else "")
    kind = words(f"{name}|{ipv6}{more}", f"a host name or address without scheme or port{extra}")
    return dataclasses.replace(kind, parse=without_brackets)


def host_ports(example: str) -> ValueKind[str]:
    """Return the kind of lists of HOST:PORT with commas, or nothing."""
    return ValueKind(f"addresses such as {example}, or nothing", str, _are_host_ports, (str,))


def _are_host_ports(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool([split_host_port(entry) for entry in text.split(",")]) if text else True
    return False


def _whole(text: str) -> int:
    # int() alone would also accept "1_000", and digits of other scripts.
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII) is None:
        raise ValueError(text)
    return int(text)


def _is_bare(text: str) -> bool:
    return not text[-1:].isalpha() and not text.endswith("%")


def _decimal(text: str) -> float:
    if re.fullmatch(r"[+-]?[0-9.]{1,40}(?:[eE][+-]?[0-9]{1,3})?", text, re.ASCII) is None:
        raise ValueError(text)
    return float(text)


def _switch(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError(text)


# Error messages about settings. Each names the value, where it came from and what is allowed.


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
