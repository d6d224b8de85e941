"""Leases: grants of rounds are logged in blocks, so that most answers need no record. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from netstorm.scheduler.replay_log.records import Leased

__all__ = ["LEASE", "Leases"]

LEASE: Final = 16
"""Rounds of a key that one record covers. After a restart the next policy applies at most that much later."""


class Leases:
    """The round up to which each key's grants are logged."""

    def __init__(self, granted: Iterable[int] = ()) -> None:
        """Begin with what the log holds: by key, the last round."""
        self._until: Final = dict(enumerate(granted))

    def extend(self, grants: Iterable[tuple[int, int]]) -> Leased | None:
        """Return the record to write before these (key, round) are granted; None: the log covers them."""
        extended = {}
        for key, round in grants:
            if round > self._until.get(key, 0):
                self._until[key] = extended[key] = round + LEASE
        return Leased(rounds=tuple(extended.items())) if extended else None
