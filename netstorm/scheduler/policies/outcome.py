"""What rounds take, and whether a new policy has made them shorter. Pure.

A policy is taken for what it is predicted to do, by estimates that may be wrong. So the rounds under it are
compared with the last ones under the policy before, and if they take clearly longer, that one comes back.

A round takes as long as it does at the rank that began it last: the others wait for that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from netstorm.topology.policy import Policy

__all__ = ["Outcome"]

_WORSE: Final = 1.1
"""Rounds that take so much longer are no accident."""

_SETTLING: Final = 1
"""Rounds under a new policy that do not count: connections are opened and find out their rates."""

_JUDGED: Final = 2
"""Rounds after these; the shortest of them counts, since anything may delay one."""

_BEFORE: Final = 2
"""The last rounds under the policy before, of which the longest counts: what has made the new policy
necessary may have happened during the last one."""

_KEPT: Final = 16


class Outcome:
    """Round times of one job, and the policy that is on trial."""

    def __init__(self) -> None:
        self._seconds: Final[dict[int, float]] = {}
        self._before: Policy | None = None
        """What a policy on trial is compared with; None: none is."""
        self._before_s = math.inf
        self._after: int = -1
        """The first round that counts for the new one."""

    def took(self, round: int, seconds: float) -> None:
        """Take a rank's word on what its newest round took."""
        if round < 0 or not 0.0 < seconds < math.inf:
            return
        self._seconds[round] = min(seconds, self._seconds.get(round, math.inf))
        while len(self._seconds) > _KEPT:
            del self._seconds[min(self._seconds)]

    def installed(self, before: Policy, first_rounds: Mapping[int, int], *, expected_s: float = 0.0) -> None:
        """A policy follows `before` from the first of these rounds on, by key: put it on trial.

        If `before` is on trial itself, the new one is compared with what was before that.

        Args:
            before: in force until now.
            first_rounds: by key.
            expected_s: what a round under `before` should take now, which none may have done yet.
        """
        if not first_rounds:
            return
        first = max(first_rounds.values())
        if self._before is None:
            last = [self._seconds[round] for round in range(first - _BEFORE, first) if round in self._seconds]
            self._before, self._before_s = before, max(*last, expected_s) if last else math.inf
        self._after = first + _SETTLING

    def forget(self) -> None:
        """No policy is on trial any more: another one is in force, for other reasons."""
        self._before = None

    def verdict(self) -> tuple[Policy, float, float] | None:
        """Return the policy that was better, what rounds took under it and what they take now, in s; None: it
        was not, or that is not known yet. Asked again, it says no more.
        """
        if self._before is None:
            return None
        after = [seconds for round, seconds in self._seconds.items() if round >= self._after]
        if len(after) < _JUDGED:
            return None
        before, self._before = self._before, None
        if min(after) <= _WORSE * self._before_s:
            return None
        return before, self._before_s, min(after)
