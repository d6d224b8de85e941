"""The policy history of a job: since when the policy in force applies, and the last ones before it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from netstorm.topology.policy import Policy

__all__ = ["PolicyHistory", "ReplacedPolicy"]

_REMEMBERED: Final = 20
"""Replaced policies whose reasons are remembered."""


@dataclass(frozen=True, slots=True)
class ReplacedPolicy:
    """A policy that is not in force any more. Times are those of the scheduler's own clock."""

    version: int
    reason: str
    """Why it was formed."""
    begin: float
    end: float


class PolicyHistory:
    """The policies of one job.

    Attributes:
        since: when the policy in force was installed.
    """

    def __init__(self, policy: Policy, now: float) -> None:
        self.since = now
        self._replaced: deque[ReplacedPolicy] = deque(maxlen=_REMEMBERED)
        self._policy = policy

    def installed(self, policy: Policy, now: float) -> None:
        """Record that a policy has replaced the one before."""
        before = self._policy
        self._replaced.append(
            ReplacedPolicy(version=before.version, reason=before.reason, begin=self.since, end=now)
        )
        self._policy, self.since = policy, now

    def former(self) -> tuple[ReplacedPolicy, ...]:
        """Return the last replaced policies, the newest last."""
        return tuple(self._replaced)
