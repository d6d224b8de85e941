"""The interface of protocol state machines: time and messages go in, instructions come out. Pure.

A process is three layers, the same on real sockets and in the simulated cluster:

    machine     a general node or the scheduler: decides                         (pure)
    endpoint    sessions to peers: exactly-once delivery, windows, liveness      (pure)
    van         moves frames: ZeroMQ, or memory and a virtual clock              (does I/O)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

from netstorm.errors import NoRoom, Overloaded
from netstorm.protocol.frames import Buffer, Checksum, Peer
from netstorm.protocol.messages import Hello, Member, Message

__all__ = [
    "OF_MESSAGE",
    "URGENT",
    "Admission",
    "Admit",
    "Become",
    "Bounded",
    "Call",
    "Charge",
    "Connect",
    "ConnectionWatcher",
    "Disconnect",
    "Dispatcher",
    "ForwardedBytes",
    "Inquire",
    "Instruction",
    "LinkState",
    "Links",
    "Machine",
    "NotYet",
    "Order",
    "Refuse",
    "Rerouter",
    "Send",
    "TakeBack",
    "WaitingBytes",
    "busy_text",
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
    at_once: bool = False
    """Open the connection now: the first message will be soon, and need not wait for handshakes then."""


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
    charge: Charge | None = None
    """What it counts until it is acknowledged or dropped; see `ForwardedBytes`."""


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
    """Find out about a peer that has opened a session and is silent, or whose connection has ended; or that
    had one with the process before this one.

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

    def peer_busy(self, peer: Peer, seconds: float, now: float, *, late: bool = False) -> None:
        """Learn that a peer is busy, and has not answered for so long. `late`: the kernel of its machine
        answers late, so what the peer sends may only wait on the way.
        """


def busy_text(name: str, seconds: float, *, late: bool) -> str:
    """Return that a peer is busy, or its link is slow, for a person: see `ConnectionWatcher.peer_busy`."""
    if not late:
        return f"{name}: alive, but its Python has not run for {seconds:.0f} s"
    reason = "the link with it is full or loses much"
    return f"{name}: alive, but nothing has come for {seconds:.0f} s: {reason}"


@runtime_checkable
class Bounded(Protocol):
    """A machine that may refuse messages for now, by `NoRoom`, while too much waits."""

    @property
    def waiting(self) -> WaitingBytes:
        """Counts the bytes of those that wait."""


@runtime_checkable
class Rerouter(Protocol):
    """A machine that sends undeliverable messages another way."""

    def link_lost(self, peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
        """Learn, instead of by `peer_lost`, that a session that was opened here is lost.

        The peer has not acknowledged the messages in `undelivered`, which are in order; it may have received
        them.
        """


# How many bytes of its peers a process keeps because they cannot be used yet: a bound for each, and one in
# all.
#
# What comes before something that it refers to is known has to wait: a part of a key that this rank's program
# has not made yet, or a push of a later view. Correct peers may send as much of it as a model has. So nothing
# is lost at the bound: the message is not taken, and its sender keeps it until it is asked for again, once
# there is room, or once it need not wait any more (`Endpoint`). Meanwhile other messages pass it, so that
# what it waits for can come. A peer that sends on and on gains nothing.

_OF_ONE: Final = 256 * 2**20
"""Bytes of one peer: four times what may be under way on its link (`Window`), so that an early peer
does not notice the bound for as long as links take to be filled."""
_OF_ALL: Final = 1024 * 2**20

OF_MESSAGE: Final = 1024
"""What a message counts besides: a decoded one takes memory, too."""


class Charge:
    """What one message counts, until it is given back, or nothing refers to it any more."""

    __slots__ = ("_bytes", "nbytes", "peer")

    def __init__(self, waiting: WaitingBytes, peer: Peer | None, nbytes: int) -> None:
        self.peer: Final = peer
        self.nbytes = nbytes
        self._bytes: Final = waiting

    def __del__(self) -> None:
        self._bytes.give_back(self)


class WaitingBytes:
    """What waits in one process."""

    __slots__ = ("_again", "_may_refuse", "_of", "_of_all", "_of_one", "_refused", "_sender", "_total")

    def __init__(self, *, of_one: int = _OF_ONE, of_all: int = _OF_ALL) -> None:
        """`of_one`, `of_all`: most bytes of one peer, and of all. A single message may always wait."""
        self._of_one = of_one
        self._of_all: Final = of_all
        self._of: Final[dict[Peer | None, int]] = {}
        self._total = 0
        self._sender: Peer | None = None
        self._may_refuse = False
        self._refused: Final[set[Hashable]] = set()
        self._again: Final[set[Hashable]] = set()

    def begin(self, sender: Peer | None, *, again: bool = False) -> None:
        """Charge what is kept from now on to a peer. `again`: it has waited before, and is not refused: its
        sender has forgotten it.
        """
        self._sender, self._may_refuse = sender, not again

    def end(self) -> None:
        """Refuse nothing from now on: what is kept next comes from no session."""
        self._sender, self._may_refuse = None, False

    def take(self, nbytes: int, waits_for: Hashable, what: str) -> Charge:
        """Count a message that has to wait.

        Args:
            nbytes: of the message.
            waits_for: names what it waits for, see `ready`.
            what: the same, for a person.

        Raises:
            NoRoom: the bound is reached; the message must be left as if it had not come.
        """
        nbytes += OF_MESSAGE
        if self._may_refuse and nbytes > self.room(self._sender):
            self._refused.add(waits_for)
            raise NoRoom(
                f"{self._of[self._sender]} bytes from it wait here for {what}, and {self._total} in all: at "
                f"most {self._of_one} and {self._of_all} may",
                waits_for,
            )
        self._of[self._sender] = self._of.get(self._sender, 0) + nbytes
        self._total += nbytes
        return Charge(self, self._sender, nbytes)

    def give_back(self, charge: Charge) -> None:
        """Count a message no more: it is handled now, or dropped.

        A second time does nothing: what a job that fails drops may be about to be handled.
        """
        if not charge.nbytes:
            return
        left = self._of[charge.peer] - charge.nbytes
        self._total -= charge.nbytes
        charge.nbytes = 0
        if left:
            self._of[charge.peer] = left
        else:
            del self._of[charge.peer]

    def room(self, peer: Peer | None) -> float:
        """Return how many bytes of a peer may be kept besides those that are."""
        own = self._of.get(peer, 0)
        return min(self._of_one - own, self._of_all - self._total) if own else float("inf")

    def ready(self, waits_for: Hashable) -> None:
        """Record that what messages have waited for may be here: those that were refused are wanted now."""
        if waits_for in self._refused:
            self._refused.discard(waits_for)
            self._again.add(waits_for)

    def all_ready(self) -> None:
        """Record that anything may be here, or that nothing is kept any more."""
        self._again.update(self._refused)
        self._refused.clear()

    def take_ready(self) -> set[Hashable]:
        """Return what has become ready since the last call."""
        taken = set(self._again)
        self._again.clear()
        return taken


# What a node forwards for others is bounded in another way: a message for which there is no room ends the
# session, as if its link had failed, and goes another way.
#
# If it waited at its sender, honest nodes could wait for ever. Relays that are full of each other's messages
# would wait for each other. And a relay's room may be full of messages for which their receiver has no room
# until another one has come, which then had to pass the same relay.

_FORWARDED: Final = 8 * 2**30
"""Bytes; a process is told how much memory its machine has."""


class ForwardedBytes:
    """What one node keeps to forward it: of all peers, and half as much of each."""

    def __init__(self, most: int = 0) -> None:
        """`most`: bytes of all peers; 0: the default. A single message of each may always be kept."""
        most = most or _FORWARDED
        self.bytes: Final = WaitingBytes(of_one=most // 2, of_all=most)
        self._enough: Final = most // 4

    def take(self, peer: Peer, nbytes: int) -> Charge:
        """Count a message of a peer, as long as its `Send` has the charge: wherever that ends.

        Raises:
            Overloaded: the bound is reached.
        """
        self.bytes.begin(peer)
        try:
            return self.bytes.take(nbytes, None, "links to others")
        except NoRoom as error:
            raise Overloaded(f"message to forward, and {error}") from None

    def check(self, peer: Peer) -> None:
        """Check that a peer whose session was ended may come back: half of its room is free.

        Raises:
            Overloaded: it is not.
        """
        room = self.bytes.room(peer)
        if room < self._enough:
            raise Overloaded(f"trial of its link, and there is room to forward {room} bytes of it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The present state of a link, as its sender sees it."""

    messages: int = 0
    """Messages that are queued or in flight."""
    bytes: int = 0
    """Their size."""
    window: int = 0
    """Bytes that may be in flight."""
    rate: float = 0.0
    """Bytes/s that it has delivered lately while it was busy; 0: unknown."""
    latency_s: float = 0.0
    """One way, by the shortest round trip; 0: unknown."""


Links: TypeAlias = Callable[[Peer], LinkState]
"""Returns the state of the link to a peer."""


@runtime_checkable
class Dispatcher(Protocol):
    """A machine that decides as late as possible which link a message takes."""

    def dispatch(self, links: Links, now: float) -> bool:
        """Decide, given the links; return whether `take_instructions` may return something.

        Called after anything has arrived, also acknowledgements, once all earlier instructions are carried
        out.
        """
