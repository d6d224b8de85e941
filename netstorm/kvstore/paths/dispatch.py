"""Chunks for neighbours that have auxiliary paths: they wait here until it is decided how they go.

Handed to a link at once, a round's chunks would all be in its queue before anything is known of how fast it
is. So a chunk goes when its link would transmit it, in the order of the job, or earlier if a rule sends it
over a detour. Any chunk for a neighbour may take any path to it, whatever policy either is of.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import pairwise
from typing import Final

import msgspec

from netstorm.kvstore.paths.auxiliary import (
    LEAST_WAITING,
    MOST_OUTSTANDING,
    AuxiliaryOptions,
    Exit,
    PathState,
    Ticket,
    is_clearly_earlier,
    queue_rule,
    wait_s,
)
from netstorm.observe.counters import Counters
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Part
from netstorm.pslite.machine import Order, Send
from netstorm.pslite.session.link_state import Links
from netstorm.topology.policy import Detour

__all__ = ["Dispatch", "ticket_of"]

_HEADER: Final = 64
"""Bytes of a part beside its payload, about."""

_REMEMBERED: Final = 256
"""Paths whose times are remembered, at least."""

_LOOKS: Final = 6
"""Chunks that explore a path one after the other. An estimate rests on PROBE_CHUNK_NUM of late (4), and the
first one only makes the connections and shows their latency: single chunks, far apart, never add up to one.
"""

_FIRST_LOOK: Final = 5.0
"""While there are paths that have not been explored, so many times the share of chunks looks."""

_LATE_EVERY_S: Final = 30.0
"""How often a chunk looks at a known link though it will be late, and the round with it."""

_Item = tuple[Order, int, int, Send, bool]
"""Order, number, bytes, what to send, whether it may take a detour."""


class _Hop:
    """What waits for one neighbour."""

    __slots__ = ("bytes", "detours", "items")

    def __init__(self) -> None:
        self.items: list[_Item] = []
        """In order."""
        self.bytes = 0
        self.detours: tuple[Detour, ...] = ()
        """Of the policy heard of last."""


class Dispatch:
    """All chunks that wait, and all auxiliary paths in use."""

    def __init__(self, options: AuxiliaryOptions, counters: Counters) -> None:
        self._options: Final = options
        self._counters: Final = counters
        self._hops: dict[int, _Hop] = {}
        """By neighbour; only those that something waits for."""
        self._paths: dict[tuple[int, ...], PathState] = {}
        self._avoided: Collection[tuple[int, int]] = ()
        self._numbers = 0
        self._owed = 0.0
        """Chunks that should have gone over links that are to be measured."""
        self._looks: dict[tuple[int, ...], int] = {}
        """By path: how many chunks have explored it."""
        self._late_at = -math.inf
        """When a chunk last explored though it would be late."""
        self._exploring: Ticket | None = None
        """The one that is on its way; only one at a time may be late."""

    def idle(self) -> bool:
        """Return whether nothing waits."""
        return not self._hops

    def waits_for(self, target: int) -> bool:
        """Return whether something waits for a neighbour already."""
        return target in self._hops

    def hold(self, send: Send, detours: tuple[Detour, ...] = ()) -> None:
        """Take a part for a neighbour, with the detours to it; without any, it only keeps its place in the
        order.
        """
        hop = self._hops.setdefault(int(send.peer), _Hop())
        if detours:
            hop.detours = detours
            self._owed += self._options.explore_share * self._wish_to_explore(detours)
        size = _HEADER + (0 if send.payload is None else memoryview(send.payload).nbytes)
        self._numbers += 1
        bisect.insort(hop.items, (send.order, self._numbers, size, send, bool(detours)))
        hop.bytes += size

    def run(self, links: Links, now: float) -> Iterator[Send]:
        """Yield what goes now. Exhaust it."""
        exits: dict[int, Exit] = {}

        def exit_to(target: int) -> Exit:
            if target not in exits:
                exits[target] = Exit(links(Peer(target)))
            return exits[target]

        for target in list(self._hops):
            hop = self._hops[target]
            primary = exit_to(target)
            firsts: list[tuple[Detour, Exit]] = []
            for detour in hop.detours:
                if self._avoided and not self._is_open(detour.path):
                    continue
                first, other = exit_to(detour.path[1]), self._hops.get(detour.path[1])
                if other is not None:
                    first = Exit(links(Peer(detour.path[1])), other.bytes)
                firsts.append((detour, first))
            yield from self._explore(hop, primary, firsts, now)
            yield from self._by_rule(hop, primary, firsts, now)
            if not hop.items:
                del self._hops[target]

    def take_out(self, wanted: Callable[[Hashable], bool]) -> list[Send]:
        """Take what is wanted, by its tag, of all that waits."""
        taken: list[Send] = []
        for target, hop in list(self._hops.items()):
            left: list[_Item] = []
            for item in hop.items:
                send = item[3]
                if send.tag is not None and wanted(send.tag):
                    taken.append(send)
                    hop.bytes -= item[2]
                else:
                    left.append(item)
            hop.items = left
            if not left:
                del self._hops[target]
        return taken

    def avoid(self, links: Collection[tuple[int, int]]) -> None:
        """Take no detour over any of these links, given as (source, target), from now on; of what is on one
        nothing will be confirmed.
        """
        self._avoided = links
        self._paths = {path: state for path, state in self._paths.items() if self._is_open(path)}
        self._exploring = None

    def _is_open(self, path: tuple[int, ...]) -> bool:
        return not any(hop in self._avoided for hop in pairwise(path))

    def arrived(self, path: tuple[int, ...], ticket: Ticket, now: float) -> None:
        """Note that a part is at the end of its auxiliary path."""
        state = self._paths.get(path)
        if state is None or not state.arrived(ticket, now):
            self._counters.add("credits_unasked")
        if ticket == self._exploring:
            self._exploring = None

    def clear(self) -> None:
        """Forget everything."""
        self._hops.clear()
        self._paths.clear()

    # ------------------------------------------------------------------------------------------------- inside

    def _by_rule(
        self, hop: _Hop, primary: Exit, firsts: list[tuple[Detour, Exit]], now: float
    ) -> Iterator[Send]:
        firsts = [(detour, first) for detour, first in firsts if not detour.explore]
        if self._options.rule == "arrival":
            yield from self._by_arrival(hop, primary, firsts, now)
        while hop.items:
            size, _, may_detour = hop.items[0][2:]
            if may_detour and self._options.rule == "queue":
                for detour, first in firsts:
                    if queue_rule(primary, first, len(self._state(detour).outstanding), self._options):
                        yield self._detoured(hop, 0, (detour, first), now)
                        break
                else:
                    if not primary.has_room(size):
                        return
                    yield self._taken(hop, 0, primary)
                continue
            if not primary.has_room(size):
                return
            yield self._taken(hop, 0, primary)

    def _by_arrival(
        self, hop: _Hop, primary: Exit, firsts: list[tuple[Detour, Exit]], now: float
    ) -> Iterator[Send]:
        """Give detours the first chunks that arrive clearly earlier there than in their turn on the link."""
        while hop.items and primary.rate:
            free = [
                (detour, first, self._state(detour))
                for detour, first in firsts
                if len(self._state(detour).outstanding) < MOST_OUTSTANDING
            ]
            found = self._first_earlier(hop, primary, free, now)
            if found is None:
                return
            index, way, primary_s = found
            yield self._detoured(hop, index, way, now, primary_s=primary_s)

    def _first_earlier(
        self, hop: _Hop, primary: Exit, free: list[tuple[Detour, Exit, PathState]], now: float
    ) -> tuple[int, tuple[Detour, Exit], float] | None:
        """Return the first chunk that some detour takes clearly earlier, the fastest such detour with its
        first link, and the seconds that the chunk would take without it.

        The later a chunk's turn is, the more a detour gains: so if the last one would not gain, none does.
        """

        def fastest(size: int, primary_s: float) -> tuple[Detour, Exit] | None:
            soonest, place = min(
                (
                    wait_s(first, size, detour, state, primary_s=primary_s)
                    + state.later_s(detour, size, now),
                    place,
                )
                for place, (detour, first, state) in enumerate(free)
            )
            return free[place][:2] if is_clearly_earlier(soonest, primary_s) else None

        size = hop.items[-1][2]
        if not free or primary.bytes + hop.bytes < LEAST_WAITING * size:
            return None
        if fastest(size, primary.seconds(hop.bytes)) is None:
            return None
        ahead = 0
        for index, (_, _, size, _, may_detour) in enumerate(hop.items):
            ahead += size
            primary_s = primary.seconds(ahead)
            found = fastest(size, primary_s) if may_detour else None
            if found is not None:
                return index, found, primary_s
        return None

    def _wish_to_explore(self, detours: Collection[Detour]) -> float:
        """Return how many times the usual share of chunks for a hop should look at other links."""
        looks = [detour.again or self._turn(detour) > 0 for detour in detours if detour.explore]
        return (1.0 if all(looks) else _FIRST_LOOK) if looks else 0.0

    def _turn(self, detour: Detour) -> int:
        """Return how often a path has had its turn to be explored."""
        return self._looks.get(detour.path, 0) // _LOOKS

    def _explore(
        self, hop: _Hop, primary: Exit, firsts: list[tuple[Detour, Exit]], now: float
    ) -> Iterator[Send]:
        """Give one chunk in a while to a link that is to be measured: the first one that will not be late
        there, in order, since others wait for a chunk whose turn it was; or the next one, if the link has not
        been looked at, or not for long.
        """
        if self._owed < 1.0 or self._exploring is not None or not hop.items or not hop.items[0][4]:
            return
        unseen = [(self._turn(detour), place) for place, (detour, _) in enumerate(firsts) if detour.explore]
        if unseen and min(unseen)[0] <= self._least_looked_at():
            detour, first = firsts[min(unseen)[1]]
            index = self._first_in_time(hop, primary, (detour, first), now)
            if index is None:
                if detour.again or self._turn(detour) > 0:
                    if now < self._late_at + _LATE_EVERY_S:
                        return
                    self._late_at = now
                index = 0
            self._looks[detour.path] = self._looks.get(detour.path, 0) + 1
            self._owed = min(self._owed - 1.0, 1.0)
            part = hop.items[index][3].message
            assert isinstance(part, Part)
            self._exploring = ticket_of(part)
            self._counters.add("explored")
            yield self._detoured(hop, index, (detour, first), now)

    def _first_in_time(self, hop: _Hop, primary: Exit, way: tuple[Detour, Exit], now: float) -> int | None:
        """Return the place of the first chunk that would come clearly earlier by a detour; None: none."""
        if not primary.rate:
            return 0
        (detour, first), state, ahead = way, self._state(way[0]), 0
        for index, (_, _, size, _, may_detour) in enumerate(hop.items):
            ahead += size
            primary_s = primary.seconds(ahead)
            waits_s = wait_s(first, size, detour, state, primary_s=primary_s)
            if may_detour and is_clearly_earlier(waits_s + state.later_s(detour, size, now), primary_s):
                return index
        return None

    def _least_looked_at(self) -> int:
        """Return how often the path that is next has had its turn, of all that a chunk could explore now."""
        waiting = [hop for hop in self._hops.values() if hop.items and hop.items[0][4]]
        return min(self._turn(one) for hop in waiting for one in hop.detours if one.explore)

    def _taken(self, hop: _Hop, index: int, over: Exit) -> Send:
        _, _, size, send, _ = hop.items.pop(index)
        hop.bytes -= size
        over.give(size)
        return send

    def _detoured(
        self, hop: _Hop, index: int, way: tuple[Detour, Exit], now: float, *, primary_s: float = 0.0
    ) -> Send:
        detour, first = way
        state = self._state(detour)
        waits_s = wait_s(first, hop.items[index][2], detour, state, primary_s=primary_s)
        send = self._taken(hop, index, first)
        part = send.message
        assert isinstance(part, Part)
        state.given(ticket_of(part), now, waits_s)
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
                self._paths = {path: state for path, state in self._paths.items() if state.outstanding}
            found = self._paths[detour.path] = PathState()
        return found


def ticket_of(part: Part) -> Ticket:
    """Return what tells a part from all others on its path."""
    return part.key, part.round, part.chunk, int(part.phase), part.version
