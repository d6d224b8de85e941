"""When the network is examined for changes, and when a policy may be formed for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["UpdateSchedule"]

SETTLE_S: Final = 0.3
_SETTLE_MOST_S: Final = 1.0
"""Links that change together are noticed one after the other, and each policy moves chunks under way. So a
poll waits until no further change was noticed for the former, but no longer than the latter
(docs/measurements/changing-networks.md, "What the scheduler knows, and when"). So it does for new keys.
"""

_POLLS: Final = 5
"""Polls per update time, so that a large change need not wait for the next update."""

_MOST_LINKS: Final = 1000
"""In larger networks there is one poll per update time, since it takes tens of ms
(docs/measurements/awareness.md, "What the scheduler costs").
"""

_MOST_BACKOFF: Final = 8
"""Most update times between two formations if those before have come to nothing: each takes .3 s of a
processor (docs/measurements/awareness.md, "What the scheduler costs").
"""


class UpdateSchedule:
    """Times of polls and formations.

    Attributes:
        formed_at: when a formation was last asked for.
    """

    def __init__(self, update_time_s: float, links: int, now: float) -> None:
        """Begin with a wait of one update time; `links`: their number in the network."""
        self.formed_at = now
        self._update_s: Final = update_time_s
        self._poll_s: Final = update_time_s / (_POLLS if links <= _MOST_LINKS else 1)
        self._poll_at = now + update_time_s
        self._polled_at = now
        self._backoff = 1
        """Update times between two formations."""

    def due(self, changes: Sequence[float], latency_changed_at: float) -> float:
        """Return the time of the next poll.

        Args:
            changes: when links were noticed to have changed, in order.
            latency_changed_at: when a latency last changed; -inf: never.
        """
        if latency_changed_at > self._polled_at:
            return min(self._poll_at, latency_changed_at + SETTLE_S)
        if not changes or changes[-1] <= self._polled_at:
            return self._poll_at
        first = next(at for at in changes if at > self._polled_at)
        settled = min(changes[-1] + SETTLE_S, first + _SETTLE_MOST_S)
        return max(settled, self.formed_at + self._poll_s)

    def due_for_keys(self, at: float) -> float:
        """Return the time of the next poll if the workload is settled at some time."""
        return min(self._poll_at, at)

    def polled(self, now: float) -> None:
        """Note a poll."""
        self._poll_at, self._polled_at = now + self._poll_s, now

    def allows(self, now: float, *, large: bool) -> bool:
        """Return whether a policy may be formed for a change; for a large one sooner."""
        if large:
            return now >= self.formed_at + self._poll_s
        return now >= self.formed_at + self._backoff * self._update_s

    def allows_first(self, now: float) -> bool:
        """Return whether a first policy may be formed for measured rates."""
        return now >= self.formed_at + self._update_s

    def came_to(self, *, something: bool) -> None:
        """Note whether a formation has led to a policy."""
        self._backoff = 1 if something else min(2 * self._backoff, _MOST_BACKOFF)
