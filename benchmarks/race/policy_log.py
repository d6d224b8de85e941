"""When a NetStorm job changed its policy, and why, from what its scheduler has logged."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

__all__ = ["PolicyChange", "policy_changes"]

_LINE = re.compile(r"(\d\d):(\d\d):(\d\d) netstorm INFO policy version (\d+): (.*)")
_DAY_S = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """A policy that replaced another one."""

    at_s: float
    """Seconds after a moment of the reader's; the log knows whole ones."""
    version: int
    reason: str


def policy_changes(log: str, began: float) -> list[PolicyChange]:
    """Return the policies that followed the first one.

    Args:
        log: the scheduler's; its times are of the day, here.
        began: the moment that times count from, in seconds as `time.time` gives them.
    """
    here = time.localtime(began)
    start = here.tm_hour * 3600 + here.tm_min * 60 + here.tm_sec + began % 1
    found = []
    for line in log.splitlines():
        match = _LINE.match(line)
        if match:
            hours, minutes, seconds = (int(match[place]) for place in (1, 2, 3))
            # Of the two days that it could be the one that is nearer.
            at = (hours * 3600 + minutes * 60 + seconds - start + _DAY_S / 2) % _DAY_S - _DAY_S / 2
            found.append(PolicyChange(at_s=round(at, 1), version=int(match[4]), reason=match[5]))
    return found
