"""Estimate one quantity, and the estimate's error, from noisy readings of it while it may change.

The readings since the last change are averaged. Two readings in a row that are off by more than noise
explains, both to the same side, are a change, and earlier readings no longer count. A single one may be an
outlier and waits for the next. Each error is a fraction of its own reading: 5 with an error of a half is far
from 24 with an error of a tenth, though it would not be by a fraction of 24. If readings scatter more than
their stated errors, the scatter is the noise.

Measured in docs/measurements/changing-networks.md, "What the scheduler knows, and when" (errors of their own
readings), and docs/measurements/awareness.md, "Noise changes no policy".
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

__all__ = ["Readings", "error_after"]

_KEPT: Final = 6
"""Readings that are averaged, one a second at most: more would hide a slow drift."""

_INDEPENDENT: Final = 0.25
"""What another reading adds, as a part of what an independent one would: reports are smoothed."""

_CHANGE: Final = 3.0
"""Standard deviations that noise exceeds once in 370 readings, and twice running once in 270 000."""

_SEEN_CHANGE: Final = 1.0
"""The same if the reporter has seen the quantity change: its reading rests on little, and is not exact."""

_LEAST_ERROR: Final = 0.02
"""No reading of a network is more exact, whatever its reporter states."""

_MOST_ERROR: Final = 1.0

_LATE_S: Final = 10.0
"""After so long without a reading, one is enough for a change: the next may be as late."""

_AGEING: Final = 0.1 / 60
"""Relative error per second without a reading, since the quantity may have changed."""


class Readings:
    """Readings of one positive quantity. Errors are standard errors, as fractions."""

    __slots__ = ("_at", "_errors", "_steps", "_suspect", "_values", "changed_at", "value", "was")

    def __init__(self) -> None:
        self.value = 0.0
        """The estimate; 0 before the first reading."""
        self.changed_at = -math.inf
        """When a change was last noticed."""
        self.was = 0.0
        """The estimate before that; 0: it has not changed."""
        self._values: deque[float] = deque(maxlen=_KEPT)
        self._errors: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        """Logarithms of the ratio of each reading to the one before."""
        self._suspect = 0.0
        """The last reading, if it may be an outlier; else 0."""
        self._at = -math.inf

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, value: float, error: float, now: float, *, jumped: bool = False) -> bool:
        """Add a reading above 0; return False if it may be an outlier, and waits for the next.

        An error of 0 or less is unknown. `jumped`: the reporter has seen the quantity change.
        """
        error = min(max(error, _LEAST_ERROR), _MOST_ERROR)
        late = self.age(now) > _LATE_S
        if self._values:
            self._steps.append(math.log(value / (self._suspect or self._values[-1])))
            noise = math.hypot(value * max(error, self._scatter()), self.value * self._own_error())
            if abs(value - self.value) > (_SEEN_CHANGE if jumped else _CHANGE) * noise:
                agreed = self._suspect and (self._suspect > self.value) == (value > self.value)
                if not (agreed or late or jumped):
                    self._suspect = value
                    return False
                self.changed_at, self.was = now, self.value
                self._values.clear()
                self._errors.clear()
                if agreed:
                    self._values.append(self._suspect)
                    self._errors.append(error)
        self._suspect = 0.0
        self._at = now
        self._values.append(value)
        self._errors.append(error)
        self._average()
        return True

    def at_least(self, value: float, error: float, now: float) -> None:
        """Add a lower bound: it replaces the estimate if it is higher by more than its error, else it is
        ignored. It counts as no change of the quantity.
        """
        error = min(max(error, _LEAST_ERROR), _MOST_ERROR)
        if value * (1.0 - error) <= self.value:
            return
        for kept in (self._values, self._errors, self._steps):
            kept.clear()
        self._suspect, self._at = 0.0, now
        self._values.append(value)
        self._errors.append(error)
        self._average()

    def error(self, now: float) -> float:
        """Return the standard error of `value`, as a fraction of it."""
        return error_after(self._own_error(), self.age(now))

    def error_and_time(self) -> tuple[float, float]:
        """Return the standard error at the time of the last reading that `value` rests on, and that time."""
        return self._own_error(), self._at

    def age(self, now: float) -> float:
        """Return the seconds since the last reading that `value` rests on.

        A possible outlier does not count: it may be the first reading after a change.
        """
        return max(0.0, now - self._at)

    def _own_error(self) -> float:
        count = len(self._errors)
        mean = math.sqrt(count / math.fsum(error**-2 for error in self._errors))
        return max(mean, self._scatter()) / math.sqrt(1.0 + _INDEPENDENT * (count - 1))

    def _scatter(self) -> float:
        """Return the standard deviation of readings, by the median of their steps: changes are rare."""
        if len(self._steps) < 3:
            return 0.0
        return 1.4826 * statistics.median(map(abs, self._steps)) / math.sqrt(2.0)

    def _average(self) -> None:
        weights = [error**-2 for error in self._errors]
        self.value = math.fsum(v * w for v, w in zip(self._values, weights, strict=True)) / math.fsum(weights)


def error_after(error: float, age: float) -> float:
    """Return a standard error after `age` seconds without a reading."""
    return min(math.hypot(error, _AGEING * max(0.0, age)), _MOST_ERROR)
