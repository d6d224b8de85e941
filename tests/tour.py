"""The places that docs/contributing/tour.md names, and their calls: where each ran, and in which order."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "contributing" / "tour.md"


class Place(NamedTuple):
    """A row of a table of the page: a name in a file of netstorm, and the process that it is followed in."""

    file: str
    name: str
    process: str

    @property
    def value(self) -> object:
        """What the name means; one that is not there is an error that says so."""
        value: object = importlib.import_module("netstorm." + self.file.removesuffix(".py").replace("/", "."))
        for name in self.name.split("."):
            value = getattr(value, name)
        return value

    def __str__(self) -> str:
        return f"{self.name} ({self.file}, {self.process})"


def places(table: str) -> list[Place]:
    """Return the rows of the table behind `<!-- tour: TABLE -->`."""
    text = PAGE.read_text(encoding="utf-8").split(f"<!-- tour: {table} -->")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| ([^|]+) \|", text, re.MULTILINE)
    assert len(rows) == text.count("\n") - 1, f"{table}: a row is not | `file` | `name` | process | … |"
    return [Place(*row) for row in rows]


class Calls:
    """The calls of some places, in order, each with the process that it ran in."""

    def __init__(self, followed: Iterable[Place], process_of: Callable[[FrameType], str]) -> None:
        self.made: Final[list[Place]] = []
        self._process_of: Final = process_of
        self._followed = {}
        for place in followed:
            function = place.value
            assert inspect.isfunction(function), f"{place} is no function"
            self._followed[function.__code__] = place

    def record(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call; a function for `sys.setprofile`."""
        if event == "call" and (place := self._followed.get(frame.f_code)) is not None:
            self.made.append(place._replace(process=self._process_of(frame)))


def check_order(followed: Sequence[Place], made: Iterable[Place]) -> None:
    """Check that the places were called in this order; other calls may come between."""
    place = missing(followed, made)
    before = followed[followed.index(place) - 1] if place in followed[1:] else "the beginning"
    assert place is None, f"{place} was not called after {before}"


def missing(followed: Sequence[Place], made: Iterable[Place]) -> Place | None:
    """Return the first place that was not called after those before it; None: all were, in this order."""
    rest = iter(made)
    return next((place for place in followed if place not in rest), None)
