"""Links out of this node that have failed: what goes around them, and when they are tried again. Pure.

A link that cannot be re-established does not end the job. What it did not deliver comes back from the
session, and goes with all that follows over other nodes, on a way that the scheduler has found
(`FailedLinks`). It is a part as any other on an auxiliary path: nodes on the way only forward it. What the
other end had got already it drops, as it knows whose contribution is in the sum of which chunk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, get_args

from netstorm.kvstore.paths.relay import around, direct
from netstorm.kvstore.paths.source_routes import around_link
from netstorm.observe.counters import Counters
from netstorm.protocol.messages import FailedLinks, Part, Routed
from netstorm.pslite.machine import Instruction, Send

__all__ = ["Detours"]

_ROUTED: Final = (Part, *get_args(Routed))
"""What may go around a link."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Down:
    """One link."""

    way: tuple[int, ...] = ()
    """Around it; empty while the scheduler has not said."""
    try_at: float = math.inf
    """When the next trial is due; inf while one is under way."""
    held: list[Send] = field(default_factory=list)
    """What waits for a way."""


class Detours:
    """What one node does about its failed links."""

    def __init__(self, counters: Counters, retry_s: float) -> None:
        """Begin with all links in order; try failed ones every `retry_s`."""
        self.avoided: Collection[tuple[int, int]] = frozenset()
        """(source, target) of all links that the scheduler says have failed."""
        self._counters: Final = counters
        self._retry_s: Final = retry_s
        self._down: Final[dict[int, _Down]] = {}
        """By target."""

    def __bool__(self) -> bool:
        return bool(self._down)

    def __contains__(self, target: int) -> bool:
        return target in self._down

    def lost(self, target: int, now: float) -> bool:
        """Note that a session could not be re-established; return whether that is news."""
        found = self._down.get(target)
        if found is not None:
            found.try_at = now + self._retry_s
            return False
        self._down[target] = _Down(try_at=now)
        self._counters.add("links_failed")
        return True

    def told(self, rank: int, message: FailedLinks) -> list[tuple[int, tuple[int, ...]]]:
        """Take the scheduler's word; return the targets to which there is a way now, and the ways.

        What was held for them is to be routed again (`released`).
        """
        self.avoided = frozenset((link.source, link.target) for link in message.links)
        found = []
        for link in message.links:
            if link.source == rank and link.target in self._down:
                self._down[link.target].way = link.way
                found.append((link.target, link.way))
        return found

    def restored(self, target: int) -> list[Send]:
        """Note that a link works again; return what was held for it."""
        self._counters.add("links_restored")
        return self._down.pop(target).held

    def released(self, target: int) -> list[Send]:
        """Return what was held for a link, and hold it no more."""
        down = self._down[target]
        held, down.held = down.held, []
        return held

    def targets(self) -> tuple[int, ...]:
        """Return the ranks to which links have failed."""
        return tuple(self._down)

    def due(self) -> float:
        """Return when the next trial is due."""
        return min((down.try_at for down in self._down.values()), default=math.inf)

    def trials(self, now: float) -> list[int]:
        """Return the targets to which links are to be tried now."""
        found = [target for target, down in self._down.items() if down.try_at <= now]
        for target in found:
            self._down[target].try_at = math.inf
        return found

    def route(self, rank: int, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Return what is to be done, with parts over failed links sent around them, or held until there is a
        way.
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
        for _ in range(len(self._down) + 1):
            down = self._down.get(int(send.peer))
            if down is None:
                return send
            if not down.way:
                down.held.append(send)
                return None
            part = send.message
            if not isinstance(part, Part):
                self._counters.add("parts_around_failed_links")
                send = around_link(send, rank, down.way)
            elif part.is_aux and part.path[0] == rank and part.path[-1] not in self._down:
                send = direct(send)  # a detour that was to be earlier than the link to its end
            else:
                self._counters.add("parts_around_failed_links")
                send = around(send, rank, down.way)
        self._down[int(send.peer)].held.append(
            send
        )  # ways that lead over one another's links: soon corrected
        return None
