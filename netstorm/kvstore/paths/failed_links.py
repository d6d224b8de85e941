"""Links out of this node that have failed: detours around them, and when they are tried again. Pure.

A link that cannot be re-established does not end the job. The session returns what it did not deliver. That
and all that follows goes over other nodes, on a detour that the scheduler has found (`FailedLinks`), like any
part on an auxiliary path: nodes on it only forward. The other end drops what it has received already, since
it knows whose contributions are in the sum of each chunk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, get_args

from netstorm.kvstore.paths.relay import reroute_part, without_detour
from netstorm.kvstore.paths.source_routes import reroute_message
from netstorm.observe.counters import Counters
from netstorm.protocol.messages import FailedLinks, Part, Routed
from netstorm.pslite.machine import Instruction, Send

__all__ = ["Detours"]

_ROUTED: Final = (Part, *get_args(Routed))
"""Messages that can go around a link."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _FailedLink:
    """One failed link."""

    detour: tuple[int, ...] = ()
    """Path around it; empty until the scheduler has found one."""
    try_at: float = math.inf
    """When the next trial is due; inf while one is under way."""
    waiting: list[Send] = field(default_factory=list)
    """Messages that wait for a detour."""


class Detours:
    """The failed links of one node."""

    def __init__(self, counters: Counters, retry_s: float) -> None:
        """Begin with all links working; try failed ones every `retry_s`."""
        self.avoided: Collection[tuple[int, int]] = frozenset()
        """(source, target) of all failed links that the scheduler has announced."""
        self._counters: Final = counters
        self._retry_s: Final = retry_s
        self._failed: Final[dict[int, _FailedLink]] = {}
        """By target."""

    def __bool__(self) -> bool:
        return bool(self._failed)

    def __contains__(self, target: int) -> bool:
        return target in self._failed

    def record_failure(self, target: int, now: float) -> bool:
        """Record that a link has failed, or a trial of it; return whether the link worked before."""
        found = self._failed.get(target)
        if found is not None:
            found.try_at = now + self._retry_s
            return False
        self._failed[target] = _FailedLink(try_at=now)
        self._counters.add("links_failed")
        return True

    def record_decision(self, rank: int, message: FailedLinks) -> list[tuple[int, tuple[int, ...]]]:
        """Record the scheduler's detours; return the targets that have one now, with its path.

        What waits for them is to be routed again (`release`).
        """
        self.avoided = frozenset((link.source, link.target) for link in message.links)
        found = []
        for link in message.links:
            if link.source == rank and link.target in self._failed:
                self._failed[link.target].detour = link.way
                found.append((link.target, link.way))
        return found

    def restored(self, target: int) -> list[Send]:
        """Record that a link works again; return what waited for it."""
        self._counters.add("links_restored")
        return self._failed.pop(target).waiting

    def release(self, target: int) -> list[Send]:
        """Return what waits for a link, which then waits no more."""
        link = self._failed[target]
        released, link.waiting = link.waiting, []
        return released

    def forget(self, target: int) -> None:
        """Drop what waits for a rank that is in the job no more."""
        self._failed.pop(target, None)

    def failed_targets(self) -> tuple[int, ...]:
        """Return the ranks to which links have failed."""
        return tuple(self._failed)

    def next_trial(self) -> float:
        """Return when the next trial is due."""
        return min((link.try_at for link in self._failed.values()), default=math.inf)

    def due_trials(self, now: float) -> list[int]:
        """Return the targets to which links are to be tried now; they count as tried."""
        found = [target for target, link in self._failed.items() if link.try_at <= now]
        for target in found:
            self._failed[target].try_at = math.inf
        return found

    def route(self, rank: int, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Return the instructions, with messages over failed links sent over detours. Those without a detour
        wait here.
        """
        found: list[Instruction] = []
        for instruction in instructions:
            if isinstance(instruction, Send) and isinstance(instruction.message, _ROUTED):
                send = self._routed(rank, instruction)
                if send is not None:
                    found.append(send)
            else:
                found.append(instruction)
        return found

    def _routed(self, rank: int, send: Send) -> Send | None:
        for _ in range(len(self._failed) + 1):
            link = self._failed.get(int(send.peer))
            if link is None:
                return send
            if not link.detour:
                link.waiting.append(send)
                return None
            part = send.message
            if not isinstance(part, Part):
                self._counters.add("parts_around_failed_links")
                send = reroute_message(send, rank, link.detour)
            elif part.is_aux and part.path[0] == rank and part.path[-1] not in self._failed:
                send = without_detour(send)  # an auxiliary path, while the link to its end works
            else:
                self._counters.add("parts_around_failed_links")
                send = reroute_part(send, rank, link.detour)
        # Detours that lead over one another's links: the scheduler soon corrects them.
        self._failed[int(send.peer)].waiting.append(send)
        return None
