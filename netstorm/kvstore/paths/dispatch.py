"""Chunks for neighbours that have auxiliary paths: they wait here until their path is decided. Pure.

If all chunks of a round went to a link's queue at once, they would be there before the speed of the link is
known. So a chunk leaves when its link would transmit it, in the order of the job, or earlier if a rule sends
it over a detour. A chunk for a neighbour may take any path to it, whatever policies chunk and path are of.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import msgspec

from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Part
from netstorm.pslite.machine import Links, LinkState, Order, Send
from netstorm.settings import AuxRule, Settings
from netstorm.topology.policy import Detour

__all__ = ["AuxiliaryOptions", "Dispatch", "part_id"]


# When a chunk takes an auxiliary path instead of the link to its tree neighbour. Pure rules (design, §6).
#
# There are two: the paper's, which counts chunks (arXiv 2404.11352 §VI-A), and the default, which compares
# expected times of arrival. Both decide as late as possible: chunks wait at the node, not in a link's queue,
# until the link accepts another one.

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
    queue_of_path: bool = False
    """The queue rule counts what was sent over a path (the paper's Fig. 7), and not what else is on its first
    link."""
    explore_share: float = 0.01

    @classmethod
    def from_settings(cls, settings: Settings) -> AuxiliaryOptions:
        """Return the options that the settings ask for."""
        return cls(
            rule=settings.aux_rule,
            busy_bound=settings.primary_busy_bound,
            queue_length=settings.auxiliary_queue_length,
            queue_of_path=settings.aux_search == "paper",
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
        sent = self.in_flight.pop(part, None)
        if sent is None:
            return False
        sent_at, waits_s = sent
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
    AUXILIARY_QUEUE_LENGTH are on its first link and on the path as a whole. With the paths of Algorithm 3,
    only the path counts: trees of many roots leave no link idle.
    """
    return (
        primary.messages > options.busy_bound
        and (options.queue_of_path or first.messages < options.queue_length)
        and in_flight < options.queue_length
    )


_HEADER: Final = 64
"""Bytes of a part beside its payload, about."""

_REMEMBERED: Final = 256
"""Least number of paths whose times are remembered."""

_Way = tuple[Detour, OutgoingLink]
"""A detour, and the load of its first link."""


class _Item(NamedTuple):
    """A part that waits. Items sort by their first two fields, which differ between any two."""

    order: Order
    number: int
    size: int
    """In bytes."""
    send: Send
    may_detour: bool


class _Backlog:
    """What waits for one neighbour."""

    __slots__ = ("bytes", "detours", "items")

    def __init__(self) -> None:
        self.items: list[_Item] = []
        """In order."""
        self.bytes = 0
        self.detours: tuple[Detour, ...] = ()
        """Of the policy of the part that came last."""


class Dispatch:
    """All chunks that wait on one node, and all auxiliary paths in use.

    Attributes:
        backlogs: by neighbour, what waits for it; only those that something waits for.
    """

    def __init__(self, options: AuxiliaryOptions, counters: Counters) -> None:
        self._options: Final = options
        self._counters: Final = counters
        self.backlogs: Final[dict[int, _Backlog]] = {}
        self._paths: dict[tuple[int, ...], PathState] = {}
        self._avoided: Collection[tuple[int, int]] = ()
        self._numbers = 0
        self._exploration: Final = Exploration(options.explore_share)

    def enqueue(self, send: Send, detours: tuple[Detour, ...] = ()) -> None:
        """Queue a part for a neighbour, with the detours to it. Without detours it only keeps its place in
        the order.
        """
        backlog = self.backlogs.setdefault(int(send.peer), _Backlog())
        if detours:
            backlog.detours = detours
            self._exploration.count_chunk(detours)
        size = _HEADER + (0 if send.payload is None else memoryview(send.payload).nbytes)
        self._numbers += 1
        bisect.insort(backlog.items, _Item(send.order, self._numbers, size, send, bool(detours)))
        backlog.bytes += size

    def run(self, links: Links, now: float) -> Iterator[Send]:
        """Yield what leaves now. Exhaust it."""
        loads: dict[int, OutgoingLink] = {}

        def load_of(target: int) -> OutgoingLink:
            if target not in loads:
                loads[target] = OutgoingLink(links(Peer(target)))
            return loads[target]

        for target in list(self.backlogs):
            backlog = self.backlogs[target]
            primary = load_of(target)
            ways: list[_Way] = []
            for detour in backlog.detours:
                if self._avoided and not self._is_open(detour.path):
                    continue
                first, other = load_of(detour.path[1]), self.backlogs.get(detour.path[1])
                if other is not None:
                    first = OutgoingLink(links(Peer(detour.path[1])), other.bytes)
                ways.append((detour, first))
            yield from self._explore(backlog, primary, ways, now)
            yield from self._by_rule(backlog, primary, ways, now)
            if not backlog.items:
                del self.backlogs[target]

    def take_out(self, wanted: Callable[[Hashable], bool]) -> list[Send]:
        """Remove and return the waiting parts whose tag is `wanted`."""
        taken: list[Send] = []
        for target, backlog in list(self.backlogs.items()):
            left: list[_Item] = []
            for item in backlog.items:
                if item.send.tag is not None and wanted(item.send.tag):
                    taken.append(item.send)
                    backlog.bytes -= item.size
                else:
                    left.append(item)
            backlog.items = left
            if not left:
                del self.backlogs[target]
        return taken

    def avoid(self, links: Collection[tuple[int, int]]) -> None:
        """Use no detour over these links, given as (source, target), from now on. Arrivals over them will not
        be confirmed.
        """
        self._avoided = links
        self._paths = {path: state for path, state in self._paths.items() if self._is_open(path)}
        self._exploration.forget_in_flight()

    def record_arrival(self, path: tuple[int, ...], part: PartId, now: float) -> None:
        """Record that a part has arrived at the end of its auxiliary path."""
        state = self._paths.get(path)
        if state is None or not state.record_arrival(part, now):
            self._counters.add("credits_unasked")
        self._exploration.record_arrival(part)

    def clear(self) -> None:
        """Drop all parts and paths."""
        self.backlogs.clear()
        self._paths.clear()

    # ------------------------------------------------------------------------------------------------- inside

    def _is_open(self, path: tuple[int, ...]) -> bool:
        return not any(hop in self._avoided for hop in pairwise(path))

    def _by_rule(
        self, backlog: _Backlog, primary: OutgoingLink, ways: list[_Way], now: float
    ) -> Iterator[Send]:
        ways = [(detour, first) for detour, first in ways if not detour.explore]
        if self._options.rule == "arrival":
            yield from self._by_arrival(backlog, primary, ways, now)
        while backlog.items:
            item = backlog.items[0]
            if item.may_detour and self._options.rule == "queue":
                for detour, first in ways:
                    if queue_rule(primary, first, len(self._state(detour).in_flight), self._options):
                        yield self._detoured(backlog, 0, (detour, first), now)
                        break
                else:
                    if not primary.has_room(item.size):
                        return
                    yield self._taken(backlog, 0, primary)
                continue
            if not primary.has_room(item.size):
                return
            yield self._taken(backlog, 0, primary)

    def _by_arrival(
        self, backlog: _Backlog, primary: OutgoingLink, ways: list[_Way], now: float
    ) -> Iterator[Send]:
        """Send the first chunks that arrive clearly earlier over a detour than in their turn on the link."""
        while backlog.items and primary.rate:
            free = [
                (detour, first, self._state(detour))
                for detour, first in ways
                if len(self._state(detour).in_flight) < MAX_IN_FLIGHT
            ]
            earlier = self._first_earlier(backlog, primary, free, now)
            if earlier is None:
                return
            index, way, primary_s = earlier
            yield self._detoured(backlog, index, way, now, primary_s=primary_s)

    def _first_earlier(
        self,
        backlog: _Backlog,
        primary: OutgoingLink,
        free: list[tuple[Detour, OutgoingLink, PathState]],
        now: float,
    ) -> tuple[int, _Way, float] | None:
        """Return the first chunk that arrives clearly earlier over a detour, the fastest such detour, and the
        seconds that the chunk would take without it.

        The later a chunk's turn is, the more a detour gains. So if the last chunk gains nothing, none does.
        """

        def fastest(size: int, primary_s: float) -> _Way | None:
            soonest, place = min(
                (
                    wait_s(first, size, detour, state, primary_s=primary_s)
                    + state.remaining_s(detour, size, now),
                    place,
                )
                for place, (detour, first, state) in enumerate(free)
            )
            return free[place][:2] if is_clearly_earlier(soonest, primary_s) else None

        size = backlog.items[-1].size
        if not free or primary.bytes + backlog.bytes < MIN_BACKLOG * size:
            return None
        if fastest(size, primary.arrival_s(backlog.bytes)) is None:
            return None
        ahead = 0
        for index, item in enumerate(backlog.items):
            ahead += item.size
            primary_s = primary.arrival_s(ahead)
            way = fastest(item.size, primary_s) if item.may_detour else None
            if way is not None:
                return index, way, primary_s
        return None

    def _explore(
        self, backlog: _Backlog, primary: OutgoingLink, ways: list[_Way], now: float
    ) -> Iterator[Send]:
        """Send a chunk over a path that is to be measured, if one may explore: the first chunk that will not
        be late there; or the next chunk, if the path is unexplored or has not been explored for long.
        """
        if not self._exploration.may_explore() or not backlog.items or not backlog.items[0].may_detour:
            return
        waiting = (
            detour
            for other in self.backlogs.values()
            if other.items and other.items[0].may_detour
            for detour in other.detours
        )
        place = self._exploration.next_path([detour for detour, _ in ways], waiting)
        if place is None:
            return
        way = ways[place]
        index = self._first_in_time(backlog, primary, way, now)
        if index is None:
            if not self._exploration.may_be_late(way[0], now):
                return
            index = 0
        part = backlog.items[index].send.message
        assert isinstance(part, Part)
        self._exploration.record_sent(way[0], part_id(part))
        self._counters.add("explored")
        yield self._detoured(backlog, index, way, now)

    def _first_in_time(self, backlog: _Backlog, primary: OutgoingLink, way: _Way, now: float) -> int | None:
        """Return the index of the first chunk that would arrive clearly earlier over a detour; None: none."""
        if not primary.rate:
            return 0
        (detour, first), state, ahead = way, self._state(way[0]), 0
        for index, item in enumerate(backlog.items):
            ahead += item.size
            primary_s = primary.arrival_s(ahead)
            waits_s = wait_s(first, item.size, detour, state, primary_s=primary_s)
            detour_s = waits_s + state.remaining_s(detour, item.size, now)
            if item.may_detour and is_clearly_earlier(detour_s, primary_s):
                return index
        return None

    def _taken(self, backlog: _Backlog, index: int, over: OutgoingLink) -> Send:
        item = backlog.items.pop(index)
        backlog.bytes -= item.size
        over.add(item.size)
        return item.send

    def _detoured(
        self, backlog: _Backlog, index: int, way: _Way, now: float, *, primary_s: float = 0.0
    ) -> Send:
        detour, first = way
        state = self._state(detour)
        waits_s = wait_s(first, backlog.items[index].size, detour, state, primary_s=primary_s)
        send = self._taken(backlog, index, first)
        part = send.message
        assert isinstance(part, Part)
        state.record_sent(part_id(part), now, waits_s)
        self._counters.add("detoured")
        return Send(
            peer=Peer(detour.path[1]),
            message=msgspec.structs.replace(part, is_aux=True, path=detour.path, hop=1),
            payload=send.payload,
            order=send.order,
            payload_crc=send.payload_crc,
        )

    def _state(self, detour: Detour) -> PathState:
        found = self._paths.get(detour.path)
        if found is None:
            if len(self._paths) >= 2 * _REMEMBERED:
                self._paths = {path: state for path, state in self._paths.items() if state.in_flight}
            found = self._paths[detour.path] = PathState()
        return found


def part_id(part: Part) -> PartId:
    """Return what tells a part from all others on its path."""
    return part.key, part.round, part.chunk, int(part.phase), part.version


# Exploration: which chunk takes a detour only to measure its links, and when.
#
# A policy may mark detours as `explore`: links that no tree uses, whose bandwidth is to be estimated. A small
# share of the chunks (EXPLORE_SHARE) goes over them, one at a time. A chunk that arrives late delays its
# round, so chunks that would not be late are preferred.

_CHUNKS_PER_TURN: Final = 6
"""Chunks that explore a path one after the other. An estimate rests on the last PROBE_CHUNK_NUM (4) chunks,
and the first chunk only opens the connections and shows their latency. Single chunks, far apart, never add up
to an estimate.
"""

_UNEXPLORED_FACTOR: Final = 5.0
"""While there are unexplored paths, so many times the usual share of chunks explores."""

_LATE_EVERY_S: Final = 30.0
"""How often a chunk may explore a known path though it, and its round, will be late."""


class Exploration:
    """The exploration of all paths of one node."""

    def __init__(self, share: float) -> None:
        """Let this share of the chunks explore."""
        self._share: Final = share
        self._budget = 0.0
        """Chunks that may explore now."""
        self._explored: Final[dict[tuple[int, ...], int]] = {}
        """By path: how many chunks have explored it."""
        self._late_at = -math.inf
        """When a chunk last explored though it would be late."""
        self._in_flight: PartId | None = None
        """The chunk that explores now; only one at a time may be late."""

    def count_chunk(self, detours: Collection[Detour]) -> None:
        """Add to the budget for a chunk whose neighbour has these detours."""
        known = [detour.again or self._turns(detour) > 0 for detour in detours if detour.explore]
        if known:
            self._budget += self._share * (1.0 if all(known) else _UNEXPLORED_FACTOR)

    def may_explore(self) -> bool:
        """Return whether a chunk may explore now."""
        return self._budget >= 1.0 and self._in_flight is None

    def next_path(self, detours: Sequence[Detour], all_detours: Iterable[Detour]) -> int | None:
        """Return the index of the detour to explore; None: it is another neighbour's turn.

        Args:
            detours: usable ones to one neighbour.
            all_detours: those to all neighbours that chunks wait for.
        """
        turns = [(self._turns(detour), index) for index, detour in enumerate(detours) if detour.explore]
        if turns and min(turns)[0] <= min(self._turns(detour) for detour in all_detours if detour.explore):
            return min(turns)[1]
        return None

    def may_be_late(self, detour: Detour, now: float) -> bool:
        """Return whether a chunk may explore a path though it will be late; if so, it counts as sent."""
        if detour.again or self._turns(detour) > 0:
            if now < self._late_at + _LATE_EVERY_S:
                return False
            self._late_at = now
        return True

    def record_sent(self, detour: Detour, part: PartId) -> None:
        """Record that a chunk explores a path."""
        self._explored[detour.path] = self._explored.get(detour.path, 0) + 1
        self._budget = min(self._budget - 1.0, 1.0)
        self._in_flight = part

    def record_arrival(self, part: PartId) -> None:
        """Record the arrival of a chunk."""
        if part == self._in_flight:
            self._in_flight = None

    def forget_in_flight(self) -> None:
        """Wait for no confirmation any more."""
        self._in_flight = None

    def _turns(self, detour: Detour) -> int:
        """Return how often a path has had its turn."""
        return self._explored.get(detour.path, 0) // _CHUNKS_PER_TURN
