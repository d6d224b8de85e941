"""Formation requests of several jobs whose results come later: which job a result is for. Pure."""

from __future__ import annotations

import itertools
from typing import Final

from netstorm.scheduler.jobs.job_slot import JobSlot

__all__ = ["PendingRequests"]


class PendingRequests:
    """Numbers the requests of all jobs: the jobs' own numbers are not unique."""

    def __init__(self) -> None:
        self._numbers: Final = itertools.count(1)
        self._pending: dict[int, tuple[JobSlot, int]] = {}

    def add(self, slot: JobSlot, own_number: int) -> int:
        """Return a number for a request to which its job gave `own_number`."""
        number = next(self._numbers)
        self._pending[number] = (slot, own_number)
        return number

    def pop(self, number: int) -> tuple[JobSlot | None, int]:
        """Return the job that a result is for, and the job's own number; None: no such request is pending."""
        return self._pending.pop(number, (None, 0))
