"""What a protocol state machine looks like to whatever drives it. No I/O here: time and messages come in,
instructions come out.

A process is three layers, the same on real sockets and in the simulated cluster:

    machine     a general node or the scheduler: decides                         (pure)
    endpoint    sessions to peers: exactly-once delivery, windows, liveness      (pure)
    van         moves frames: ZeroMQ, or memory and a virtual clock              (does I/O)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Hello, Message

__all__ = [
    "URGENT",
    "Admission",
    "Admit",
    "Become",
    "Call",
    "Connect",
    "Disconnect",
    "Instruction",
    "Machine",
    "NotYet",
    "Order",
    "Refuse",
    "Rerouter",
    "Send",
    "TakeBack",
]

Order: TypeAlias = tuple[int, ...]
"""Smaller goes first on a link: (-priority, round, byte offset). Ties keep their order."""

URGENT: Order = ()
"""Before everything else: control messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Make a peer's address known. A connection is opened when something is first sent to it."""

    peer: Peer
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message; sequenced unless it is a `Datagram`. `payload` must not change until it is
    acknowledged.
    """

    peer: Peer
    message: Message
    payload: Buffer | None = None
    order: Order = URGENT
    payload_crc: int | None = None
    """Known already (a forwarded payload), or None: computed when it is sent."""
    back: bool = False
    """Over the connection that the peer opened, as acknowledgements go: where links lead one way only, there
    may be no other.
    """
    tag: Hashable | None = None
    """What `TakeBack` knows it by; None: it is never taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Take out of all links' queues what is `wanted`, by its tag, as far as it has not been transmitted, and
    call `then` with it. What has been may be sent again: its payload is copied, and may change from now on.
    """

    wanted: Callable[[Hashable], bool]
    then: Callable[[list[Send]], None] | None = None
    """None: it is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """End the sessions with a peer on purpose, once what is queued for it is acknowledged or `now` it is
    not.
    """

    peer: Peer
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call something outside the machine (complete an operation) once the machine's state is consistent."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Become:
    """This process has been given a rank: say so in every `Hello` from now on."""

    rank: int


Instruction: TypeAlias = Connect | Send | TakeBack | Disconnect | Become | Call


@dataclass(frozen=True, slots=True)
class Admit:
    """A `Hello` is welcome; its sender is known as `peer` from now on."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class NotYet:
    """This process cannot tell yet; the endpoint asks again at its next tick."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """A `Hello` from somebody who has no business here."""

    reason: str


Admission: TypeAlias = Admit | NotYet | Refuse


class Machine(Protocol):
    """A general node or the scheduler."""

    def admit(self, hello: Hello) -> Admission:
        """Decide who may open a session."""

    def receive(
        self, peer: Peer, message: Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        """Take a message, exactly once. `payload` is this machine's own: it may be changed in place.

        When this returns, the message counts as stored, and is acknowledged. A `PeerError` raised here is
        counted and logged with the sender; the message is dropped.
        """

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """Learn that the session with `peer` could not be re-established in time, or was refused."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def next_tick(self) -> float:
        """Return when `tick` wants to be called next (`math.inf`: never)."""

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding with `error`: the process is ending, or its I/O thread has
        died.
        """

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done, in order, and forget it."""


@runtime_checkable
class Rerouter(Protocol):
    """A machine that takes back what could not be delivered."""

    def link_lost(self, peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """Learn, instead of by `peer_lost`, that a session that was opened here is lost.

        What is in `undelivered`, in order, the peer has not acknowledged: it may have it or not.
        """
