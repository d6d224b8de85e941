"""When a chunk takes an auxiliary path instead of the link to its tree neighbour. Pure rules (design, §6).

Two of them: the paper's, which counts chunks (arXiv 2404.11352 §VI-A), and the default, which compares when a
chunk is expected to arrive. Both are asked as late as possible: chunks wait at the node, not in a link's
queue, until the link takes another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.pslite.session.link_state import LinkState
from netstorm.settings import AuxRule, Settings
from netstorm.topology.policy import Detour

__all__ = ["AuxiliaryOptions", "Exit", "PathState", "Ticket", "is_clearly_earlier", "queue_rule", "wait_s"]

MOST_OUTSTANDING: Final = 4
"""Chunks on one auxiliary path that its end has not confirmed. Bounds what relays hold, and what is lost on a
path that turns out to be slow; with 1 a path of two links is never more than half used.
"""

LEAST_WAITING: Final = 12
"""Chunks on and before a link with which it is worth a detour: with fewer, what the order of chunks does to
those who wait for them counts for more than when they come.
"""

_CLEARLY: Final = 0.8
"""A detour must take less than this part of the time that the chunk would take without it: estimates are some
10 % off, and to arrive a little earlier is not worth the links' work.
"""

_AT_LEAST: Final = 0.5
"""Part of the expected time below which a measured one is not believed: it is what is left of the whole after
what the chunk was expected to wait, and waits turn out to be shorter.
"""

_MEMORY_S: Final = 10.0
"""How long the time that a path took is believed: then it gets another chance."""

Ticket: TypeAlias = tuple[int, int, int, int, int]
"""What is on an auxiliary path: key, round, chunk, phase, version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryOptions:
    """How a node uses the auxiliary paths that a policy has. See the settings of these names."""

    rule: AuxRule = "arrival"
    busy_bound: int = 2
    queue_length: int = 1
    explore_share: float = 0.01

    @classmethod
    def from_settings(cls, settings: Settings) -> AuxiliaryOptions:
        """Return what the settings say."""
        return cls(
            rule=settings.aux_rule,
            busy_bound=settings.primary_busy_bound,
            queue_length=settings.auxiliary_queue_length,
            explore_share=settings.explore_share,
        )


class Exit:
    """A link out of this node, as it is when everything that has been decided so far is handed over."""

    __slots__ = ("bytes", "latency_s", "messages", "rate", "window")

    def __init__(self, state: LinkState, waiting_bytes: int = 0) -> None:
        """Begin with the link as it is, and with what else waits for it."""
        self.messages = state.messages
        self.bytes = state.bytes + waiting_bytes
        self.window = state.window
        self.rate = state.rate
        self.latency_s = state.latency_s

    def has_room(self, size: int) -> bool:
        """Return whether a message would be transmitted at once."""
        return self.bytes == 0 or self.bytes + size <= self.window

    def give(self, size: int) -> None:
        """Note a message that is handed over."""
        self.messages += 1
        self.bytes += size

    def seconds(self, size: int) -> float:
        """Return when so many more bytes would have arrived; the rate must be known.

        Of what is not acknowledged a round trip's worth has left already.
        """
        left = 2 * self.latency_s * self.rate
        return max(size, self.bytes + size - left) / self.rate + self.latency_s


class PathState:
    """What the first node of an auxiliary path knows of it."""

    __slots__ = ("_later_s", "_measured_at", "outstanding")

    def __init__(self) -> None:
        self.outstanding: Final[dict[Ticket, tuple[float, float]]] = {}
        """Chunks whose arrival at the end is not known: when they were given to it, and the seconds that they
        were expected to wait and to take for the first link."""
        self._later_s = 0.0
        self._measured_at: float | None = None

    def later_s(self, detour: Detour, size: int, now: float) -> float:
        """Return the seconds that a chunk takes over all links but the first: as of late, or as expected."""
        expected_s = sum(detour.seconds(link, size) for link in range(1, len(detour.links)))
        if self._measured_at is None or now > self._measured_at + _MEMORY_S:
            return expected_s
        return max(self._later_s, _AT_LEAST * expected_s)

    def given(self, ticket: Ticket, now: float, waits_s: float) -> None:
        """Note a chunk that takes this path."""
        self.outstanding[ticket] = (now, waits_s)

    def arrived(self, ticket: Ticket, now: float) -> bool:
        """Note that a chunk is at the end; False if it was not on its way."""
        found = self.outstanding.pop(ticket, None)
        if found is None:
            return False
        given_at, waits_s = found
        later_s = max(0.0, now - given_at - waits_s)
        if self._measured_at is None or now > self._measured_at + _MEMORY_S:
            self._later_s = later_s
        else:
            self._later_s += (later_s - self._later_s) / 4
        self._measured_at = now
        return True


def wait_s(first: Exit, size: int, detour: Detour, state: PathState, *, primary_s: float) -> float:
    """Return the seconds until a chunk leaves for the later links of a detour.

    It passes the first link, whose rate is measured or what the policy expects. Later links carry trees, too,
    and are as far in the order of the job as the link to the neighbour is: what waits there is not known, but
    that it is the same part of a round.

    Args:
        first: the detour's first link.
        size: of the chunk, in bytes.
        detour: from the policy.
        state: what is known of it here.
        primary_s: seconds until the chunk would have arrived without it.
    """
    passed_s = first.seconds(size) if first.rate else detour.seconds(0, first.bytes + size)
    slowest = min(rate for rate, _ in detour.links[1:])
    before_s = 8 * size * len(state.outstanding) / slowest
    return max(passed_s, before_s, detour.load * primary_s)


def is_clearly_earlier(detour_s: float, primary_s: float) -> bool:
    """Return whether a chunk that would arrive by these times should take the detour."""
    return detour_s < _CLEARLY * primary_s


def queue_rule(primary: Exit, first: Exit, outstanding: int, options: AuxiliaryOptions) -> bool:
    """Return whether the next chunk takes a path by the paper's rule (arXiv 2404.11352 §VI-A).

    The link is busy if more than PRIMARY_BUSY_BOUND chunks are on it; the path is not, if fewer than
    AUXILIARY_QUEUE_LENGTH are on its first link and on the path as a whole.
    """
    return (
        primary.messages > options.busy_bound
        and first.messages < options.queue_length
        and outstanding < options.queue_length
    )
