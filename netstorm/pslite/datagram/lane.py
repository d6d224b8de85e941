"""One lane: values from one process to another as packets that need no order. Pure.

The sender cuts messages into packets, paces them over several channels (paths of their own, where the network
balances by ports), and sends again what does not arrive: a packet is lost if one that left clearly later on
the same channel has arrived, or if nothing has for too long. The receiver puts messages together, in memory
that is bounded, and acknowledges numbers of packets. Every transmission has a number of its own, so nobody
confuses a packet with its copy, and a packet that comes twice changes nothing.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from netstorm.errors import ProtocolViolation
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer
from netstorm.pslite.datagram.pace import Pace
from netstorm.pslite.datagram.packets import (
    FRAGMENT,
    HEAD,
    MOST_RANGES,
    OVERHEAD,
    PacketFragment,
    acknowledgement,
    fragment,
)
from netstorm.pslite.machine import LinkState, Order
from netstorm.pslite.sending import SendQueueItem

__all__ = ["LanePacket", "Ranges", "ReceivingLane", "SendingLane", "Whole"]

OF_MESSAGE: Final = 1024
"""What an incomplete message counts besides its payload."""

_LATER_S: Final = 0.003
"""How much later, at least, a packet must have left that shows that another one is lost: paths reorder."""

_SILENCE_S: Final = 2.0
"""After this time, or eight round trips, without any acknowledgement the path carries nothing."""

_DROP_PRECEDENCE: Final = 0b110
"""Bits of a code point of assured forwarding (RFC 2597): the higher, the sooner a queue drops."""

_ACKNOWLEDGE: Final = 10
_ACKNOWLEDGE_S: Final = 0.004
"""After so many packets, as in MLT, or so much time there is an acknowledgement."""

_AHEAD: Final = 1 << 16
"""Numbers that a message may be ahead of the lowest open one: their states are kept."""


class LanePacket(NamedTuple):
    """A packet that leaves now."""

    channel: int
    dscp: int
    number: int
    content: bytes


class _Sent(NamedTuple):
    """A packet in flight."""

    message: _Outgoing
    place: int
    group: tuple[int, int]
    """Channel and code point: packets of one group keep their order, unless a path reorders."""
    at: float
    size: int


class _Outgoing:
    """A message that is sent in packets: place 0 is its head, and place i the i-th fragment."""

    __slots__ = ("arrived", "dscps", "item", "left", "number", "payload", "pending", "queued", "total")

    def __init__(self, item: SendQueueItem, dscps: Sequence[int], first: Sequence[int]) -> None:
        self.item: Final = item
        self.payload = memoryview(b"" if item.payload is None else item.payload).cast("B")
        self.total: Final = self.payload.nbytes
        self.dscps: Final = dscps
        """Of each place."""
        self.pending = deque(first)
        """Places to be sent, in this order."""
        self.arrived: Final = bytearray(len(dscps))
        self.left = len(dscps)
        """Places that are not known to have arrived; 0: the message is done, or not wanted any more."""
        self.number = 0
        """0: nothing of it was sent."""
        self.queued = False

    @property
    def room(self) -> int:
        """Bytes that it counts at the receiver."""
        return self.total + OF_MESSAGE


class SendingLane:
    """The sending end.

    Attributes:
        pace: its rate.
        resent: bytes that were sent again.
        sent: bytes that were sent, all headers included.
        answered: packets do arrive.
    """

    def __init__(self, *, channels: int, room: int, pace: Pace, counters: Counters) -> None:
        """Begin with nothing to send; `room`: bytes that the receiver keeps of incomplete messages."""
        self.pace: Final = pace
        self.sent = 0
        self.resent = 0
        self._room: Final = room
        self._counters: Final = counters
        self._waiting: list[tuple[Order, int, _Outgoing]] = []
        self._started: list[tuple[Order, int, _Outgoing]] = []
        """Heaps: what nothing was sent of, and what packets of are to be sent."""
        self._submitted = 0
        self._open: Final[dict[int, _Outgoing]] = {}
        """By number, ascending: what was begun and has not arrived as a whole."""
        self._open_bytes = 0
        self._stopped: Final[deque[_Outgoing]] = deque()
        """Withdrawn ones, by number, that the receiver may keep until it hears of a higher floor."""
        self._numbers = 0
        self._packets = 0
        self._in_flight: Final[dict[int, _Sent]] = {}
        """By number, ascending, and so by time."""
        self._bytes_in_flight = 0
        self._queued_bytes = 0
        self._arrived_at: Final[dict[tuple[int, int], float]] = {}
        """By group: when its latest packet left that has arrived."""
        self._channels: Final = [_Channel(pace.round_trip_s) for _ in range(channels)]
        self.answered = False
        self._largest = FRAGMENT
        self._waits_since = math.inf
        """Since when something is in flight and nothing was acknowledged."""
        self._waited_s = 0.0
        """How long that was before nothing was left to be sent."""
        self._check_at = math.inf

    # ------------------------------------------------------------------------------------------- what to send

    def submit(self, item: SendQueueItem, dscps: Sequence[int], first: Sequence[int]) -> None:
        """Queue a message.

        Args:
            item: whose body fits into one packet.
            dscps: the code point of each of its packets: of its head, then of each fragment.
            first: all of their places, the most important ones first.
        """
        message = _Outgoing(item, dscps, first)
        self._submitted += 1
        self._queued_bytes += item.size
        self._largest = max(self._largest, item.size)
        heapq.heappush(self._waiting, (item.order, self._submitted, message))

    def take_back(self, wanted: Callable[[Hashable], bool], *, begun: bool) -> list[SendQueueItem]:
        """Remove and return what is wanted, by its tag; `begun`: also what packets were sent of, which the
        receiver need not put together any more.
        """
        taken = [
            entry for entry in self._waiting if entry[2].item.tag is not None and wanted(entry[2].item.tag)
        ]
        if taken:
            gone = {entry[1] for entry in taken}
            self._waiting = [entry for entry in self._waiting if entry[1] not in gone]
            heapq.heapify(self._waiting)
            self._queued_bytes -= sum(entry[2].item.size for entry in taken)
        items = [message.item for _, _, message in sorted(taken, key=lambda entry: entry[:2])]
        for message in list(self._open.values()):
            if message.item.tag is None or not wanted(message.item.tag):
                continue
            if begun:
                self._counters.add("lane_stopped")
                items.append(message.item)
                self._finish(message)
                self._stopped.append(message)
                self._open_bytes += message.room
            else:  # it may have to be sent again, and its memory may change from now on
                message.item.copy_payload()
                message.payload = memoryview(message.item.payload or b"").cast("B")
        return items

    def take_all(self) -> list[SendQueueItem]:
        """Return everything that has not arrived as a whole, in order, and drop it."""
        items = [message.item for message in self._open.values()]
        items += [message.item for _, _, message in sorted(self._waiting, key=lambda entry: entry[:2])]
        self._waiting.clear()
        self._started.clear()
        self._open.clear()
        self._stopped.clear()
        self._in_flight.clear()
        self._bytes_in_flight = self._open_bytes = self._queued_bytes = 0
        self._waits_since = self._check_at = math.inf
        return items

    def has_work(self) -> bool:
        """Return whether anything has not arrived."""
        return bool(self._open or self._waiting)

    def state(self) -> LinkState:
        """Return the present state of the lane, as of a link."""
        return LinkState(
            messages=len(self._waiting) + len(self._open),
            bytes=self._queued_bytes,
            window=max(2 * self._largest, self.pace.window),
            rate=self.pace.delivered,
            latency_s=self.pace.min_rtt_s / 2,
        )

    # ----------------------------------------------------------------------------------------------- sending

    def next(self, now: float) -> LanePacket | None:
        """Return the packet that leaves now; None: there is none, or it is not its turn."""
        if self._check_at <= now:
            self._lose(now)
        message = self._first()
        if message is None or self.pace.wait_s(now) > 0:
            return None
        if self._bytes_in_flight >= self.pace.window:
            self.pace.held_back()
            return None
        if not message.number:
            self._begin(message)
        place = message.pending.popleft()
        if place:
            offset = (place - 1) * FRAGMENT
            values = bytes(message.payload[offset : offset + FRAGMENT])
        else:
            offset, values = HEAD, message.item.body
        size = len(values) + OVERHEAD
        channel = min(range(len(self._channels)), key=lambda number: self._channels[number].wait(size))
        dscp = message.dscps[place]
        self._packets += 1
        self._in_flight[self._packets] = _Sent(message, place, (channel, dscp), now, size)
        self._bytes_in_flight += size
        self._channels[channel].in_flight += size
        self.pace.sent(size)
        self.sent += size
        if self._waits_since == math.inf:
            self._waits_since = now - self._waited_s
        self._check_at = min(self._check_at, now + self._time_out_s())
        content = fragment(message.number, self._floor(), offset, message.total, values)
        return LanePacket(channel, dscp, self._packets, content)

    def probe(self, now: float) -> list[LanePacket]:
        """Return a packet for each channel, of full size and without effect: do any arrive?"""
        probes = []
        nothing = _Outgoing(SendQueueItem(b""), (), ())
        for channel in range(len(self._channels)):
            self._packets += 1
            self._in_flight[self._packets] = _Sent(nothing, 0, (channel, 0), now, 0)
            content = fragment(0, 0, 0, FRAGMENT, bytes(FRAGMENT))
            probes.append(LanePacket(channel, 0, self._packets, content))
        self._waits_since = now
        return probes

    def due(self, now: float) -> float:
        """Return when `next` may have a packet, or something to find out."""
        due = min(self._check_at, self._broken_at())  # probes are not checked: nobody waits for them
        if self._first() is not None and self._bytes_in_flight < self.pace.window:
            due = min(due, now + self.pace.wait_s(now))
        return due

    def broken(self, now: float) -> bool:
        """Return whether the path carries nothing any more."""
        return now >= self._broken_at()

    def acknowledged(self, delay_s: float, ranges: Sequence[tuple[int, int]], now: float) -> None:
        """Learn which packets have arrived.

        Raises:
            ProtocolViolation: numbers that were never used.
        """
        if any(not 0 < first <= last <= self._packets for first, last in ranges):
            raise ProtocolViolation(f"packets {ranges} arrived, and {self._packets} were sent")
        lowest = next(iter(self._in_flight), self._packets + 1)
        came = [
            number
            for first, last in ranges
            for number in range(max(first, lowest), last + 1)
            if number in self._in_flight
        ]
        if not came:
            return
        newest, nbytes, round_trip_s = max(came), 0, 0.0
        self.answered = True
        for number in came:
            sent = self._in_flight.pop(number)
            nbytes += sent.size
            self._landed(sent)
            self._arrived_at[sent.group] = max(sent.at, self._arrived_at.get(sent.group, -math.inf))
            if number == newest:
                round_trip_s = now - sent.at - delay_s
                self._channels[sent.group[0]].measure(round_trip_s)
            message = sent.message
            if message.left and not message.arrived[sent.place]:
                message.arrived[sent.place] = 1
                message.left -= 1
                if not message.left:
                    self._finish(message)
        self._waited_s, self._waits_since = 0.0, now if self._in_flight else math.inf
        is_latest = newest == max(last for _, last in ranges)
        self.pace.acknowledged(nbytes, round_trip_s if is_latest else None, now)
        self._lose(now)

    # ------------------------------------------------------------------------------------------------ inside

    def _broken_at(self) -> float:
        return self._waits_since + max(_SILENCE_S, 8 * self.pace.round_trip_s)

    def _first(self) -> _Outgoing | None:
        """Return the message of which a packet goes next."""
        started = self._started
        while started and not started[0][2].pending:
            heapq.heappop(started)[2].queued = False
        if self._waiting and (not started or self._waiting[0][:1] < started[0][:1]):
            message = self._waiting[0][2]
            if not self._open or self._open_bytes + message.room <= self._room:
                return message
        return started[0][2] if started else None

    def _floor(self) -> int:
        floor = next(iter(self._open))
        while self._stopped and self._stopped[0].number < floor:
            self._open_bytes -= self._stopped.popleft().room
        return floor

    def _begin(self, message: _Outgoing) -> None:
        heapq.heappop(self._waiting)
        self._numbers += 1
        message.number = self._numbers
        self._open[message.number] = message
        self._open_bytes += message.room
        self._queue(message)

    def _queue(self, message: _Outgoing) -> None:
        if not message.queued:
            message.queued = True
            heapq.heappush(self._started, (message.item.order, message.number, message))

    def _finish(self, message: _Outgoing) -> None:
        del self._open[message.number]
        self._open_bytes -= message.room
        self._queued_bytes -= message.item.size
        message.left = 0
        message.pending.clear()

    def _landed(self, sent: _Sent) -> None:
        self._bytes_in_flight -= sent.size
        self._channels[sent.group[0]].in_flight -= sent.size

    def _time_out_s(self) -> float:
        return 2 * self.pace.round_trip_s + 0.03

    def _lose(self, now: float) -> None:
        """Send again what is lost, the most important first."""
        later_s = max(_LATER_S, self.pace.round_trip_s / 8)
        overdue = now - self._time_out_s()
        latest = max(overdue, max(self._arrived_at.values(), default=-math.inf) - later_s)
        lost: list[tuple[int, int]] = []
        for number, sent in self._in_flight.items():
            if sent.at > latest:
                break
            if sent.at <= overdue or sent.at + later_s < self._arrived_at.get(sent.group, -math.inf):
                lost.append((-(sent.group[1] & _DROP_PRECEDENCE), number))
        timed_out = False
        for _, number in sorted(lost):  # each goes before those that were put back already
            sent = self._in_flight.pop(number)
            self._landed(sent)
            self.pace.lost(sent.size)
            self._channels[sent.group[0]].lost()
            timed_out = timed_out or sent.at <= overdue
            message = sent.message
            if message.left and not message.arrived[sent.place]:
                self._counters.add("lane_packets_resent")
                self.resent += sent.size
                message.pending.appendleft(sent.place)
                self._queue(message)
        if timed_out and now >= self._waits_since + self._time_out_s():
            self.pace.silent()
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None and not self._open and self._waits_since < math.inf:  # an idle path is not silent
            self._waited_s, self._waits_since = now - self._waits_since, math.inf
        self._check_at = math.inf if oldest is None else max(now + 0.001, oldest.at + self._time_out_s())


class _Channel:
    """A pair of sockets: a path of its own through networks that balance by ports."""

    __slots__ = ("_round_trip_s", "in_flight")

    def __init__(self, round_trip_s: float) -> None:
        self.in_flight = 0
        self._round_trip_s = round_trip_s

    def wait(self, size: int) -> float:
        """Return what the shortest queue has least of: bytes, weighed by how long they take."""
        return (self.in_flight + size) * self._round_trip_s

    def measure(self, round_trip_s: float) -> None:
        self._round_trip_s += (max(round_trip_s, 1e-5) - self._round_trip_s) / 8

    def lost(self) -> None:
        """Use this path less: it loses packets, or carries none."""
        self._round_trip_s = min(1.02 * self._round_trip_s, 10.0)


# The receiving end: which packets have come, and messages that are put together.


class Ranges:
    """Numbers that have come, as ranges: the latest `MOST_RANGES` of them."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []
        """[first, last], ascending, with gaps between them."""

    def add(self, number: int) -> bool:
        """Add a number; False: it is there already."""
        ranges = self._ranges
        place = bisect.bisect_right(ranges, [number, 1 << 64])
        before = ranges[place - 1] if place else None
        if before is not None and number <= before[1]:
            return False
        after = ranges[place] if place < len(ranges) else None
        joins = before is not None and before[1] == number - 1
        if joins and before is not None:
            before[1] = number
            if after is not None and after[0] == number + 1:
                before[1] = after[1]
                del ranges[place]
        elif after is not None and after[0] == number + 1:
            after[0] = number
        else:
            ranges.insert(place, [number, number])
            if len(ranges) > MOST_RANGES:
                del ranges[0]
        return True

    def latest(self) -> list[tuple[int, int]]:
        """Return (first, last) of each, the highest first."""
        return [(first, last) for first, last in reversed(self._ranges)]


@dataclass(slots=True)
class Whole:
    """A message that has come as a whole. Its payload is writable and belongs to whoever takes it."""

    body: bytes
    payload: Buffer


class _Incoming:
    """A message that is put together."""

    __slots__ = ("body", "came", "left", "payload")

    def __init__(self, total: int) -> None:
        self.body: bytes | None = None
        self.payload = bytearray(total)
        self.left = -(-total // FRAGMENT)
        """Fragments that have not come."""
        self.came = bytearray(self.left)


class ReceivingLane:
    """The receiving end.

    Attributes:
        bytes: what incomplete messages take, and those that the process has no room for.
        acknowledge_at: when the next acknowledgement is due.
    """

    def __init__(self, *, room: int, counters: Counters) -> None:
        """Keep at most `room` bytes of messages; a single one may always come."""
        self.bytes = 0
        self._room: Final = room
        self._counters: Final = counters
        self._ranges: Final = Ranges()
        self._open: Final[dict[int, _Incoming]] = {}
        self._done: Final[set[int]] = set()
        """Numbers of complete messages from the floor on."""
        self._floor = 1
        self._highest = 0
        self._highest_at = 0.0
        self.acknowledge_at = math.inf
        self._pending = 0
        """Packets that are not acknowledged."""

    def receive(self, number: int, part: PacketFragment, now: float) -> Whole | None:
        """Take a packet; return the message that it completes.

        Raises:
            ProtocolViolation: no correct sender sends it.
        """
        self._raise_floor(part.floor)
        message = part.message
        if message >= self._floor and message not in self._done:
            if message >= self._floor + _AHEAD:
                raise ProtocolViolation(f"message {message} of a lane that has those from {self._floor} on")
            if message not in self._open and not self._has_room(part.total):
                self._counters.add("lane_no_room")  # not acknowledged: it comes again
                return None
        if not self._ranges.add(number):
            self._counters.add("lane_duplicates")
            return None
        if number > self._highest:
            self._highest, self._highest_at = number, now
        self._pending += 1
        self.acknowledge_at = min(self.acknowledge_at, now + _ACKNOWLEDGE_S)
        if message < self._floor or message in self._done:
            return None
        whole = self._put(message, part)
        if whole is not None or self._pending >= _ACKNOWLEDGE:
            self.acknowledge_at = now
        return whole

    def acknowledgement(self, now: float) -> bytes | None:
        """Return the content of the acknowledgement that is due; None: none is."""
        if now < self.acknowledge_at:
            return None
        self.acknowledge_at, self._pending = math.inf, 0
        return acknowledgement(now - self._highest_at, self._ranges.latest())

    def _has_room(self, total: int) -> bool:
        return not self.bytes or self.bytes + total + OF_MESSAGE <= self._room

    def _raise_floor(self, floor: int) -> None:
        if floor <= self._floor:
            return
        self._floor = floor
        for number in [number for number in self._open if number < floor]:
            self._close(number)
        if self._done:
            self._done.difference_update([number for number in self._done if number < floor])

    def _put(self, number: int, part: PacketFragment) -> Whole | None:
        message = self._open.get(number)
        if message is None:
            message = self._open[number] = _Incoming(part.total)
            self.bytes += part.total + OF_MESSAGE
        if len(message.payload) != part.total:
            raise ProtocolViolation(
                f"message {number} of a lane has {len(message.payload)} bytes, and then {part.total}"
            )
        if part.offset == HEAD:
            message.body = part.values
        elif not message.came[part.offset // FRAGMENT]:
            message.came[part.offset // FRAGMENT] = 1
            message.left -= 1
            message.payload[part.offset : part.offset + len(part.values)] = part.values
        if message.left or message.body is None:
            return None
        self._close(number)
        self._done.add(number)
        return Whole(message.body, message.payload)

    def _close(self, number: int) -> None:
        self.bytes -= len(self._open.pop(number).payload) + OF_MESSAGE
