"""When a chunk takes an auxiliary path instead of the link to its tree neighbour. Pure rules (design, §6).

There are two: the paper's, which counts chunks (arXiv 2404.11352 §VI-A), and the default, which compares
expected times of arrival. Both decide as late as possible: chunks wait at the node, not in a link's queue,
until the link accepts another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.pslite.session.link_state import LinkState
from netstorm.settings import AuxRule, Settings
from netstorm.topology.policy import Detour

__all__ = [
    "AuxiliaryOptions",
    "OutgoingLink",
    "PartId",
    "PathState",
    "is_clearly_earlier",
    "queue_rule",
    "wait_s",
]

MAX_IN_FLIGHT: Final = 4
"""Most chunks on one auxiliary path that its end has not confirmed. It bounds what relays store, and the time
lost on a path that turns out to be slow. With 1, a path of two links would be at most half used.
"""

MIN_BACKLOG: Final = 12
"""Least chunks on a link and waiting for it that are worth a detour. With fewer, the order of arrival matters
more to those who wait than the time of arrival.
"""

_CLEARLY: Final = 0.8
"""A detour must take less than this part of the time that the chunk would take without it. Estimates are
about 10 % off, and a small gain is not worth the load on the links.
"""

_AT_LEAST: Final = 0.5
"""Least part of the expected time that a measured one may be. The measured time is the whole less the
expected wait, and real waits turn out to be shorter.
"""

_MEMORY_S: Final = 10.0
"""How long a path's measured time is used; then the path gets another chance."""

PartId: TypeAlias = tuple[int, int, int, int, int]
"""A part on an auxiliary path: key, round, chunk, phase, version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryOptions:
    """How a node uses the auxiliary paths that a policy has. See the settings of these names."""

    rule: AuxRule = "arrival"
    busy_bound: int = 2
    queue_length: int = 1
    explore_share: float = 0.01

    @classmethod
    def from_settings(cls, settings: Settings) -> AuxiliaryOptions:
        """Return the options that the settings ask for."""
        return cls(
            rule=settings.aux_rule,
            busy_bound=settings.primary_busy_bound,
            queue_length=settings.auxiliary_queue_length,
            explore_share=settings.explore_share,
        )


class OutgoingLink:
    """The load of a link out of this node, including what has been decided but not handed over yet."""

    __slots__ = ("bytes", "latency_s", "messages", "rate", "window")

    def __init__(self, state: LinkState, waiting_bytes: int = 0) -> None:
        """Begin with the link's state, and the bytes that wait here for the link."""
        self.messages = state.messages
        self.bytes = state.bytes + waiting_bytes
        self.window = state.window
        self.rate = state.rate
        self.latency_s = state.latency_s

    def has_room(self, size: int) -> bool:
        """Return whether a message would be transmitted at once."""
        return self.bytes == 0 or self.bytes + size <= self.window

    def add(self, size: int) -> None:
        """Add a message to the load."""
        self.messages += 1
        self.bytes += size

    def arrival_s(self, size: int) -> float:
        """Return the seconds until `size` more bytes would have arrived; the rate must be known.

        A round trip's worth of the unacknowledged bytes has left already.
        """
        left = 2 * self.latency_s * self.rate
        return max(size, self.bytes + size - left) / self.rate + self.latency_s


class PathState:
    """The state of an auxiliary path at its first node."""

    __slots__ = ("_measured_at", "_remaining_s", "in_flight")

    def __init__(self) -> None:
        self.in_flight: Final[dict[PartId, tuple[float, float]]] = {}
        """Chunks whose arrival is not confirmed: when they were sent, and the seconds that they were expected
        to wait and to take for the first link."""
        self._remaining_s = 0.0
        self._measured_at: float | None = None

    def remaining_s(self, detour: Detour, size: int, now: float) -> float:
        """Return the seconds that a chunk takes over all links but the first, as measured lately or as
        expected.
        """
        expected_s = sum(detour.seconds(link, size) for link in range(1, len(detour.links)))
        if self._measured_at is None or now > self._measured_at + _MEMORY_S:
            return expected_s
        return max(self._remaining_s, _AT_LEAST * expected_s)

    def record_sent(self, part: PartId, now: float, waits_s: float) -> None:
        """Record a chunk that takes this path."""
        self.in_flight[part] = (now, waits_s)

    def record_arrival(self, part: PartId, now: float) -> bool:
        """Record the arrival of a chunk; return False if it was not in flight."""
        found = self.in_flight.pop(part, None)
        if found is None:
            return False
        sent_at, waits_s = found
        remaining_s = max(0.0, now - sent_at - waits_s)
        if self._measured_at is None or now > self._measured_at + _MEMORY_S:
            self._remaining_s = remaining_s
        else:
            self._remaining_s += (remaining_s - self._remaining_s) / 4
        self._measured_at = now
        return True


def wait_s(first: OutgoingLink, size: int, detour: Detour, state: PathState, *, primary_s: float) -> float:
    """Return the seconds until a chunk leaves for the later links of a detour.

    First it passes the first link, at its measured rate or at the one that the policy expects. What waits at
    later links is not known; they carry trees, too, so they are assumed to be as far in the round as the link
    to the neighbour is.

    Args:
        first: load of the detour's first link.
        size: of the chunk, in bytes.
        detour: from the policy.
        state: of the detour's path.
        primary_s: seconds until the chunk would arrive without the detour.
    """
    passed_s = first.arrival_s(size) if first.rate else detour.seconds(0, first.bytes + size)
    slowest = min(rate for rate, _ in detour.links[1:])
    before_s = 8 * size * len(state.in_flight) / slowest
    return max(passed_s, before_s, detour.load * primary_s)


def is_clearly_earlier(detour_s: float, primary_s: float) -> bool:
    """Return whether a chunk with these times of arrival should take the detour."""
    return detour_s < _CLEARLY * primary_s


def queue_rule(primary: OutgoingLink, first: OutgoingLink, in_flight: int, options: AuxiliaryOptions) -> bool:
    """Return whether the next chunk takes a path by the paper's rule (arXiv 2404.11352 §VI-A).

    The link is busy if more than PRIMARY_BUSY_BOUND chunks are on it; the path is not, if fewer than
    AUXILIARY_QUEUE_LENGTH are on its first link and on the path as a whole.
    """
    return (
        primary.messages > options.busy_bound
        and first.messages < options.queue_length
        and in_flight < options.queue_length
    )
