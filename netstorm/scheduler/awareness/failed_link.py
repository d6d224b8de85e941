"""What is known of a link that has failed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FailedLinkRecord"]


@dataclass(frozen=True, slots=True)
class FailedLinkRecord:
    """One link that has failed."""

    source: int
    target: int
    reason: str
    """As its source reported it."""
    since: float
