"""The interface of protocol state machines: time and messages go in, instructions come out. Pure.

A process is three layers, the same on real sockets and in the simulated cluster:

    machine     a general node or the scheduler: decides                         (pure)
    endpoint    sessions to peers: exactly-once delivery, windows, liveness      (pure)
    van         moves frames: ZeroMQ, or memory and a virtual clock              (does I/O)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from netstorm.protocol.frames import Buffer, Checksum, Peer
from netstorm.protocol.messages import Hello, Member, Message
from netstorm.pslite.waiting_bytes import WaitingBytes

__all__ = [
    "URGENT",
    "Admission",
    "Admit",
    "Become",
    "Bounded",
    "Call",
    "Connect",
    "ConnectionWatcher",
    "Disconnect",
    "Inquire",
    "Instruction",
    "Machine",
    "NotYet",
    "Order",
    "Refuse",
    "Rerouter",
    "Send",
    "TakeBack",
    "refuse_other_key",
]

Order: TypeAlias = tuple[int, ...]
"""Order of messages on a link, smallest first: (-priority, round, byte offset). Equal ones keep their
order."""

URGENT: Order = ()
"""Before everything else: control messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Announce a peer's address. A connection is opened when the first message is sent to it."""

    peer: Peer
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message; it is sequenced unless it is a `Datagram`. `payload` must not change until it is
    acknowledged.
    """

    peer: Peer
    message: Message
    payload: Buffer | None = None
    order: Order = URGENT
    payload_crc: int | Checksum | None = None
    """Checksum of the payload if it is known, as that of a forwarded one, or shared by several messages;
    None: it is computed when sent."""
    back: bool = False
    """Use the connection that the peer opened, as acknowledgements do: where links lead one way only, there
    may be no other."""
    tag: Hashable | None = None
    """Identifies the message for `TakeBack`; None: it is never taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Remove the messages whose tag is `wanted` from all queues, unless they were transmitted; call `then`
    with them.

    A transmitted message may have to be sent again. Its payload is copied, so the original may change from
    now on.
    """

    wanted: Callable[[Hashable], bool]
    then: Callable[[list[Send]], None] | None = None
    """None: the messages are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """End the sessions with a peer on purpose: once everything queued is acknowledged, or at once."""

    peer: Peer
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a function outside the machine (complete an operation) once the machine's state is consistent."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Become:
    """Use this rank in every `Hello` from now on."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquire:
    """Find out about a peer that has opened a session and is silent, or whose connection has ended.

    A `ConnectionWatcher` is told if it is only busy, or if no process listens at its address any more.
    """

    peer: Peer
    host: str
    port: int


Instruction: TypeAlias = Connect | Send | TakeBack | Disconnect | Become | Call | Inquire


@dataclass(frozen=True, slots=True)
class Admit:
    """Admit the sender of a `Hello`, as `peer` from now on."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class NotYet:
    """This process cannot decide yet; the endpoint asks again later."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the sender of a `Hello`; the reason is for a person."""

    reason: str


Admission: TypeAlias = Admit | NotYet | Refuse


def refuse_other_key(speaks_for: str, user: str, members: Iterable[Member]) -> Refuse:
    """Return the refusal of a process that has another key than the one in whose name it speaks.

    Args:
        speaks_for: that one, for a person.
        user: text of the key that it has.
        members: of the job. If one of them has this key, it is named.
    """
    ranks = [member.rank for member in members if user and member.user == user]
    whose = f", which has the key of rank {ranks[0]}" if ranks else ""
    return Refuse(f"{speaks_for} has another key than this process{whose}: nobody speaks for another one")


class Machine(Protocol):
    """A general node or the scheduler."""

    def admit(self, hello: Hello, user: str = "") -> Admission:
        """Decide who may open a session. `user`: text of the key of its process; empty: the job has none."""

    def receive(
        self, peer: Peer, message: Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """Process a message, delivered exactly once. `payload` belongs to the machine and may be changed in
        place.

        When this returns, the message counts as stored, and is acknowledged. A `PeerError` raised here is
        counted and logged with the sender; the message is dropped.
        """

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """Learn that the session with `peer` could not be re-established in time, or was refused."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def next_tick(self) -> float:
        """Return when `tick` is due next (`math.inf`: never)."""

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding with `error`: the process is ending, or its I/O thread has
        died.
        """

    def take_instructions(self) -> list[Instruction]:
        """Return the instructions since the last call, in order."""


@runtime_checkable
class ConnectionWatcher(Protocol):
    """A machine that wants to know of connections before their sessions are lost."""

    def connection_gone(self, peer: Peer, reason: str, now: float, *, refused: bool) -> None:
        """Learn that the connection which a peer opened is gone, and it may connect again; or, `refused`,
        that no process listens at its address: it has probably ended.
        """

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """Return whether a peer that does not answer, and whose machine acknowledges, may be busy: its
        process is stopped, or its interpreter runs other code. If not, its connection is broken.
        """

    def peer_busy(self, peer: Peer, seconds: float, now: float) -> None:
        """Learn that a peer is busy, and has not answered for so long."""


@runtime_checkable
class Bounded(Protocol):
    """A machine that may refuse messages for now, by `NoRoom`, while too much waits."""

    @property
    def waiting(self) -> WaitingBytes:
        """What waits."""


@runtime_checkable
class Rerouter(Protocol):
    """A machine that sends undeliverable messages another way."""

    def link_lost(self, peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """Learn, instead of by `peer_lost`, that a session that was opened here is lost.

        The peer has not acknowledged the messages in `undelivered`, which are in order; it may have received
        them.
        """
