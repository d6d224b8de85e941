"""Durations and sizes in tables, as people read them."""

from __future__ import annotations

from netstorm.units import format_duration

__all__ = ["size_text", "time_text"]


def time_text(seconds: float) -> str:
    """Return a duration to three digits, which is more than a prediction is worth; minutes from ten on."""
    return f"{seconds:.3g}s" if 1 <= seconds < 600 else format_duration(float(f"{seconds:.3g}"))


def size_text(nbytes: float) -> str:
    """Return a size to four digits, decimal: a table in which every other row is binary cannot be read."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g}{unit}"
    return f"{nbytes:.0f}B"
