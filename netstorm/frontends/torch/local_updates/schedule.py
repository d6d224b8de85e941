"""When which fragment is synchronised: a pure function of the number of steps."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.errors import UsageError

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Every fragment once in `sync_every` steps, spread as evenly as whole steps allow.

    Of n fragments the i-th (from 0) is applied at step `sync_every * (i + 1) / n`, rounded up, and every
    `sync_every` steps after it (Streaming DiLoCo, arXiv 2501.18512, section 2.2). Its sum begins `delay`
    steps before. A sum that would begin before the first step is left out.

    Raises:
        UsageError: a number is outside its range.
    """

    fragments: int
    sync_every: int
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise UsageError(f"sync_every={self.sync_every}: it must be at least 1 step")
        if not 0 <= self.delay < self.sync_every:
            raise UsageError(
                f"fragment_sync_delay={self.delay}: it must be from 0 to sync_every - 1 ="
                f" {self.sync_every - 1}, because a fragment's sum ends before its next one begins"
            )

    def begin_at(self, step: int) -> list[int]:
        """Return the fragments whose sums begin after inner step `step`, counted from 1."""
        return self.apply_at(step + self.delay)

    def apply_at(self, step: int) -> list[int]:
        """Return the fragments whose sums are applied after inner step `step`."""
        return [
            fragment
            for fragment in range(self.fragments)
            if step > self.delay and (step - self._place(fragment)) % self.sync_every == 0
        ]

    def _place(self, fragment: int) -> int:
        return -(-self.sync_every * (fragment + 1) // self.fragments)
