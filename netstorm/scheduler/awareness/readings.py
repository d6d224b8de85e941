"""One quantity that is measured again and again, with noise, and that may change: its estimate and its error.

The readings since the last change are averaged. Two readings in a row that are off by more than noise
explains, both to the same side, are a change: what was before them counts no more. One alone may be an
outlier, and waits for the next. An error is a fraction of its own reading: 5 with an error of a half is far
from 24 with one of a tenth, though by a fraction of 24 it would not be. How large the noise is, the readings
themselves tell, if they scatter more than whoever made them thought.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

__all__ = ["Readings", "aged"]

_KEPT: Final = 6
"""Readings that are averaged, one a second at most: more would hide a slow drift."""

_INDEPENDENT: Final = 0.25
"""What a further reading adds, as a part of what it would if it had nothing in common with the one before:
reports are smoothed, too."""

_CHANGE: Final = 3.0
"""Standard deviations that noise exceeds once in 370 readings, and in two running once in 270 000."""

_SEEN_CHANGE: Final = 1.0
"""The same where whoever made the reading has seen the change: it rests on little then, and is not exact."""

_LEAST_ERROR: Final = 0.02
"""No reading of a network is better than that, whatever its maker says."""

_MOST_ERROR: Final = 1.0

_LATE_S: Final = 10.0
"""After so long without a reading, one is enough for a change: the next may be as late."""

_AGEING: Final = 0.1 / 60
"""Relative error that a second without a reading adds: nobody knows what has happened since."""


class Readings:
    """Readings of one positive quantity. Errors are standard errors, as fractions."""

    __slots__ = ("_at", "_errors", "_steps", "_suspect", "_values", "changed_at", "value", "was")

    def __init__(self) -> None:
        self.value = 0.0
        """The estimate; 0 before the first reading."""
        self.changed_at = -math.inf
        """When it was last noticed to have changed."""
        self.was = 0.0
        """What it was before that; 0: it has not changed."""
        self._values: deque[float] = deque(maxlen=_KEPT)
        self._errors: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        """From each reading to the next one, as a logarithm."""
        self._suspect = 0.0
        """The last reading, if it was off by more than noise explains; else 0."""
        self._at = -math.inf

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, value: float, error: float, now: float, *, jumped: bool = False) -> bool:
        """Take a reading above 0; return False if it may be an outlier, and waits for the next.

        An error of 0 or less is not known. `jumped`: whoever made it has seen the quantity change.
        """
        error = min(max(error, _LEAST_ERROR), _MOST_ERROR)
        late = self.age(now) > _LATE_S
        if self._values:
            self._steps.append(math.log(value / (self._suspect or self._values[-1])))
            doubt = math.hypot(value * max(error, self._scatter()), self.value * self._own_error())
            if abs(value - self.value) > (_SEEN_CHANGE if jumped else _CHANGE) * doubt:
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
        """Take a lower bound: if it is above the estimate by more than its error, that is the estimate from
        now on, and else it says nothing. No change of the quantity is noticed by that.
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
        return aged(self._own_error(), self.age(now))

    def error_and_time(self) -> tuple[float, float]:
        """Return the standard error at the time of the last reading that `value` rests on, and that time."""
        return self._own_error(), self._at

    def age(self, now: float) -> float:
        """Return the seconds since the last reading that `value` rests on.

        One that may be an outlier is none: it may be the first after a change, too, and makes what was before
        no newer.
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


def aged(error: float, age: float) -> float:
    """Return what becomes of a standard error in so many seconds without a reading."""
    return min(math.hypot(error, _AGEING * max(0.0, age)), _MOST_ERROR)
