"""An operation of a simulated node that completes later in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy.typing as npt

from netstorm.pslite.memory_network import Timeline

__all__ = ["Array", "Pending"]

Array: TypeAlias = npt.NDArray[Any]


class Pending:
    """An operation of a node. It completes once, with a result or an error."""

    def __init__(self, timeline: Timeline, what: str) -> None:
        self.what: Final = what
        self.began_at: Final = timeline.now
        self.ended_at: float | None = None
        """Virtual time."""
        self.error: Exception | None = None
        self.value: Array | None = None
        """Result of an all-reduce or a pull: a copy, made when it was complete."""
        self._timeline = timeline
        self._collect: Callable[[], Array] | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """Whether it has completed, with a result or an error."""
        return self.ended_at is not None

    @property
    def ended_well(self) -> bool:
        """Whether it has completed without an error."""
        return self.ended_at is not None and self.error is None

    def result(self) -> Array:
        """Return the value.

        Raises:
            NetStormError: why there is none.
        """
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` at the virtual time at which this completes, or now."""
        if self.ended:
            self._timeline.after(0.0, action)
        else:
            self._then.append(action)

    def collect_with(self, function: Callable[[], Array]) -> None:
        """Call `function` for the value when this completes without an error."""
        self._collect = function

    def done(self, error: Exception | None) -> None:
        """Record the completion, as the futures of the real runtime do."""
        if self.ended_at is not None:
            raise AssertionError(f"{self.what} ended twice: {self.error!r}, then {error!r}")
        self.ended_at, self.error = self._timeline.now, error
        if self._collect is not None and error is None:
            self.value = self._collect()
        for action in self._then:
            self._timeline.after(0.0, action)

    def __repr__(self) -> str:
        """Return the state as text, for failing tests."""
        end = "open" if self.ended_at is None else f"ended at {self.ended_at:.6f}: {self.error!r}"
        return f"<{self.what}, asked at {self.began_at:.6f}, {end}>"
