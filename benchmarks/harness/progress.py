"""How far a race is: a bar on a terminal, a line a round elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Rounds", "counted_rounds"]


class Rounds:
    """Shows the rounds of a race as they come."""

    def __init__(self, console: Console, progress: Progress, bar: TaskID, each: int | None) -> None:
        self._console = console
        self._progress = progress
        self._bar = bar
        self._each = each
        self._done: dict[str, int] = {}

    def begins(self, what: str) -> None:
        """Show what is done now."""
        self._progress.update(self._bar, description=what)

    def done(self, system: str) -> None:
        """Count a round of a system."""
        self._done[system] = self._done.get(system, 0) + 1
        total = None if self._each is None else self._each * len(self._done)
        self._progress.update(self._bar, completed=sum(self._done.values()), total=total)
        if not self._console.is_terminal:
            self._console.print(f"{system}: round {self._done[system]}", highlight=False)


@contextlib.contextmanager
def counted_rounds(console: Console, each: int | None) -> Iterator[Rounds]:
    """Yield what to tell; each system has `each` rounds, if that is known."""
    count = [] if each is None else [MofNCompleteColumn()]
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield Rounds(console, progress, progress.add_task("", total=None), each)
