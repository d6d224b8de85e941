"""The sending half of a session: numbers messages, keeps them until they are acknowledged, retransmits lost
ones. Pure.

A stream of a connection keeps its order. So a message is lost if one that was transmitted after it on the
same stream has arrived. Nothing is ever retransmitted because time has passed: on a live but slow connection
that would double the load (docs/design.md, section 4).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, Protocol

from netstorm.errors import ProtocolViolation
from netstorm.observe.trace import Delivery, Trace
from netstorm.protocol.frames import Buffer, Checksum, Peer, checksum
from netstorm.pslite.machine import URGENT, Charge, LinkState, Order

__all__ = [
    "NOWHERE",
    "HostTraffic",
    "LinkTraffic",
    "Mark",
    "SendQueueItem",
    "SendingHalf",
    "TracedSendingHalf",
    "Window",
    "YieldingWindow",
]


class SendQueueItem:
    """An outgoing message: queued, then kept until it is acknowledged."""

    __slots__ = (
        "_crc",
        "body",
        "charge",
        "delivered_at",
        "delivered_by",
        "flight_began_at",
        "order",
        "payload",
        "resend",
        "sent_at",
        "sequence",
        "size",
        "stream",
        "tag",
        "transmission",
        "transmissions",
    )

    def __init__(
        self,
        body: bytes,
        payload: Buffer | None = None,
        order: Order = URGENT,
        payload_crc: int | Checksum | None = None,
        tag: Hashable | None = None,
        *,
        charge: Charge | None = None,
    ) -> None:
        self.body = body
        self.charge: Final = charge
        """See `Send`."""
        self.tag = tag
        """Identifies the message to the machine that sent it; see `TakeBack`."""
        self.payload = payload
        self.order = order
        self._crc = payload_crc
        self.size = len(body) + (0 if payload is None else memoryview(payload).nbytes)
        """Bytes that count in the window."""
        self.sequence = 0
        self.stream = 0
        """Of the connection: that of its last transmission."""
        self.transmission = 0
        """Position in the order of all transmissions on the link."""
        self.transmissions = 0
        """Number of its transmissions."""
        self.resend = False
        """It waits to be retransmitted."""
        self.sent_at = 0.0
        """When it was last transmitted."""
        self.delivered_by = 0
        """Bytes that had been acknowledged when it was transmitted."""
        self.delivered_at = 0.0
        """When the last of those was acknowledged."""
        self.flight_began_at = 0.0
        """When the last of those was sent."""

    def crc(self) -> int | None:
        """Return the payload's checksum, computed at most once; None if there is no payload."""
        crc = self._crc
        if isinstance(crc, Checksum):
            crc = self._crc = crc.value()
        elif crc is None and self.payload is not None:
            crc = self._crc = checksum(self.payload)
        return crc

    def copy_payload(self) -> None:
        """Keep a copy of the payload, whose memory may change from now on."""
        if self.payload is not None:
            self.payload = bytes(memoryview(self.payload))
            if not isinstance(self._crc, int):
                self._crc = None  # that of the memory is computed no more


_SPAN: Final = 8192
"""Numbers that may pass a message which the other side has no room for: it keeps the number of each
(`ReceivingHalf`)."""


class Mark(NamedTuple):
    """A place in the order of transmissions."""

    stream: int
    position: int


NOWHERE: Final = Mark(0, 0)
"""Nothing was transmitted before it."""

OnAcknowledged = Callable[[SendQueueItem, float], None]
"""Called with each message with a payload that is acknowledged, and the time."""


class SendingHalf:
    """Messages to one peer in one session.

    Those that were not transmitted yet are in a heap by (order, arrival): the chunks that fill the pipeline
    must go first. With first-in-first-out queues, packed trees reached up to 25 percentage points less of the
    optimum (docs/design.md, section 4).
    """

    __slots__ = (
        "_later",
        "_later_bytes",
        "_on_acknowledged",
        "_sequence",
        "_submitted",
        "_transmissions",
        "arrived",
        "lost",
        "queue",
        "queued_bytes",
        "unacknowledged",
        "window",
    )

    def __init__(self, window: Window, on_acknowledged: OnAcknowledged | None = None) -> None:
        self._on_acknowledged: Final = on_acknowledged
        self.window: Final = window
        self.queue: list[tuple[Order, int, SendQueueItem]] = []
        """What was not transmitted yet: the first goes next. Among those of equal order it came first."""
        self.queued_bytes = 0
        self._submitted = 0
        self.unacknowledged: Final[dict[int, SendQueueItem]] = {}
        """By sequence number."""
        self.lost: deque[SendQueueItem] = deque()
        """Those of `unacknowledged` that must be retransmitted, in sequence order."""
        self._later: Final[dict[int, SendQueueItem]] = {}
        """Those of `unacknowledged` that the other side will ask for; they are not in flight."""
        self._later_bytes = 0
        self._sequence = 0
        self.arrived = 0
        """Everything up to this number has been acknowledged."""
        self._transmissions = 0

    def has_work(self) -> bool:
        """Return whether anything is queued or unacknowledged."""
        return bool(self.queue or self.unacknowledged)

    def state(self) -> LinkState:
        """Return the present state of the link."""
        window = self.window
        round_trip_s = min(window.min_rtt_s, window.smooth_rtt_s)  # infinite on a new connection, then 0
        rate = window.busy_rate
        sending_s = window.largest_message / rate if rate else 0.0
        return LinkState(
            messages=len(self.queue) + len(self.unacknowledged),
            bytes=self.queued_bytes + window.in_flight,
            window=window.size,
            rate=rate,
            latency_s=max(0.0, (round_trip_s - sending_s) / 2),
        )

    def submit(self, message: SendQueueItem) -> None:
        """Queue a message."""
        self._submitted += 1
        self.queued_bytes += message.size
        heapq.heappush(self.queue, (message.order, self._submitted, message))

    def next(self, now: float) -> SendQueueItem | None:
        """Return the message to transmit now, numbered; None if there is none, or the window is full."""
        first = self.queue[0][2] if self.queue else None
        urgent = first is not None and first.order == URGENT
        if self.lost:
            again = self.lost[0]
            if again.order == URGENT or self.window.allows(again.size, now):
                self.lost.popleft()
                again.resend = False
                return self._transmitted(again, now)
            if not urgent:
                return None
        if first is None or not (urgent or self.window.allows(first.size, now)):
            return None
        if self._later and not urgent and not self._may_pass():
            return None
        heapq.heappop(self.queue)
        self.queued_bytes -= first.size
        self._sequence += 1
        first.sequence = self._sequence
        self.unacknowledged[first.sequence] = first
        return self._transmitted(first, now)

    def _may_pass(self) -> bool:
        """Return whether a message may pass those for which the other side has no room.

        Once they would fill the window, one at a time: it is likely to have no room there, either.
        """
        full = self._later_bytes >= self.window.size and self.window.in_flight > 0
        return not full and self._sequence - min(self._later) < _SPAN

    def mark(self, turn: int) -> Mark:
        """Return a position after everything transmitted so far, on each stream in turn."""
        self._transmissions += 1
        return Mark(turn % len(self.window.streams), self._transmissions)

    def acknowledge(
        self, received: int, beyond: tuple[int, ...], now: float, *, mark: Mark = NOWHERE
    ) -> bool:
        """Forget what has arrived, and retransmit what is lost; return whether anything was newly
        acknowledged.

        Args:
            received: highest contiguous sequence number that the other side has.
            beyond: sequence numbers that it has beyond that.
            now: s on the local clock.
            mark: a stream, and a position in the order of transmissions; what was transmitted over that
                stream before it and has not arrived is lost.

        Raises:
            ProtocolViolation: numbers that were never used.
        """
        if received > self._sequence or beyond:
            self.check(received, beyond)
        latest = [0] * len(self.window.streams)
        latest[mark.stream] = mark.position
        news = False
        if received > self.arrived:
            for sequence in range(self.arrived + 1, received + 1):
                message = self.unacknowledged.pop(sequence, None)
                if message is not None:
                    news = True
                    self._arrived(message, now, latest)
            self.arrived = received
        for sequence in beyond:
            message = self.unacknowledged.pop(sequence, None)
            if message is not None:
                news = True
                self._arrived(message, now, latest)
        if self.unacknowledged and (beyond or mark.position):
            self._lose_before(latest)
        return news

    def check(self, received: int, beyond: tuple[int, ...]) -> None:
        """Check that an acknowledgement is possible.

        Raises:
            ProtocolViolation: it names numbers that were never used.
        """
        if received > self._sequence or any(not 0 < sequence <= self._sequence for sequence in beyond):
            raise ProtocolViolation(
                f"acknowledges up to {max((received, *beyond))}, and {self._sequence} messages were sent"
            )

    def resend(self, sequence: int) -> bool:
        """Retransmit a message; False if it has been acknowledged, or is waiting for that already."""
        message = self.unacknowledged.get(sequence)
        kept = self._no_longer_later(sequence)
        if message is None or (message.resend and kept is None):
            return False
        if kept is None:
            self._lose([message])
        else:
            self.lost = deque(sorted((*self.lost, kept), key=lambda message: message.sequence))
        return True

    def keep(self, sequence: int) -> None:
        """Keep a message that has arrived where there is no room for it, until `resend`."""
        message = self.unacknowledged.get(sequence)
        if message is not None and not message.resend:
            self.window.returned(message)
            message.resend = True
            self._later[sequence] = message
            self._later_bytes += message.size

    def _no_longer_later(self, sequence: int) -> SendQueueItem | None:
        message = self._later.pop(sequence, None)
        if message is not None:
            self._later_bytes -= message.size
        return message

    def disconnected(self) -> None:
        """Note that everything in flight is lost; what the next Welcome does not acknowledge is
        retransmitted.
        """
        self.window.restart()
        self._later.clear()
        self._later_bytes = 0
        for message in self.unacknowledged.values():
            message.resend = True
        self.lost = deque(self.unacknowledged[sequence] for sequence in sorted(self.unacknowledged))

    def take_back(self, wanted: Callable[[Hashable], bool]) -> list[SendQueueItem]:
        """Remove and return what is wanted, by its tag, and was not transmitted yet.

        The payloads of transmitted messages are copied, since these may have to be sent again.
        """
        for message in self.unacknowledged.values():
            if message.payload is not None and message.tag is not None and wanted(message.tag):
                message.copy_payload()
        taken: list[tuple[Order, int, SendQueueItem]] = []
        left: list[tuple[Order, int, SendQueueItem]] = []
        for item in self.queue:
            tag = item[2].tag
            (taken if tag is not None and wanted(tag) else left).append(item)
        if taken:
            heapq.heapify(left)
            self.queue = left
            self.queued_bytes -= sum(message.size for _, _, message in taken)
        return [message for _, _, message in sorted(taken, key=lambda item: item[:2])]

    def take_all(self) -> list[SendQueueItem]:
        """Return what has not been acknowledged, in order, and drop it."""
        left = [self.unacknowledged[sequence] for sequence in sorted(self.unacknowledged)]
        left += [message for _, _, message in sorted(self.queue, key=lambda item: item[:2])]
        self.clear()
        return left

    def clear(self) -> None:
        """Drop everything."""
        self.queue.clear()
        self.queued_bytes = 0
        self.unacknowledged.clear()
        self.lost.clear()
        self._later.clear()
        self._later_bytes = 0
        self.window.restart()

    def _transmitted(self, message: SendQueueItem, now: float) -> SendQueueItem:
        self._transmissions += 1
        message.transmission = self._transmissions
        message.transmissions += 1
        self.window.sent(message, now)
        return message

    def _arrived(self, message: SendQueueItem, now: float, latest: list[int]) -> None:
        """Record an acknowledged message, and its position in the order of transmissions in `latest`, by
        stream.
        """
        if message.resend:  # it was taken for lost: a nack and an acknowledgement have crossed
            if self._no_longer_later(message.sequence) is None:
                self.lost.remove(message)
            return
        self.window.acknowledged(message, now)
        if message.payload is not None and self._on_acknowledged is not None:
            self._on_acknowledged(message, now)
        latest[message.stream] = max(latest[message.stream], message.transmission)

    def _lose_before(self, latest: list[int]) -> None:
        """Retransmit what was passed on its stream: only what is damaged is."""
        lost = [
            message
            for message in self.unacknowledged.values()
            if not message.resend and message.transmission < latest[message.stream]
        ]
        if lost:
            self._lose(lost)

    def _lose(self, lost: list[SendQueueItem]) -> None:
        for message in lost:
            message.resend = True
            self.window.returned(message)
        self.lost = deque(sorted((*self.lost, *lost), key=lambda message: message.sequence))


# The window of a link: how many bytes may be unacknowledged.
#
# It is max(4 messages, 4 x delivery rate x minimum RTT): small enough that urgent messages can overtake what
# waits, and large enough to fill the bandwidth-delay product. With a factor of two a round took 15 % longer.
# With the mean RTT, a longer queue would enlarge the window, and that the queue (docs/design.md, section 4).
#
# What is in flight cannot be taken back. Where that matters (`shallow`), the window is max(2 messages, 4 x
# delivery rate x minimum RTT), and the rate is the latest one: a link that has slowed down carries little
# that is no longer wanted.
#
# The delivery rate is measured as BBR does [1]_: bytes acknowledged between a message's transmission and its
# acknowledgement, divided by the time that this took or, if that is longer, by the time that it took to send
# them. So neither bursts of acknowledgements nor pauses of the sender count.
#
# References:
#     .. [1] Cheng et al., Delivery Rate Estimation, draft-cheng-iccrg-delivery-rate-estimation.

_SMALLEST: Final = 1024 * 1024
"""Bytes: four chunks of the default size. Less cannot hide the time for which a thread waits for a
processor."""

_LARGEST: Final = 64 * 1024 * 1024
"""Bytes: four times the bandwidth-delay product of 1 Gbit/s at 130 ms. It bounds the copies that wait in
libzmq where processors, not links, are slow. NETSTORM_WINDOW can set more for a longer and faster link."""

_MESSAGES: Final = 4096
"""Most messages in flight, however small: a receiver keeps the number of each that comes out of order."""

_FACTOR: Final = 4

_FEWEST: Final = 2
"""Messages in flight of a shallow window: one that travels while the other is acknowledged."""

_BUSY_MEMORY: Final = 16
"""Messages over which the rate of a busy link is averaged; the weight of older ones halves."""

_INSTANT_S: Final = 1e-6

_RATE_MEMORY_S: Final = 10.0
"""A rate that was not reached again for 10 to 20 s is forgotten (BBR forgets after ten round trips)."""


class Window:
    """The limit of one direction of one session."""

    __slots__ = (
        "_busy_bytes",
        "_busy_s",
        "_delivered",
        "_delivered_at",
        "_earlier_rate",
        "_fixed",
        "_flight_began_at",
        "_rate",
        "_rate_since",
        "_shallow",
        "in_flight",
        "largest_message",
        "messages_in_flight",
        "min_rtt_s",
        "rate",
        "resume_at",
        "resumed_at",
        "size",
        "smooth_rtt_s",
        "streams",
    )

    def __init__(self, fixed_bytes: int = 0, *, shallow: bool = False) -> None:
        """Measure the link, or allow `fixed_bytes` if that is not 0; little may be in flight if `shallow`."""
        self._fixed: Final = fixed_bytes
        self._shallow: Final = shallow
        self.size = fixed_bytes or _SMALLEST
        """Bytes that may be in flight."""
        self.in_flight = 0
        self.messages_in_flight = 0
        self.streams = [0]
        """Bytes in flight over each stream of the connection."""
        self.min_rtt_s = math.inf
        self.resumed_at = -math.inf
        """When this process went on after it had not run for a while. What was in flight measures nothing."""
        self.resume_at = math.inf
        """When a message that waits for traffic of other jobs may be tried again; infinite: none does."""
        self.smooth_rtt_s = 0.0
        self.largest_message = 0
        """Bytes."""
        self._delivered = 0
        self._delivered_at = 0.0
        self._flight_began_at = 0.0
        """When the message was sent that was acknowledged last."""
        self._busy_bytes = 0
        """Recently acknowledged while the link had more to carry, and the time that this took."""
        self._busy_s = 0.0
        self.rate = 0.0
        """The highest recent delivery rate, in bytes/s; 0: unknown."""
        self._rate = 0.0
        self._earlier_rate = 0.0
        self._rate_since = 0.0

    @property
    def busy_rate(self) -> float:
        """What the link delivers in bytes/s while it is busy; 0: unknown.

        Messages that were in flight together are acknowledged as fast as the link carries them. `rate` is
        lower where a sender has only a few messages at a time, since it includes their round trip.
        """
        return self._busy_bytes / self._busy_s if self._busy_s > 0.0 else 0.0

    def allows(self, size: int, _now: float) -> bool:
        """Return whether a message of `size` bytes may be transmitted. An empty link may always send one."""
        return self.in_flight == 0 or (
            self.in_flight + size <= self.size and self.messages_in_flight < _MESSAGES
        )

    def sent(self, message: SendQueueItem, now: float) -> None:
        """Note a transmission."""
        if self.in_flight == 0:  # the sender paused, not the link
            self._delivered_at = self._flight_began_at = now
        message.sent_at = now
        message.delivered_by = self._delivered
        message.delivered_at = self._delivered_at
        message.flight_began_at = self._flight_began_at
        streams = self.streams
        message.stream = 0 if message.payload is None else streams.index(min(streams))
        streams[message.stream] += message.size
        self.in_flight += message.size
        self.messages_in_flight += 1
        if message.size > self.largest_message:
            self.largest_message = message.size
            self._resize()

    def returned(self, message: SendQueueItem) -> None:
        """Note that a message is no longer in flight, without having been acknowledged."""
        self.streams[message.stream] -= message.size
        self.in_flight -= message.size
        self.messages_in_flight -= 1

    def acknowledged(self, message: SendQueueItem, now: float) -> None:
        """Note an acknowledgement."""
        was_full = self.in_flight * 2 >= self.size
        self.streams[message.stream] -= message.size
        self.in_flight -= message.size
        self.messages_in_flight -= 1
        if message.sent_at <= self.resumed_at:
            self._delivered_at = now
            return  # it may have been acknowledged at any time while this process did not run
        self._delivered += message.size
        if message.sent_at <= self._delivered_at - self.min_rtt_s + _INSTANT_S:
            # the message before it was still in flight then: the link went from one to the other without a
            # pause
            self._busy_bytes += message.size
            self._busy_s += now - self._delivered_at
            if self._busy_bytes > _BUSY_MEMORY * self.largest_message:
                self._busy_bytes //= 2
                self._busy_s /= 2
        self._delivered_at = now
        self._flight_began_at = message.sent_at
        if message.transmissions > 1:
            return  # it is unknown which transmission was acknowledged (Karn's rule)
        rtt = now - message.sent_at
        self.min_rtt_s = min(self.min_rtt_s, rtt)
        self.smooth_rtt_s = (
            rtt if self.smooth_rtt_s == 0 else self.smooth_rtt_s + (rtt - self.smooth_rtt_s) / 8
        )
        interval = max(now - message.delivered_at, message.sent_at - message.flight_began_at)
        if interval <= 0:
            return
        rate = (self._delivered - message.delivered_by) / interval
        if now - self._rate_since > _RATE_MEMORY_S and was_full:
            # with too little to send the rate says nothing about the link, so only a full window drops old
            # rates
            self._earlier_rate, self._rate, self._rate_since = self._rate, 0.0, now
        self._rate = max(self._rate, rate)
        if self._shallow and was_full:
            self._rate, self._earlier_rate = rate, 0.0
        self.rate = max(self._rate, self._earlier_rate)
        self._resize()

    def restart(self) -> None:
        """Reset for a new connection, maybe over another path: nothing is in flight, no RTT is known."""
        self.in_flight = self.messages_in_flight = 0
        self.streams = [0]
        self.min_rtt_s = math.inf

    def widen(self, streams: int) -> None:
        """Use more streams of the connection: each message with a payload takes that with the least in
        flight.
        """
        self.streams += [0] * (streams - len(self.streams))

    def _resize(self) -> None:
        if self._fixed:
            return
        if self._shallow:
            wanted = _FEWEST * self.largest_message
        else:
            wanted = max(_SMALLEST, _FACTOR * self.largest_message)
        if self.min_rtt_s < math.inf:
            wanted = max(wanted, int(_FACTOR * self.rate * self.min_rtt_s))
        self.size = min(wanted, _LARGEST)


# Jobs that share hosts, and have priorities (MLNET, section 3.3): a job's messages wait at their senders
# while a job of higher priority sends from the same host to the same other one.

_LEAST_SHARE: Final = 0.1
"""Part of a link's rate that a job has in any case, so that it goes on beside one that always sends."""

_LONGEST_HOLD_S: Final = 5.0
"""A message waits for no longer, however slow its link is taken to be."""

_UNKNOWN_S: Final = 0.02
"""For how long a message is taken to occupy a link whose rate is not known yet."""

_LOOK_S: Final = 0.002
_NEXT_S: Final = 0.005
"""How soon a job's next message follows the one before, if it has more to send."""

_LONGEST_TURN_S: Final = 1.0
"""A message is taken to occupy a link for no longer."""

_SMALL: Final = 4096
"""Bytes: smaller messages neither wait nor make others wait."""


class LinkTraffic(Protocol):
    """What jobs with priorities know of each other's traffic from one host to another."""

    def higher_s(self) -> float:
        """Return for how long jobs of higher priority will send, in s, as far as is known; 0: none sends."""

    def sends(self, seconds: float) -> None:
        """Tell jobs of lower priority that this one sends for so long."""


class HostTraffic(Protocol):
    """What jobs with priorities know of each other's traffic from one host."""

    def towards(self, host: str) -> LinkTraffic:
        """Return what they know of that to another host."""


class YieldingWindow(Window):
    """The window of a job with a priority: closed while a job of higher priority uses the same link."""

    __slots__ = ("_busy_until", "_share_at", "_traffic")

    def __init__(self, traffic: LinkTraffic, fixed_bytes: int = 0, *, shallow: bool = False) -> None:
        """See `Window`."""
        super().__init__(fixed_bytes, shallow=shallow)
        self._traffic: Final = traffic
        self._busy_until = 0.0
        """When all that was sent has left this host, by the rate of the link."""
        self._share_at = 0.0
        """When the link's least share allows the next message."""

    def allows(self, size: int, now: float) -> bool:
        """See `Window`."""
        if not super().allows(size, now):
            return False
        higher_s = self._traffic.higher_s() if size > _SMALL else 0.0
        if higher_s <= 0.0 or now >= self._share_at:
            return True
        self.resume_at = min(now + max(higher_s, _LOOK_S), self._share_at)
        return False

    def sent(self, message: SendQueueItem, now: float) -> None:
        """Note a transmission."""
        super().sent(message, now)
        if message.size <= _SMALL:
            return
        rate = self.busy_rate or self.rate
        turn_s = message.size / rate if rate else _UNKNOWN_S
        self._share_at = now + min(turn_s / _LEAST_SHARE, _LONGEST_HOLD_S)
        self._busy_until = max(now, self._busy_until) + min(turn_s, _LONGEST_TURN_S)
        self._traffic.sends(min(self._busy_until - now, _LONGEST_TURN_S) + _NEXT_S)


class TracedSendingHalf(SendingHalf):
    """Records each message that is acknowledged in a trace, which has the clock.

    It is a class of its own so that tracing costs other sessions nothing.
    """

    __slots__ = ("_peer", "_queued_at", "_states", "_trace")

    def __init__(
        self, window: Window, peer: Peer, trace: Trace, on_acknowledged: OnAcknowledged | None = None
    ) -> None:
        super().__init__(window, on_acknowledged)
        self._peer: Final = peer
        self._trace: Final = trace
        self._queued_at: Final[dict[SendQueueItem, float]] = {}
        self._states: Final[dict[SendQueueItem, tuple[int, int, int]]] = {}
        """Bytes in flight, window and queue length at a message's last transmission."""

    def submit(self, message: SendQueueItem) -> None:
        """Queue a message."""
        self._queued_at[message] = self._trace.now()
        super().submit(message)

    def clear(self) -> None:
        """Drop everything."""
        super().clear()
        self._queued_at.clear()
        self._states.clear()

    def _transmitted(self, message: SendQueueItem, now: float) -> SendQueueItem:
        super()._transmitted(message, now)
        self._states[message] = (self.window.in_flight, self.window.size, len(self.queue))
        return message

    def _arrived(self, message: SendQueueItem, now: float, latest: list[int]) -> None:
        in_flight, window, waiting = self._states.pop(message)
        self._trace.add_delivery(
            Delivery(
                peer=self._peer,
                body=message.body,
                size=message.size,
                queued_at=self._queued_at.pop(message),
                sent_at=message.sent_at,
                acknowledged_at=now,
                transmissions=message.transmissions,
                in_flight=in_flight,
                window=window,
                waiting=waiting,
            )
        )
        super()._arrived(message, now, latest)
