"""Values on a command line, with errors that say what is expected."""

from __future__ import annotations

import argparse
import math
import os
from fractions import Fraction
from pathlib import Path

from netstorm.errors import UsageError
from netstorm.units import parse_bytes

__all__ = [
    "amount",
    "amounts",
    "factor",
    "folder",
    "megabytes",
    "number",
    "numbers",
    "seconds",
    "seeds",
    "writable",
]


def number(text: str) -> int:
    """Parse a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """Parse whole numbers with commas between."""
    return [number(part) for part in text.split(",")]


def seconds(text: str) -> float:
    """Parse a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def factor(text: str) -> float:
    """Parse a factor above 0, which may be a fraction such as 1/9."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor above 0, such as 0.5 or 1/9")
    return value


def amount(text: str) -> int:
    """Parse an amount of float32 values in bytes, such as 40MB."""
    try:
        size = parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of float32 values")
    return size


def amounts(text: str) -> list[int]:
    """Parse amounts with commas between."""
    return [amount(part) for part in text.split(",")]


def megabytes(size: int) -> str:
    """Return bytes as people say them."""
    return f"{size / 1e6:g} MB"


def folder(text: str) -> Path:
    """Parse the name of a folder, which is made if only it is missing."""
    path = Path(text)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise argparse.ArgumentTypeError(f"{text!r} is no folder, and cannot become one: {why}") from None
    return path


def writable(text: str) -> Path:
    """Parse the name of a file whose folder exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a folder")
    return path


def seeds(text: str) -> range:
    """Parse a seed, or the first and the last of several: 7, 100..119."""
    first, dots, last = text.partition("..")
    ends = (first, last if dots else first)
    if not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no seed, such as 7, and no range, such as 100..119")
    return range(int(ends[0]), int(ends[1]) + 1)
