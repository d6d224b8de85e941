"""How long a node waits, and the text of what it waits for. Pure."""

from __future__ import annotations

import logging
import math
from typing import Final

from netstorm.errors import NetStormError, WaitTimeout
from netstorm.kvstore.node.lifecycle import Lifecycle, State

__all__ = ["Deadlines"]

_log = logging.getLogger(__name__)

_CHECK_EVERY_S: Final = 10.0
"""How often a waiting node logs what it waits for, and checks NETSTORM_WAIT_TIMEOUT."""

_DECISION_S: Final = 4.0
"""How much longer than the heartbeat time-out a node waits for the scheduler's decision on a rank that it
cannot reach; and for the link time-out, after which it is known whether the scheduler is busy.
"""


class Deadlines:
    """The deadlines of one node."""

    def __init__(self, lifecycle: Lifecycle, now: float) -> None:
        self._life: Final = lifecycle
        self._next_check = now + _CHECK_EVERY_S
        self._finish_by = math.inf

    def extend_finish(self, now: float) -> None:
        """Give the other ranks NETSTORM_WAIT_TIMEOUT from now until they have finished."""
        self._finish_by = now + self._life.options.wait_timeout_s

    def expired(self, now: float) -> NetStormError | None:
        """Return the error if something has taken too long; log what this node waits for now and then."""
        life = self._life
        late = life.scheduler.join_error(now)
        if late is not None:
            return late
        limit = life.scheduler.heartbeat_timeout_s + life.options.link_timeout_s + _DECISION_S
        lost = life.roster.undecided_error(now, limit)
        # In an elastic job the scheduler decides in the end, if only after restarts of its own. If all gave
        # up at the same moment, the job's state would be lost.
        if lost is not None and not life.scheduler.is_away and not life.roster.elastic:
            return lost
        if now < self._next_check:
            return None
        self._next_check = now + _CHECK_EVERY_S
        return self._wait_error(now)

    def next_deadline(self) -> float:
        """Return when `expired` has something to check, apart from the session with the scheduler."""
        return self._next_check

    def waiting_text(self, now: float) -> str:
        """Return what this node has been waiting for, for a person; empty if for nothing, or not for long."""
        life = self._life
        text = life.scheduler.waiting_text(now)
        if text:
            return text
        if life.joined is not None:
            text = life.joined.waiting_text(now - life.scheduler.heartbeat_interval_s)
            if text:
                return text
        for barrier in life.barriers.waiting_numbers():
            return f"barrier {barrier}: {life.scheduler.last_report}"
        if life.state is State.FINISHING:
            return f"finished; ranks {life.roster.unfinished()} have not"
        return ""

    def _wait_error(self, now: float) -> WaitTimeout | None:
        life = self._life
        text = self.waiting_text(now)
        if text:
            _log.info("rank %d waits: %s", life.roster.rank, text)
        limit = life.options.wait_timeout_s
        oldest = min(life.barriers.oldest(), math.inf if life.joined is None else life.joined.oldest())
        if now - oldest > limit or now > self._finish_by:
            return WaitTimeout(
                f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT): {text or life.scheduler.last_report}"
            )
        return None
