"""The cluster clock over SNTP: packets, who is asked, and what follows from the answers. Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

import ntplib

from netstorm.errors import FrameError

__all__ = [
    "MAC_BYTES",
    "PACKET_BYTES",
    "Address",
    "ClockExchange",
    "ClockSource",
    "ClockSync",
    "PacketKey",
    "SntpAnswer",
    "Unauthenticated",
    "answer",
    "new_nonce",
    "read_answer",
    "request",
]


# Estimates the cluster clock from SNTP exchanges.
#
# The local clock is monotonic; the cluster clock is the scheduler's. An exchange bounds their offset by half
# of its round trip, and is exact if both directions took equally long. If another node answered, that node's
# own error is added (the root dispersion of RFC 5905). So the fastest of the last exchanges counts (the clock
# filter of RFC 5905, section 10), extrapolated by the drift between the two clocks.

_FILTER: Final = 8
"""Exchanges among which the fastest counts, as in RFC 5905."""

_HISTORY: Final = 64
"""Exchanges from which the drift is estimated: 17 minutes of them once polls are rare."""

_BURST_S: Final = 0.5
"""Time between polls while the filter is not full."""

_LONGEST_S: Final = 16.0
"""Two quartz clocks drift apart by up to 100 ppm: 1.6 ms in that time, before the drift is known."""

_WORST_DRIFT: Final = 500e-6
"""Beyond what any working clock does (RFC 5905 gives up there, too)."""

_UNKNOWN_DRIFT: Final = 15e-6
"""Growth of an exchange's error with its age (RFC 5905's PHI), in s/s."""

_OUTSTANDING: Final = 8
"""Most requests whose answers are still accepted."""

_LEAST_SPAN_S: Final = 120.0
"""Least time that exchanges must span for a drift estimate: queueing within seconds looks like hundreds of
ppm."""

_SIGNIFICANT: Final = 3.0
"""A drift counts if it is so many times its own standard error."""

_LEAST_ERROR_S: Final = 20e-6
"""Error of even the fastest exchange on a loopback."""


@dataclass(frozen=True, slots=True)
class ClockExchange:
    """One question and answer."""

    at: float
    """Local time of the answer's arrival."""
    offset: float
    """Cluster clock less local clock, if both directions took equally long; s."""
    delay: float
    """Round trip less the server's own time; the server's offset is within half of it. s."""
    error: float = 0.0
    """Most that the server's clock may be off the cluster clock: 0 at the scheduler. s."""
    hops: int = 0
    """Between the server's clock and the cluster clock."""


class ClockSync:
    """One process's estimate of the cluster clock. All times are in s; local ones are monotonic."""

    def __init__(self, *, seed: int) -> None:
        """Begin without an estimate. `seed` makes the nonces, which must not be guessed, and spreads the
        polls.
        """
        self._random: Final = random.Random(seed)
        self._outstanding: dict[float, float] = {}
        """Nonce -> local time of the request."""
        self._recent: deque[ClockExchange] = deque(maxlen=_FILTER)
        self._history: deque[ClockExchange] = deque(maxlen=_HISTORY)
        self._best: ClockExchange | None = None
        self._drift = 0.0
        self._poll_at = -math.inf
        self._interval = _BURST_S

    # ------------------------------------------------------------------------------------------- the clock

    @property
    def synchronised(self) -> bool:
        """Whether there was any exchange; before that, `offset` is 0 and means nothing."""
        return self._best is not None

    @property
    def drift(self) -> float:
        """How much faster the cluster clock runs than the local one, in s/s; 0: unknown."""
        return self._drift

    def offset(self, local: float) -> float:
        """Return what to add to the local time `local` to get the cluster's."""
        best = self._best
        return 0.0 if best is None else best.offset + self._drift * (local - best.at)

    def cluster_time(self, local: float) -> float:
        """Return the cluster clock's time at the local time `local`."""
        return local + self.offset(local)

    def error_bound(self, local: float) -> float:
        """Return by how much `offset` may be wrong at most, if the drift is right to 15 ppm."""
        return math.inf if self._best is None else _distance(self._best, local)

    @property
    def hops(self) -> int:
        """How many exchanges lie between this clock and the scheduler's; 0 before the first."""
        return 0 if self._best is None else self._best.hops + 1

    # ------------------------------------------------------------------------------------------- exchanges

    def next_poll(self) -> float:
        """Return the local time from which a request is due; it may be past."""
        return self._poll_at

    def poll(self, local: float) -> bytes:
        """Return a request to send now."""
        nonce = new_nonce(self._random.getrandbits(52))
        self._outstanding[nonce] = local
        if len(self._outstanding) > _OUTSTANDING:
            del self._outstanding[next(iter(self._outstanding))]
        full = len(self._recent) == _FILTER
        self._interval = min(2 * self._interval, _LONGEST_S) if full else _BURST_S
        # Nodes that were started together must not keep asking at the same time.
        self._poll_at = local + self._interval * self._random.uniform(0.9, 1.1)
        return request(nonce)

    def receive(self, data: bytes, local: float) -> ClockExchange:
        """Process an answer that arrived at the local time `local`.

        Raises:
            FrameError: it is not an answer to a recent request.
        """
        answer = read_answer(data)
        sent = self._outstanding.pop(answer.nonce, None)
        if sent is None:
            raise FrameError("an SNTP answer to a request that was not made, or long ago")
        served = answer.transmitted - answer.received
        exchange = ClockExchange(
            at=local,
            offset=((answer.received - sent) + (answer.transmitted - local)) / 2,
            delay=max(0.0, local - sent - served),
            error=answer.error,
            hops=answer.hops,
        )
        if served < 0 or served > local - sent + _LEAST_ERROR_S:
            raise FrameError(f"an SNTP server that took {served} s of a round trip of {local - sent} s")
        if self._contradicts(exchange):
            self._start_over()
        self._recent.append(exchange)
        self._history.append(exchange)
        self._drift = _drift(list(self._history))
        self._best = min(self._recent, key=lambda recent: _distance(recent, local))
        return exchange

    def _contradicts(self, new: ClockExchange) -> bool:
        """Return whether the bounds of two exchanges do not overlap: a clock was set, or a host was
        suspended.
        """
        if self._best is None:
            return False
        age = new.at - self._best.at
        best = self._best
        errors = new.error + best.error + (new.delay + best.delay) / 2
        allowed = errors + _WORST_DRIFT * age + _LEAST_ERROR_S
        return abs(new.offset - self.offset(new.at)) > allowed

    def _start_over(self) -> None:
        self._recent.clear()
        self._history.clear()
        self._poll_at = -math.inf


def _distance(exchange: ClockExchange, local: float) -> float:
    return exchange.error + exchange.delay / 2 + _UNKNOWN_DRIFT * abs(local - exchange.at) + _LEAST_ERROR_S


def _drift(exchanges: list[ClockExchange]) -> float:
    """Return the slope of the offsets over time, by least squares; 0 if it cannot be told from noise.

    An exchange has less weight the slower it was compared to the fastest one: the rest of its delay was
    queueing, in one direction or the other.
    """
    fastest = min(exchange.delay for exchange in exchanges)
    weights = [
        1.0 / (exchange.delay - fastest + _LEAST_ERROR_S + 0.1 * fastest) ** 2 for exchange in exchanges
    ]
    total = sum(weights)
    middle = sum(w * exchange.at for w, exchange in zip(weights, exchanges, strict=True)) / total
    mean = sum(w * exchange.offset for w, exchange in zip(weights, exchanges, strict=True)) / total
    spread = sum(w * (exchange.at - middle) ** 2 for w, exchange in zip(weights, exchanges, strict=True))
    if len(exchanges) < 3 or spread <= 0.0:
        return 0.0
    slope = (
        sum(
            w * (exchange.at - middle) * (exchange.offset - mean)
            for w, exchange in zip(weights, exchanges, strict=True)
        )
        / spread
    )
    span = max(exchange.at for exchange in exchanges) - min(exchange.at for exchange in exchanges)
    if span < _LEAST_SPAN_S:
        return 0.0
    # A weight is 1 / (error of the offset)², so 1 / sqrt(spread) is the slope's standard error. The weights
    # do not show it if even the fastest exchange was queued; so a drift must also move offsets by more than
    # exchanges differ.
    noise = sorted(exchange.delay for exchange in exchanges)[len(exchanges) // 2] - fastest + _LEAST_ERROR_S
    if not max(_SIGNIFICANT / math.sqrt(spread), noise / span) <= abs(slope) <= _WORST_DRIFT:
        return 0.0
    return slope


# SNTP packets (RFC 4330), built and parsed with ntplib.

PACKET_BYTES: Final = 48
"""Without the optional authenticator."""

_CLIENT: Final = 3
_SERVER: Final = 4
_VERSION: Final = 4
_UNSYNCHRONISED: Final = 3
_LOCAL_CLOCK: Final = 0x7F7F0100
"""127.127.1.0: NTP's address of an undisciplined local clock."""

_LOCAL_STRATUM: Final = 10
"""Stratum of such a clock, by convention: any real time server is preferred to it. Each hop adds one."""

_WORST_STRATUM: Final = 15
_MOST_ERROR_S: Final = 16.0
"""A clock that may be off by more is not used (RFC 5905's MAXDISP)."""
_PRECISION: Final = -20
"""Log2 s: ntplib's times are doubles, whose last bit is half a microsecond."""

_NONCE_FRACTION: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SntpAnswer:
    """A server's answer. Times are in s on its clock, since the Unix epoch."""

    nonce: float
    """From the request."""
    received: float
    """When the request arrived."""
    transmitted: float
    """When the answer left."""
    hops: int
    """Between the server's clock and the cluster clock."""
    error: float
    """Largest error of the server's clock relative to the cluster clock, as it says itself; s."""


def new_nonce(bits: int) -> float:
    """Return a number for a request, made of 52 random bits.

    It is sent instead of the client's time, which servers only copy. So the client's clock is not disclosed,
    and a forged answer does not match.
    """
    return (bits >> 20 & 0xFFFFFFFF) + (bits & _NONCE_FRACTION - 1) / _NONCE_FRACTION


def request(nonce: float) -> bytes:
    """Return a client's request."""
    return bytes(ntplib.NTPPacket(version=_VERSION, mode=_CLIENT, tx_timestamp=nonce).to_data())


def answer(data: bytes, *, received: float, transmitted: float, hops: int = 0, error: float = 0.0) -> bytes:
    """Return a server's answer to a request.

    Args:
        data: the request.
        received: when it arrived, in seconds since the Unix epoch on the cluster clock.
        transmitted: when the answer leaves.
        hops: between the server's clock and the cluster clock: 0 at the scheduler.
        error: largest error of the server's clock relative to the cluster clock, in s; infinite: it does not
            know the time, and the answer says so.

    Raises:
        FrameError: `data` is not a request.
    """
    asked = _parse(data)
    if asked.mode != _CLIENT or not 1 <= asked.version <= _VERSION:
        raise FrameError(f"an SNTP packet of mode {asked.mode}, version {asked.version}: no client's request")
    reply = ntplib.NTPPacket(version=asked.version, mode=_SERVER)
    knows = error < _MOST_ERROR_S
    reply.leap = 0 if knows else _UNSYNCHRONISED
    reply.stratum = min(_LOCAL_STRATUM + hops, _WORST_STRATUM)
    reply.root_dispersion = error if knows else _MOST_ERROR_S
    reply.poll = asked.poll
    reply.precision = _PRECISION
    reply.ref_id = _LOCAL_CLOCK
    reply.ref_timestamp = ntplib.system_to_ntp_time(received)
    reply.orig_timestamp = asked.tx_timestamp
    reply.recv_timestamp = ntplib.system_to_ntp_time(received)
    reply.tx_timestamp = ntplib.system_to_ntp_time(transmitted)
    try:
        return bytes(reply.to_data())
    except ntplib.NTPException as problem:  # a clock before 1900 or after 2036
        raise FrameError(f"the time {received} cannot be expressed in SNTP: {problem}") from None


def read_answer(data: bytes) -> SntpAnswer:
    """Parse a server's answer.

    Raises:
        FrameError: it is not an answer, or its server does not know the time.
    """
    packet = _parse(data)
    if packet.mode != _SERVER:
        raise FrameError(f"an SNTP packet of mode {packet.mode}: no server's answer")
    if packet.leap == _UNSYNCHRONISED or not 1 <= packet.stratum <= _WORST_STRATUM or not packet.tx_timestamp:
        raise FrameError(
            f"an SNTP server that does not know the time (stratum {packet.stratum}, leap {packet.leap})"
        )
    return SntpAnswer(
        nonce=packet.orig_timestamp,
        received=ntplib.ntp_to_system_time(packet.recv_timestamp),
        transmitted=ntplib.ntp_to_system_time(packet.tx_timestamp),
        hops=max(0, packet.stratum - _LOCAL_STRATUM),
        error=packet.root_dispersion,
    )


def _parse(data: bytes) -> ntplib.NTPPacket:
    packet = ntplib.NTPPacket()
    try:
        packet.from_data(data)
    except ntplib.NTPException:
        raise FrameError(f"an SNTP packet of {len(data)} bytes; it has at least {PACKET_BYTES}") from None
    return packet


# SNTP packets that prove that their sender holds the job's key.
#
# A packet is followed by a number that names the key, and a digest of the packet under that key: the
# symmetric authentication of RFC 5905, section 7.3, whose sizes these are, with BLAKE2b (RFC 7693) in place
# of MD5. An answer repeats the request's nonce, which the digest covers. So an answer of an earlier request
# is of no use, nor is a packet sent back to its sender, since the digest covers also whether it is a request
# or an answer. Somebody on the way can still hold packets up, which the error of an exchange accounts for:
# half of its round trip.

_NAME_BYTES: Final = 4
_DIGEST_BYTES: Final = 20

MAC_BYTES: Final = _NAME_BYTES + _DIGEST_BYTES
"""How much longer packets are. An answer is as long as its request, so forged requests gain nobody bytes."""

_PERSON: Final = b"netstorm sntp"
_NAME_PERSON: Final = b"netstorm sntp id"


class Unauthenticated(FrameError):
    """A packet whose sender does not prove that it holds the key.

    Attributes:
        reason: one word for a counter: no_mac, other_key or forged.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason: Final = reason


class PacketKey:
    """The key of a job's SNTP packets."""

    __slots__ = ("_key", "_name")

    def __init__(self, key: bytes) -> None:
        """Take a secret of up to 64 bytes."""
        self._key: Final = key
        self._name: Final = hashlib.blake2b(key=key, digest_size=_NAME_BYTES, person=_NAME_PERSON).digest()

    def seal(self, packet: bytes) -> bytes:
        """Return a packet with its digest."""
        return packet + self._name + self._digest(packet)

    def open(self, data: bytes) -> bytes:
        """Return the packet in what was received.

        Raises:
            Unauthenticated: no holder of the key has sent it.
        """
        if len(data) != PACKET_BYTES + MAC_BYTES:
            raise Unauthenticated(
                "no_mac", f"an SNTP packet of {len(data)} bytes: expected {PACKET_BYTES + MAC_BYTES}"
            )
        packet, name = data[:PACKET_BYTES], data[PACKET_BYTES : PACKET_BYTES + _NAME_BYTES]
        if name != self._name:
            raise Unauthenticated("other_key", f"an SNTP packet under the key {name.hex()}, of another job")
        if not hmac.compare_digest(data[PACKET_BYTES + _NAME_BYTES :], self._digest(packet)):
            raise Unauthenticated("forged", "an SNTP packet that was changed, or forged")
        return packet

    def _digest(self, packet: bytes) -> bytes:
        return hashlib.blake2b(packet, key=self._key, digest_size=_DIGEST_BYTES, person=_PERSON).digest()


# Which server a node asks for the time.
#
# It is always the scheduler or, as in the paper (arXiv 2404.11352 §V), the parent in a tree; roots ask the
# scheduler. A parent may not have opened its port, or may be behind a firewall that drops UDP. A node that
# gets no answer asks the scheduler, and tries the parent again later.

Address: TypeAlias = tuple[str, int]
"""Host and UDP port."""

_UNANSWERED: Final = 3
"""Unanswered requests in a row after which a parent is given up; single packets get lost."""

_PAUSE_S: Final = 120.0
"""For how long the scheduler is then asked instead."""


class ClockSource:
    """The choice of one node. Times are in s on the local clock."""

    def __init__(self, scheduler: Address) -> None:
        self.scheduler = scheduler
        """May change: another scheduler may take the job over."""
        self._parent: Address | None = None
        self._unanswered = 0
        self._scheduler_until = -math.inf

    def set_parent(self, parent: Address | None) -> None:
        """Ask this node from now on; None: the scheduler."""
        if parent != self._parent:
            self._parent = parent
            self._unanswered = 0
            self._scheduler_until = -math.inf

    def next_server(self, now: float) -> Address:
        """Return the server to ask; the request counts as unanswered until `answered`."""
        if self._parent is None or now < self._scheduler_until:
            return self.scheduler
        if self._unanswered >= _UNANSWERED:
            self._unanswered = 0
            self._scheduler_until = now + _PAUSE_S
            return self.scheduler
        self._unanswered += 1
        return self._parent

    def answered(self) -> None:
        """Record a valid answer."""
        self._unanswered = 0
