"""Chunks for neighbours that have auxiliary paths: they wait here until their path is decided. Pure.

If all chunks of a round went to a link's queue at once, they would be there before the speed of the link is
known. So a chunk leaves when its link would transmit it, in the order of the job, or earlier if a rule sends
it over a detour. A chunk for a neighbour may take any path to it, whatever policies chunk and path are of.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from netstorm.kvstore.paths.auxiliary import (
    MAX_IN_FLIGHT,
    MIN_BACKLOG,
    AuxiliaryOptions,
    OutgoingLink,
    PartId,
    PathState,
    is_clearly_earlier,
    queue_rule,
    wait_s,
)
from netstorm.kvstore.paths.exploration import Exploration
from netstorm.observe.counters import Counters
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Part
from netstorm.pslite.machine import Order, Send
from netstorm.pslite.session.link_state import Links
from netstorm.topology.policy import Detour

__all__ = ["Dispatch", "part_id"]

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
    """All chunks that wait on one node, and all auxiliary paths in use."""

    def __init__(self, options: AuxiliaryOptions, counters: Counters) -> None:
        self._options: Final = options
        self._counters: Final = counters
        self._backlogs: dict[int, _Backlog] = {}
        """By neighbour; only those that something waits for."""
        self._paths: dict[tuple[int, ...], PathState] = {}
        self._avoided: Collection[tuple[int, int]] = ()
        self._numbers = 0
        self._exploration: Final = Exploration(options.explore_share)

    def is_idle(self) -> bool:
        """Return whether nothing waits."""
        return not self._backlogs

    def has_backlog(self, target: int) -> bool:
        """Return whether something waits for a neighbour."""
        return target in self._backlogs

    def enqueue(self, send: Send, detours: tuple[Detour, ...] = ()) -> None:
        """Queue a part for a neighbour, with the detours to it. Without detours it only keeps its place in
        the order.
        """
        backlog = self._backlogs.setdefault(int(send.peer), _Backlog())
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

        for target in list(self._backlogs):
            backlog = self._backlogs[target]
            primary = load_of(target)
            ways: list[_Way] = []
            for detour in backlog.detours:
                if self._avoided and not self._is_open(detour.path):
                    continue
                first, other = load_of(detour.path[1]), self._backlogs.get(detour.path[1])
                if other is not None:
                    first = OutgoingLink(links(Peer(detour.path[1])), other.bytes)
                ways.append((detour, first))
            yield from self._explore(backlog, primary, ways, now)
            yield from self._by_rule(backlog, primary, ways, now)
            if not backlog.items:
                del self._backlogs[target]

    def take_out(self, wanted: Callable[[Hashable], bool]) -> list[Send]:
        """Remove and return the waiting parts whose tag is `wanted`."""
        taken: list[Send] = []
        for target, backlog in list(self._backlogs.items()):
            left: list[_Item] = []
            for item in backlog.items:
                if item.send.tag is not None and wanted(item.send.tag):
                    taken.append(item.send)
                    backlog.bytes -= item.size
                else:
                    left.append(item)
            backlog.items = left
            if not left:
                del self._backlogs[target]
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
        self._backlogs.clear()
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
            found = self._first_earlier(backlog, primary, free, now)
            if found is None:
                return
            index, way, primary_s = found
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
            found = fastest(item.size, primary_s) if item.may_detour else None
            if found is not None:
                return index, found, primary_s
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
            for other in self._backlogs.values()
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
