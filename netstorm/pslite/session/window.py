"""The window of a link: how many bytes may be unacknowledged.

It is max(4 messages, 4 x delivery rate x minimum RTT): small enough that urgent messages can overtake what
waits, and large enough to fill the bandwidth-delay product. With a factor of two a round took 15 % longer.
With the mean RTT, a longer queue would enlarge the window, and that the queue (docs/design.md, section 4).

What is in flight cannot be taken back. Where that matters (`shallow`), the window is max(2 messages, 4 x
delivery rate x minimum RTT), and the rate is the latest one: a link that has slowed down carries little that
is no longer wanted.

The delivery rate is measured as BBR does [1]_: bytes acknowledged between a message's transmission and its
acknowledgement, divided by the time that this took or, if that is longer, by the time that it took to send
them. So neither bursts of acknowledgements nor pauses of the sender count.

References:
    .. [1] Cheng et al., Delivery Rate Estimation, draft-cheng-iccrg-delivery-rate-estimation.
"""

from __future__ import annotations

import math
from typing import Final

from netstorm.pslite.session.queue import Outgoing

__all__ = ["Window"]

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
        "resumed_at",
        "size",
        "smooth_rtt_s",
    )

    def __init__(self, fixed_bytes: int = 0, *, shallow: bool = False) -> None:
        """Measure the link, or allow `fixed_bytes` if that is not 0; little may be in flight if `shallow`."""
        self._fixed: Final = fixed_bytes
        self._shallow: Final = shallow
        self.size = fixed_bytes or _SMALLEST
        """Bytes that may be in flight."""
        self.in_flight = 0
        self.messages_in_flight = 0
        self.min_rtt_s = math.inf
        self.resumed_at = -math.inf
        """When this process went on after it had not run for a while. What was in flight measures nothing."""
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
        self._rate = 0.0
        self._earlier_rate = 0.0
        self._rate_since = 0.0

    @property
    def rate(self) -> float:
        """The highest recent delivery rate, in bytes/s; 0: unknown."""
        return max(self._rate, self._earlier_rate)

    @property
    def busy_rate(self) -> float:
        """What the link delivers in bytes/s while it is busy; 0: unknown.

        Messages that were in flight together are acknowledged as fast as the link carries them. `rate` is
        lower where a sender has only a few messages at a time, since it includes their round trip.
        """
        return self._busy_bytes / self._busy_s if self._busy_s > 0.0 else 0.0

    def allows(self, size: int) -> bool:
        """Return whether a message of `size` bytes may be transmitted. An empty link may always send one."""
        return self.in_flight == 0 or (
            self.in_flight + size <= self.size and self.messages_in_flight < _MESSAGES
        )

    def sent(self, message: Outgoing, now: float) -> None:
        """Note a transmission."""
        if self.in_flight == 0:  # the sender paused, not the link
            self._delivered_at = self._flight_began_at = now
        message.sent_at = now
        message.delivered_by = self._delivered
        message.delivered_at = self._delivered_at
        message.flight_began_at = self._flight_began_at
        self.in_flight += message.size
        self.messages_in_flight += 1
        if message.size > self.largest_message:
            self.largest_message = message.size
            self._resize()

    def returned(self, message: Outgoing) -> None:
        """Note that a message is no longer in flight, without having been acknowledged."""
        self.in_flight -= message.size
        self.messages_in_flight -= 1

    def acknowledged(self, message: Outgoing, now: float) -> None:
        """Note an acknowledgement."""
        was_full = self.in_flight * 2 >= self.size
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
        if interval > 0:
            self._sample((self._delivered - message.delivered_by) / interval, now, was_full=was_full)

    def restart(self) -> None:
        """Reset for a new connection, maybe over another path: nothing is in flight, no RTT is known."""
        self.in_flight = self.messages_in_flight = 0
        self.min_rtt_s = math.inf

    def _sample(self, rate: float, now: float, *, was_full: bool) -> None:
        if now - self._rate_since > _RATE_MEMORY_S and was_full:
            # with too little to send the rate says nothing about the link, so only a full window drops old
            # rates
            self._earlier_rate, self._rate, self._rate_since = self._rate, 0.0, now
        self._rate = max(self._rate, rate)
        if self._shallow and was_full:
            self._rate, self._earlier_rate = rate, 0.0
        self._resize()

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
