"""All lanes of one process: who has one with whom, under which key, and whether it works. Pure.

A lane leads one way: whoever has values for a peer offers it a key, over the session, which is encrypted if
the job has a key. The peer answers with its ports. Then a packet is tried on each channel, and the lane is
used once one has arrived. Until then, and after it has fallen silent, everything goes over the session.

Only sums that may be late go over lanes. A sum that comes twice, as one may that was sent again over the
session, is counted once (`Aggregation`).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from netstorm.errors import FrameError, PeerError
from netstorm.observe.log import Counters, Drops
from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import LaneAnswer, LaneOffer, Message, Part, Phase
from netstorm.pslite.datagram.lane import OF_MESSAGE, ReceivingLane, SendingLane, Whole
from netstorm.pslite.datagram.marks import Marks
from netstorm.pslite.datagram.pace import Pace
from netstorm.pslite.datagram.packets import (
    ACK,
    DATA,
    FRAGMENT,
    KEY_BYTES,
    Cipher,
    addressee,
    new_cipher,
    open_packet,
    ranges_in,
    read_fragment,
    seal_packet,
)
from netstorm.pslite.machine import LinkState
from netstorm.pslite.sending import SendQueueItem
from netstorm.pslite.session import AcceptedSession, OpenedSession, Session, SessionState

__all__ = ["MOST_CHANNELS", "LaneArrival", "LaneOptions", "Lanes", "Packet", "PacketVan"]

_log = logging.getLogger(__name__)

MOST_CHANNELS: Final = 16

_ROOM: Final = 32 * 2**20
"""Bytes of incomplete messages that one peer may have here: eight chunks of the default size."""

_MOST: Final = 32
"""Lanes that peers may have here, so that all together have 1 GiB. Further peers use TCP."""

_ANSWER_S: Final = 5.0
"""How long an offer waits for its answer; it is lost if the connection breaks."""

_RETRY_S: Final = 5.0
_LONGEST_RETRY_S: Final = 300.0
"""After what time a lane that did not work is tried again; doubled with each time."""

_AGAIN_S: Final = 0.05
"""How often a message is tried again that the process has no room for."""

_INFO_S: Final = 10.0

_AT_ONCE: Final = 64
"""Packets that leave before sockets get a turn again."""

_OVER: Final = (SessionState.CLOSING, SessionState.CLOSED, SessionState.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """How a process uses lanes."""

    channels: int = 3
    explicit: bool = True
    """NETSTORM_DATAGRAMS=1 asks for lanes: also between two processes of one machine, and it is an error if
    they cannot be had."""
    block: int = FRAGMENT
    """Bytes of values that are marked alike."""
    newest: float = 0.3
    """Weight of the newest sample in what counts as important."""
    room: int = _ROOM
    """Bytes of incomplete messages that one peer may have here."""
    info: bool = False
    """Log what lanes do."""


class Packet(NamedTuple):
    """A datagram that has come, from whoever has sent it."""

    channel: int
    """Number of the socket."""
    data: bytes
    host: str
    port: int


class PacketVan(Protocol):
    """Moves packets: sockets, or memory and a virtual clock.

    Attributes:
        ports: those of this process's channels.
    """

    ports: tuple[int, ...]

    def transmit(self, channel: int, packet: bytes, host: str, port: int, dscp: int) -> None:
        """Send a packet, which may be lost, without blocking."""

    def take(self) -> list[Packet]:
        """Return what has come since the last call, from whomever."""


class LaneArrival(NamedTuple):
    """A message that has come over a lane."""

    session: Session
    lane: ReceivingLane
    whole: Whole


class _OutgoingLane:
    """A lane to a peer, from its offer on."""

    __slots__ = (
        "cipher",
        "host",
        "key",
        "lane",
        "number",
        "offered_at",
        "ports",
        "retry_at",
        "session",
        "theirs",
    )

    def __init__(self, session: OpenedSession, number: int, key: bytes) -> None:
        self.session: Final = session
        self.number = number
        """By which acknowledgements name it."""
        self.key = key
        self.cipher: Cipher = new_cipher(key)
        self.offered_at = -math.inf
        self.lane: SendingLane | None = None
        """None: it is not answered yet, or does not work."""
        self.theirs = 0
        """The peer's number of it."""
        self.host = ""
        self.ports: tuple[int, ...] = ()
        self.retry_at = math.inf
        """When it is offered again; infinite: not because it has failed."""


class _IncomingLane:
    """A lane from a peer."""

    __slots__ = ("acknowledgements", "answer_to", "cipher", "lane", "session", "theirs")

    def __init__(self, session: AcceptedSession, theirs: int, key: bytes, lane: ReceivingLane) -> None:
        self.session: Final = session
        self.theirs: Final = theirs
        self.cipher: Final[Cipher] = new_cipher(key)
        self.lane: Final = lane
        self.acknowledgements = 0
        """Sent so far: each has a number of its own."""
        self.answer_to: tuple[int, str, int] | None = None
        """Channel, host and port that the last good packet has come by."""


class Lanes:
    """The lanes of one process.

    Attributes:
        counters: `lane_...`.
    """

    def __init__(
        self, options: LaneOptions, packets: PacketVan, *, counters: Counters, tokens: random.Random
    ) -> None:
        """Begin without a lane; `tokens`: random numbers that nobody else can guess, but in tests.

        Raises:
            SettingsError: what encrypts packets is not installed.
        """
        new_cipher(bytes(KEY_BYTES))
        self.counters: Final = counters
        self._options: Final = options
        self._packets: Final = packets
        self._tokens: Final = tokens
        self._drops: Final = Drops(counters, counted_as="lane_dropped", what="dropped a packet")
        self._marks: Final = Marks(block=options.block, newest=options.newest)
        self._outgoing: Final[dict[Peer, _OutgoingLane]] = {}
        self._by_number: Final[dict[int, _OutgoingLane]] = {}
        self._incoming: Final[dict[int, _IncomingLane]] = {}
        """By this process's number of each."""
        self._failures: Final[dict[Peer, int]] = {}
        self._to_acknowledge: Final[dict[_IncomingLane, None]] = {}
        self._numbers = tokens.getrandbits(31)
        self._due = math.inf
        self._logged_at = -math.inf
        self._kept: list[LaneArrival] = []
        self._again_at = math.inf

    # ------------------------------------------------------------------------------------------------ sending

    def take(
        self, session: Session, message: Message, payload: Buffer | None, item: SendQueueItem, now: float
    ) -> bool:
        """Take a message over, if it may be late and there is a lane to its receiver; offer one if there is
        none.
        """
        if not (
            isinstance(message, Part)
            and message.loss is not None
            and message.phase is Phase.REDUCE
            and payload is not None
            and isinstance(session, OpenedSession)
            and session.state is SessionState.UP
            and len(item.body) <= FRAGMENT
            and (self._options.explicit or not session.unchecked)
        ):
            return False
        outgoing = self._outgoing.get(session.peer)
        if outgoing is None or outgoing.session is not session:
            self._offer(session, now)
            return False
        lane = outgoing.lane
        if lane is None or not lane.answered:
            if lane is None and now >= min(outgoing.retry_at, outgoing.offered_at + _LONGEST_RETRY_S):
                self._offer(session, now)
            return False
        lane.submit(item, *self._marks.of(message, payload))
        self.counters.add("lane_messages")
        self._due = now
        return True

    def take_back(
        self, wanted: Callable[[Hashable], bool], *, begun: bool
    ) -> Iterator[tuple[Peer, SendQueueItem]]:
        """Remove and yield what is wanted; `begun`: also what is on its way. Exhaust it."""
        for peer, outgoing in self._outgoing.items():
            if outgoing.lane is not None:
                for item in outgoing.lane.take_back(wanted, begun=begun):
                    yield peer, item

    def end(self, session: Session) -> list[SendQueueItem]:
        """Forget the lane of a session that ends; return what has not arrived, in order."""
        outgoing = self._outgoing.get(session.peer)
        if outgoing is None or outgoing.session is not session:
            return []
        del self._outgoing[session.peer]
        self._by_number.pop(outgoing.number, None)
        return [] if outgoing.lane is None else outgoing.lane.take_all()

    def state(self, peer: Peer) -> LinkState | None:
        """Return the state of the lane to a peer; None: there is none that works."""
        outgoing = self._outgoing.get(peer)
        lane = None if outgoing is None else outgoing.lane
        return lane.state() if lane is not None and lane.answered else None

    def idle(self) -> bool:
        """Return whether everything has arrived."""
        return not any(one.lane is not None and one.lane.has_work() for one in self._outgoing.values())

    # ------------------------------------------------------------------------------------- offers and answers

    def offered(self, session: Session, offer: LaneOffer) -> None:
        """Answer a peer's offer; an impossible one is dropped, and the peer goes on over TCP."""
        if not isinstance(session, AcceptedSession) or len(offer.key) != KEY_BYTES:
            self.counters.add("lane_offers_refused")
            return
        for number, other in list(self._incoming.items()):
            if other.session.peer == session.peer or other.session.state in _OVER:
                del self._incoming[number]
        if len(self._incoming) >= _MOST:
            self.counters.add("lane_offers_refused")
            return
        number = self._new_number()
        lane = ReceivingLane(room=self._options.room, counters=self.counters)
        self._incoming[number] = _IncomingLane(session, offer.number, offer.key, lane)
        ports = self._packets.ports[: max(1, min(offer.channels, MOST_CHANNELS))]
        session.control(LaneAnswer(number=offer.number, lane=number, ports=ports, room=self._options.room))

    def answered(self, session: Session, answer: LaneAnswer, now: float) -> None:
        """Try a lane that a peer has answered for."""
        outgoing = self._by_number.get(answer.number)
        ports = [port for port in answer.ports if 0 < port < 1 << 16][:MOST_CHANNELS]
        if outgoing is None or outgoing.session is not session or outgoing.lane is not None or not ports:
            self.counters.add("lane_answers_unasked")
            return
        window = session.sending.window
        round_trip_s = window.min_rtt_s if window.min_rtt_s < math.inf else 0.1
        outgoing.theirs, outgoing.host = answer.lane & 0xFFFF_FFFF, outgoing.session.host
        channels = min(len(ports), len(self._packets.ports))
        outgoing.ports = tuple(ports[:channels])
        lane = outgoing.lane = SendingLane(
            channels=channels,
            room=max(0, answer.room),
            pace=Pace(round_trip_s, window.busy_rate / 2, now),
            counters=self.counters,
        )
        for departure in lane.probe(now):
            self._depart(outgoing, *departure)
        self._due = now

    # ------------------------------------------------------------------------------------------------ packets

    def receive(self, now: float) -> Iterator[LaneArrival]:
        """Read what has come; yield the messages that this completes, and those that are to be tried again.
        Whatever the bytes, nothing is raised. Exhaust it.
        """
        for packet in self._packets.take():
            arrived = self._read(packet, now)
            if arrived is not None:
                yield arrived
        if now >= self._again_at:
            kept, self._kept, self._again_at = self._kept, [], math.inf
            for arrived in kept:
                arrived.lane.bytes -= len(arrived.whole.payload) + OF_MESSAGE
                if arrived.session.state is SessionState.UP:
                    yield arrived

    def _read(self, packet: Packet, now: float) -> LaneArrival | None:
        try:
            kind, number = addressee(packet.data)
            if kind == ACK:
                self._acknowledged(number, packet, now)
                return None
            incoming = self._incoming.get(number)
            if incoming is None or incoming.session.state is not SessionState.UP:
                self.counters.add("lane_dropped_unknown")
                return None
            opened = open_packet(incoming.cipher, packet.data)
            whole = incoming.lane.receive(opened.number, read_fragment(opened.content), now)
        except PeerError as error:
            reason = "frame" if isinstance(error, FrameError) else "protocol"
            self._drops.note(reason, packet.host, str(error), now)
            return None
        incoming.answer_to = packet.channel, packet.host, packet.port
        if incoming.lane.acknowledge_at < math.inf:
            self._to_acknowledge[incoming] = None
        counters = incoming.session.counters
        counters.bytes_received += len(packet.data)
        if whole is None:
            return None
        counters.messages_received += 1
        return LaneArrival(incoming.session, incoming.lane, whole)

    def keep(self, arrived: LaneArrival, now: float) -> None:
        """Keep a message that nobody has room for yet; it counts as what is not complete does."""
        self._kept.append(arrived)
        arrived.lane.bytes += len(arrived.whole.payload) + OF_MESSAGE
        self._again_at = now + _AGAIN_S

    def flush(self, now: float) -> list[tuple[OpenedSession, list[SendQueueItem]]]:
        """Send what is due; return what must go over sessions after all, since their lanes carry nothing."""
        for incoming in list(self._to_acknowledge):
            content = incoming.lane.acknowledgement(now)
            if content is not None and incoming.answer_to is not None:
                del self._to_acknowledge[incoming]
                channel, host, port = incoming.answer_to
                incoming.acknowledgements += 1
                packet = seal_packet(
                    incoming.cipher, ACK, incoming.theirs, incoming.acknowledgements, content
                )
                self._packets.transmit(channel, packet, host, port, 0)
        if now < self._due:
            return []
        if self._options.info and now >= self._logged_at + _INFO_S:
            self._logged_at = now
            self._log_lanes()
        self._due, failed = math.inf, []
        for outgoing in list(self._outgoing.values()):
            lane = outgoing.lane
            if lane is None:
                continue
            if lane.broken(now):
                failed.append((outgoing.session, self._fail(outgoing, lane, now)))
                continue
            for _ in range(_AT_ONCE):
                departure = lane.next(now)
                if departure is None:
                    break
                self._depart(outgoing, *departure)
            self._due = min(self._due, max(now, lane.due(now)))
        return failed

    def next_flush(self) -> float:
        """Return when `flush` has something to do."""
        due = min(self._due, self._again_at)
        return min((due, *(incoming.lane.acknowledge_at for incoming in self._to_acknowledge)))

    # ------------------------------------------------------------------------------------------------- inside

    def _offer(self, session: OpenedSession, now: float) -> None:
        self.end(session)
        stale = self._outgoing.pop(session.peer, None)
        if stale is not None:
            self._by_number.pop(stale.number, None)
        key = self._tokens.getrandbits(8 * KEY_BYTES).to_bytes(KEY_BYTES, "little")
        outgoing = _OutgoingLane(session, self._new_number(), key)
        outgoing.offered_at, outgoing.retry_at = now, now + _ANSWER_S
        self._outgoing[session.peer] = self._by_number[outgoing.number] = outgoing
        session.control(LaneOffer(number=outgoing.number, key=key, channels=len(self._packets.ports)))

    def _fail(self, outgoing: _OutgoingLane, lane: SendingLane, now: float) -> list[SendQueueItem]:
        peer = outgoing.session.peer
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        outgoing.lane = None
        self._by_number.pop(outgoing.number, None)  # its numbers, and so its key, must not be used again
        outgoing.offered_at = now
        outgoing.retry_at = now + min(_LONGEST_RETRY_S, _RETRY_S * 2 ** min(failures - 1, 16))
        self.counters.add("lane_failures")
        return lane.take_all()

    def _depart(self, outgoing: _OutgoingLane, channel: int, dscp: int, number: int, content: bytes) -> None:
        packet = seal_packet(outgoing.cipher, DATA, outgoing.theirs, number, content)
        outgoing.session.counters.bytes_sent += len(packet)
        self._packets.transmit(channel, packet, outgoing.host, outgoing.ports[channel], dscp)

    def _acknowledged(self, number: int, packet: Packet, now: float) -> None:
        outgoing = self._by_number.get(number)
        if outgoing is None or outgoing.lane is None:
            self.counters.add("lane_dropped_unknown")
            return
        opened = open_packet(outgoing.cipher, packet.data)
        outgoing.lane.acknowledged(*ranges_in(opened.content), now)
        self._failures.pop(outgoing.session.peer, None)
        self._due = now

    def _log_lanes(self) -> None:
        for peer, outgoing in self._outgoing.items():
            lane = outgoing.lane
            if lane is not None:
                _log.info(
                    "datagrams to rank %d: %d bytes sent, %d of them again; %.1f Mbit/s, round trip %.1f ms",
                    *(peer, lane.sent, lane.resent),
                    *(lane.pace.rate * 8e-6, lane.pace.round_trip_s * 1e3),
                )

    def _new_number(self) -> int:
        self._numbers = self._numbers + 1 & 0xFFFF_FFFF
        while self._numbers in self._incoming or self._numbers in self._by_number:
            self._numbers = self._numbers + 1 & 0xFFFF_FFFF
        return self._numbers
