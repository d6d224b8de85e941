"""Numbers with units, as people write them in network files and settings: 100Mbit, 16MiB, 15ms, 0.02%.

A unit is never guessed: where one is needed, a bare number is an error, since a bare "100" means bit/s to one
reader and MB/s to the next. The case of letters counts, as in SI: m is milli, M is mega.

All parsers raise `UsageError`, which says what is allowed, for what has no unit or an unknown one, is
negative or is no finite number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TypeAlias, overload

from netstorm.errors import UsageError

__all__ = [
    "format_bytes",
    "format_duration",
    "format_fraction",
    "format_rate",
    "parse_bytes",
    "parse_duration",
    "parse_fraction",
    "parse_rate",
    "rounded",
]

# Lengths are bounded, so that no text makes a number that takes seconds or gigabytes to expand.
_QUANTITY = re.compile(
    r"([+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?)\s*([^\s0-9.+-]*)", re.ASCII
)

Units: TypeAlias = Mapping[str, Decimal]
"""Factors to the base unit, smallest first."""

_RATES: Units = {f"{prefix}bit": Decimal(1000) ** i for i, prefix in enumerate(["", "k", "M", "G", "T"])}
_DECIMAL_BYTES: Units = {
    f"{prefix}B": Decimal(1000) ** i for i, prefix in enumerate(["", "k", "M", "G", "T"])
}
_BINARY_BYTES: Units = {
    f"{prefix}B": Decimal(1024) ** i for i, prefix in enumerate(["", "Ki", "Mi", "Gi", "Ti"])
}
_DURATIONS: Units = {
    unit: Decimal(text)
    for unit, text in {"ns": "1e-9", "us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"}.items()
}
_FRACTIONS: Units = {"%": Decimal("0.01")}


def parse_rate(value: object) -> float:
    """Return the bit/s of a text such as "100Mbit", "2.5Gbit" or "64 kbit/s": decimal, as networks count."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return float(_parse(text, value, "rate", _RATES))


def parse_bytes(value: object) -> int:
    """Return the bytes of a text such as "16MB" (decimal) or "16MiB" (binary)."""
    size = _parse(value, value, "size", {**_DECIMAL_BYTES, **_BINARY_BYTES})
    if size != size.to_integral_value():
        raise UsageError(f"{value!r} is not a size: it comes to {size} bytes, which is not a whole number")
    return int(size)


def parse_duration(value: object) -> float:
    """Return the seconds of a text such as "15ms", "3min" or "180s"."""
    return float(_parse(value, value, "duration", _DURATIONS))


def parse_fraction(value: object) -> float:
    """Return the fraction that a percentage is: "0.02%" is 0.0002."""
    return float(_parse(value, value, "fraction", _FRACTIONS))


def format_rate(bit_per_s: float) -> str:
    """Return a rate for people, to four digits: 2.5Gbit/s."""
    return f"{_scaled(bit_per_s, _RATES)}/s"


def format_bytes(size: int) -> str:
    """Return a size for people: a whole number of binary units if it is one, else decimal to four digits."""
    for unit, factor in reversed(list(_BINARY_BYTES.items())):
        if factor > 1 and size >= factor and size % factor == 0:
            return f"{size // int(factor)}{unit}"
    return _scaled(size, _DECIMAL_BYTES)


def format_duration(seconds: float) -> str:
    """Return a duration for people, to four digits: 15ms, 3min."""
    return _scaled(seconds, _DURATIONS) if seconds else "0s"


def format_fraction(fraction: float) -> str:
    """Return a fraction for people, as a percentage to four digits: 0.02%."""
    return _scaled(fraction, _FRACTIONS)


@overload
def rounded(number: float, digits: int = 4) -> float: ...
@overload
def rounded(number: float | None, digits: int = 4) -> float | None: ...
def rounded(number: float | None, digits: int = 4) -> float | None:
    """Return a number with so many digits, as a measurement has them; None, which is not known, as it is."""
    return None if number is None else float(f"{number:.{digits}g}")


def _parse(text: object, given: object, kind: str, units: Units) -> Decimal:
    allowed = (
        f"a number and one of {', '.join(units)}" if len(units) > 1 else f"a number and {next(iter(units))}"
    )
    match = _QUANTITY.fullmatch(str(text).strip()) if isinstance(text, (str, int, float)) else None
    if isinstance(text, bool) or match is None:
        raise UsageError(f"{given!r} is not a {kind}: expected {allowed}")
    number, unit = match.groups()
    if not unit:
        example = f"{number}{list(units)[len(units) // 2]}"
        raise UsageError(f"{given!r} has no unit: a {kind} is {allowed}, such as {example!r}")
    if unit not in units:
        meant = [known for known in units if known.lower() == unit.lower()]
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        raise UsageError(f"{given!r}: {unit!r} is not a unit of a {kind}: expected {allowed}{hint}")
    quantity = Decimal(number) * units[unit]
    if quantity < 0:
        raise UsageError(f"{given!r} is negative: a {kind} is at least 0")
    return quantity


def _scaled(quantity: float, units: Units) -> str:
    """Return `quantity` to four digits in the largest unit of which there is at least one."""
    if not 0 <= quantity < math.inf:
        raise ValueError(f"cannot write {quantity!r} with a unit: it must be at least 0, and finite")
    exact = Decimal(repr(quantity))
    unit, factor = next(iter(units.items()))
    for larger, its_factor in units.items():
        if exact >= its_factor:
            unit, factor = larger, its_factor
    return f"{float(exact / factor):.4g}{unit}"
