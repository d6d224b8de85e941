"""Stands between a van's sockets and strangers: keys, refused connections, and users that are removed."""

from __future__ import annotations

import enum
import ipaddress
import itertools
import os
import random
import resource
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import zmq

from netstorm import clock
from netstorm.addresses import plain_address
from netstorm.observe.log import Counters, Drops
from netstorm.pslite.admission import (
    NUMBER_BYTES,
    PROOF_BYTES,
    Admission,
    Credentials,
    ProcessProof,
    fresh_number,
)
from netstorm.pslite.keys import KEY_BYTES, key_of_text
from netstorm.pslite.proofs import Mismatch
from netstorm.pslite.tcp_info import (
    Backlog,
    borrowed_socket,
    bytes_received,
    descriptor_of,
    progress_of,
    shut_down,
)
from netstorm.pslite.van import Broken, Connection, VanEvent, connecting_s

__all__ = [
    "LETTER",
    "MESSAGE_OVERHEAD",
    "MOST_STREAMS",
    "AcceptedConnections",
    "Guard",
    "connection_of",
    "descriptor_share",
    "identity_of",
    "is_identity",
    "is_stream",
    "main_of",
    "most_sessions",
    "of_stream",
    "raise_descriptor_limit",
]


_AT_ONCE: Final = 256
"""Events or questions of ZeroMQ that are handled before messages have their turn: 7 ms. Strangers may open
connections without end."""
_READ_AHEAD: Final = 16
"""So many times as many events are read if a new connection's may be among them."""


class Guard:
    """Guards one van. All methods belong to its thread.

    Attributes:
        authenticator: encrypts and answers; None: connections are plain.
        senders: whose connections were accepted; None: connections are plain, and nobody knows.
        users: those of them that can be expelled; None: nobody can.
        accepted: connections that others have opened.
        mismatches: why handshakes with other processes have failed, by host and port. The side that notices
            first closes the connection, and the other one may see no more than that.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials | None,
        admission: Admission | None,
        counters: Counters,
        *,
        link_timeout_s: float,
        max_message_bytes: int,
    ) -> None:
        """Begin before the van listens."""
        self._context: Final = context
        self._counters: Final = counters
        self._refusals: Final = Drops(counters, counted_as="refused", what="refused a connection")
        self._refused: RefusedConnections | None = None
        self.accepted: Final = AcceptedConnections(
            self._refusals, limit_s=link_timeout_s, max_message_bytes=max_message_bytes
        )
        self.mismatches: Final[dict[tuple[str, int], Mismatch]] = {}
        self.authenticator: Final = (
            Authenticator(context, credentials, admission, self._refusals)
            if credentials is not None and admission is not None
            else None
        )
        self.senders: Final = None if credentials is None else Senders(credentials.proof, self._refusals)
        self.users: Final = Users(admission) if admission is not None and admission.can_change else None

    def fresh_identity(self) -> bytes:
        """Return the identity of a connection that is opened here."""
        own = self.authenticator
        return LETTER + (fresh_number() if own is None else own.fresh_proof())

    def watch(self, watch: Callable[[zmq.Socket[bytes], Callable[[], bool]], None]) -> None:
        """Have ZeroMQ's questions answered; `watch` watches a socket."""
        if self.authenticator is not None:
            watch(self.authenticator.socket, self.authenticator.answer)

    def protect(self, router: zmq.Socket[bytes]) -> None:
        """Let a socket refuse strangers, before it listens."""
        if self.authenticator is not None:
            self.authenticator.encrypt_accepting(router)
        self._refused = RefusedConnections(
            self._context,
            router,
            self._refusals,
            self._counters,
            self.accepted,
            has_key=self.authenticator is not None,
        )

    def listening(
        self,
        port: int,
        watch: Callable[[zmq.Socket[bytes], Callable[[], bool]], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        """Record that the socket listens; `watch` watches a socket, `on_end` is told of connections that have
        ended, if messages have come over them.
        """
        if self._refused is not None:
            watch(self._refused.socket, self._refused.read)
        self.accepted.port, self.accepted.on_end = port, on_end
        if self.senders is not None:
            self.senders.port = port
        if self.users is not None:
            self.users.port = port

    def heard(self, connection: Connection, frame: zmq.Frame, user: str) -> None:
        """Record the first message over a connection that another process has opened."""
        for _ in range(_READ_AHEAD):  # its descriptor may be that of one whose end is not known here yet
            if self._refused is None or not self._refused.read():
                break
        self.accepted.heard(connection, descriptor_of(frame), user)

    def expelled(self) -> list[VanEvent]:
        """Return the connections of users that were removed since the last call; they are cut."""
        if self.authenticator is None or self.users is None:
            return []
        removed = self.authenticator.removed()
        return [
            Broken(connection, f"the key of {removed[user]} was removed (NETSTORM_ALLOW)", expelled=True)
            for user, connection in self.users.expel(removed)
        ]

    def unprotect(self) -> None:
        """Stop watching the socket, before it is closed."""
        if self._refused is not None:
            self._refused.close()
            self._refused = None

    def close(self) -> None:
        """Close everything else, after all other sockets."""
        if self.authenticator is not None:
            self.authenticator.close()


# Encrypts a van's sockets, and answers ZeroMQ's questions about the keys of those that connect.
#
# ZeroMQ asks over ZAP (its RFC 27), a socket inside the process. The van's own thread answers, from `poll`.
# Without an answer nobody is admitted.

MESSAGE_OVERHEAD: Final = 64
"""Bytes by which encryption makes a frame longer: 33 (a command's name, nonce, flags and authenticator), and
some to spare."""

_ENDPOINT: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"netstorm"
_FRAMES: Final = 7
"""Version, request, domain, address, identity, mechanism, and for CURVE one key (RFC 27)."""
_REFRESH_S: Final = 0.5
"""Time between two looks at the allow list's file; each costs a few microseconds."""


class Authenticator:
    """Decides for one van. All methods belong to its thread.

    Attributes:
        socket: to be watched; call `answer` when it is readable.
        admission: whom this process admits.
        name: of this node's own key; empty: it has none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials,
        admission: Admission,
        refusals: Drops,
    ) -> None:
        """Listen for questions. It must be there before the van listens."""
        self.admission: Final = admission
        self.name: Final = credentials.name
        self._job: Final = credentials.job
        self._own: Final = credentials.own
        self._proof: Final = credentials.proof
        self._refusals: Final = refusals
        self._next_refresh = clock.monotonic() + _REFRESH_S
        self.socket: Final = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def encrypt_accepting(self, router: zmq.Socket[bytes]) -> None:
        """Let a socket accept connections of those alone that are admitted, and prove to them that this
        process holds the job's key. That they hold it, too, their first messages prove (`Senders`).
        """
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._job.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # or ZeroMQ would admit everybody if nobody could answer

    def encrypt_opening(self, dealer: zmq.Socket[bytes]) -> None:
        """Let a socket connect to holders of the job's key alone."""
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self._job.public)

    def fresh_proof(self) -> bytes:
        """Return the proof, for one connection that is opened here, that this process holds the job's key."""
        return self._proof.fresh(self._own.public)

    def answer(self) -> bool:
        """Answer questions that have come, at most `_AT_ONCE`; return whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            user = self._decide(request)
            status, text = (b"200", b"") if user else (b"400", b"not admitted")
            number = request[1] if len(request) > 1 else b""
            self.socket.send_multipart([b"1.0", number, status, text, user.encode(), b""], zmq.NOBLOCK)
        return True

    def removed(self) -> Mapping[str, str]:
        """Return the names of the users that have been removed since the last call."""
        if not self.admission.can_change or clock.monotonic() < self._next_refresh:
            return {}
        self._next_refresh = clock.monotonic() + _REFRESH_S
        return self.admission.refresh()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)

    def _decide(self, request: list[bytes]) -> str:
        """Return the user that a request is about; empty: not admitted."""
        if len(request) != _FRAMES or request[5] != b"CURVE" or len(request[6]) != KEY_BYTES:
            return ""  # ZeroMQ itself asks nothing else of an encrypted socket
        answer = self.admission.decide(request[6])
        if not answer.user:
            sender = request[3].decode("ascii", errors="replace")
            self._refusals.note("not_admitted", sender, answer.reason, clock.monotonic())
        return answer.user


# Connections that others have opened. Of those that have no session there are few, few from one address, and
# of few bytes; of those that have one, not all are from one address.
#
# ZeroMQ has bounds of its own: a time for the handshake (HANDSHAKE_IVL), and a size of messages (MAXMSGSIZE),
# which has to be that of chunks. It knows no bound on the number of connections, and takes as much in a
# handshake as in a message. So what strangers could open and send is bounded here, and what members could
# open beside their sessions: what is too much is shut down.
#
# Whom to shut down is decided so that a process of the job gets through while a stranger opens one connection
# after the other: first connections that have not said ZeroMQ's greeting, which a process does as soon as it
# is connected, then any at random. The oldest would be the honest one, whose handshake takes round trips of a
# WAN.

_MOST: Final = 4096
"""Connections that wait at once, if there are four times as many descriptors: a whole large job connects when
it starts. Each takes 20 kB in ZeroMQ. Half of them may be from one address: a site behind one router."""

_MOST_DESCRIPTORS: Final = 65_536
"""To which the limit on open files is raised: enough for sessions with 16,384 processes."""

_SHARE: Final = 4
"""Part of the descriptors that waiting connections may take; others are for sessions and for the script."""

_ANNOUNCED_BYTES: Final = 8 * 2**30
"""Most virtual memory for frames that connections have announced, and not sent, before their first message.
ZeroMQ reserves it at once."""
_CROWD: Final = 4
"""So many times as many may be there in their first second: a whole job connects at once."""
_YOUNG_S: Final = 1.0

_GREETING_BYTES: Final = 10
"""First part of ZeroMQ's greeting: its signature (ZMTP 3.1), which no side waits to send."""

_GREETING_S: Final = 0.25
"""By then the greeting has come: it leaves with the last packet of TCP's handshake."""

_MOST_BYTES: Final = 2**20
"""Of a connection before its first message, and of that: a Hello with all that it has received."""

_CHECK_S: Final = 0.25
_PAUSE_S: Final = 1.0


class _Stage(enum.IntEnum):
    """How far a connection has come; the first are shut down first."""

    LEFT = 0
    """It has no session, or has one no more: the other side is about to close it."""
    SILENT = 1
    GREETED = 2
    """Its handshake is under way, or its first message."""
    HEARD = 3
    """A message has come over it, and nothing was decided yet."""
    IN_USE = 4
    """It has a session."""
    SHUT = 5
    """It was shut down, and ZeroMQ has not noticed yet."""


class _AcceptedConnection:
    """One connection."""

    __slots__ = ("address", "backlog", "connection", "descriptor", "group", "since", "stage", "user")

    def __init__(self, descriptor: int, address: str, now: float) -> None:
        self.descriptor: Final = descriptor
        self.address: Final = address
        self.group: Final = _group_of(address)
        self.since = now
        """When it was accepted, or left."""
        self.stage = _Stage.SILENT
        self.connection: Connection | None = None
        self.user = ""
        self.backlog: Final = Backlog()

    @property
    def name(self) -> str:
        """Who it is, for a person."""
        return f"{self.address} (key {self.user})" if self.user else self.address


class AcceptedConnections:
    """Connections to one port, and what becomes of those that have no session. All methods belong to the
    van's thread.

    Attributes:
        port: on which they were accepted.
        most: without a session that may be kept.
        most_in_use: with sessions, from one address, beside which no other one from there is kept.
        on_end: called with each connection that has ended, if messages have come over it.
    """

    def __init__(
        self,
        refusals: Drops,
        *,
        limit_s: float,
        max_message_bytes: int = 2**26,
        rng: random.Random | None = None,
    ) -> None:
        """Begin without connections.

        Args:
            refusals: counts and logs those that are shut down.
            limit_s: how long a connection may wait for its first message, or be left; see `connecting_s`.
            max_message_bytes: largest frame that ZeroMQ accepts.
            rng: decides whom to shut down.
        """
        self.port = 0
        self.on_end: Callable[[Connection], None] = lambda _: None
        self._refusals: Final = refusals
        self._limit_s: Final = limit_s
        self.most = descriptor_share()
        self.most_in_use = max(1, most_sessions() // 2)
        self._most_announcing: Final = max(16, _ANNOUNCED_BYTES // max_message_bytes)
        self._random: Final = rng or random.Random()
        self._open: Final[dict[int, _AcceptedConnection]] = {}
        """By descriptor: all that ZeroMQ has not closed."""
        self._heard: Final[dict[Connection, _AcceptedConnection]] = {}
        """Those of them over which a message has come."""
        self._entries: Final[dict[int, _AcceptedConnection]] = {}
        """By descriptor: those that wait, the oldest first."""
        self._groups: Final[dict[str, dict[_Stage, dict[int, _AcceptedConnection]]]] = {}
        """The same by address and stage."""
        self._in_use: Final[dict[str, int]] = {}
        """By address: how many have sessions."""
        self._checked_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    # ---------------------------------------------------------------------------------------- what happens

    def accepted(self, descriptor: int, sender: str, now: float) -> None:
        """Record a connection that ZeroMQ has accepted. If there are too many, one is shut down."""
        self.ended(descriptor)
        entry = self._open[descriptor] = _AcceptedConnection(descriptor, sender, now)
        in_use = self._in_use.get(entry.group, 0)
        if in_use >= self.most_in_use:
            self._refuse(entry, "sessions", f"{in_use} others from its address have sessions", now)
            return
        self._put(entry, _Stage.SILENT)
        ours = self._groups[entry.group]
        if _size(ours) > max(1, self.most // 2):
            self._evict(ours, "from its address", now)
        elif len(self._entries) > self.most:
            self._evict(max(self._groups.values(), key=_size), "here", now)

    def knows(self, connection: Connection) -> bool:
        """Return whether a message has come over a connection before."""
        return connection in self._heard

    def descriptor(self, connection: Connection) -> int:
        """Return the descriptor of a connection over which a message has come; -1: it has ended."""
        entry = self._heard.get(connection)
        return -1 if entry is None else entry.descriptor

    def is_full(self, connection: Connection, nbytes: int) -> bool:
        """See `Backlog`."""
        entry = self._heard.get(connection)
        return entry is not None and entry.backlog.is_full(nbytes, lambda: (entry.descriptor,))

    def heard(self, connection: Connection, descriptor: int, user: str) -> None:
        """Record the first message over a connection, and the text of the key of its sender."""
        entry = self._open.get(descriptor)
        if entry is None:
            self.on_end(main_of(connection))
            return
        in_use = self._in_use.get(entry.group, 0)
        if main_of(connection) != connection and in_use >= self.most_in_use // 2:
            if entry.stage is not _Stage.SHUT:  # room is for sessions first: this one goes on without it
                self._refuse(entry, "streams", f"{in_use} others from its address are in use", entry.since)
            return
        if entry.connection is not None:  # a late message of an earlier one that had this descriptor
            self._forget(entry.connection)
        entry.connection, entry.user = connection, user
        self._heard[connection] = entry
        if entry.stage is not _Stage.SHUT:
            self._take(entry)
            self._put(entry, _Stage.HEARD)
            if self.is_in_use(main_of(connection)):
                self.admitted(connection)  # a further stream of a connection that has a session

    def is_in_use(self, connection: Connection) -> bool:
        """Return whether a session uses a connection."""
        entry = self._heard.get(connection)
        return entry is not None and entry.stage is _Stage.IN_USE

    def admitted(self, connection: Connection) -> None:
        """Record that a session uses a connection: it does not wait any more."""
        entry = self._heard.get(connection)
        if entry is not None and entry.stage not in (_Stage.IN_USE, _Stage.SHUT):
            self._take(entry)
            entry.stage = _Stage.IN_USE
            self._in_use[entry.group] = self._in_use.get(entry.group, 0) + 1

    def left(self, connection: Connection, now: float) -> None:
        """Record that no session uses a connection, or will: its opener closes it, or it is shut down."""
        for entry in self._streams(connection):
            if entry.stage is not _Stage.SHUT:
                self._take(entry)
                entry.since = now
                self._put(entry, _Stage.LEFT)

    def refuse(self, connection: Connection, reason: str, detail: str, now: float) -> None:
        """Shut a connection down whose sender does what no process of a job does."""
        for entry in self._streams(connection):
            if entry.stage is not _Stage.SHUT:
                self._refuse(entry, reason, detail, now)

    def ended(self, descriptor: int) -> str:
        """Record that ZeroMQ has closed a connection; return the address that it was from."""
        entry = self._open.pop(descriptor, None)
        if entry is None:
            return "an unknown address"
        self._take(entry)
        if entry.connection is not None:
            self._forget(entry.connection)
        return entry.address

    # ------------------------------------------------------------------------------------------ time passes

    def until_check(self, timeout_s: float) -> float:
        """Return how long to wait for events, at most `timeout_s`."""
        return min(timeout_s, _CHECK_S) if self._entries else timeout_s

    def check(self, now: float) -> None:
        """Shut down what waits for too long, or has sent too much. All messages that came have been read."""
        if not self._entries or now < self._checked_at + _CHECK_S:
            return
        before, self._checked_at = self._checked_at, now
        if now - before > _PAUSE_S:  # this thread has not read what may have come meanwhile
            for entry in self._entries.values():
                entry.since = max(entry.since, now - self._limit_s / 2)
        for entry in [entry for entry in self._entries.values() if entry.stage is not _Stage.HEARD]:
            waited_s = now - entry.since
            if entry.stage is _Stage.LEFT:
                if waited_s > self._limit_s:
                    self._refuse(entry, "left", f"it has had no session for {waited_s:.1f} s", now)
                continue
            received = bytes_received(entry.descriptor)
            if waited_s > self._limit_s and waited_s > self._far_s(entry):
                self._refuse(entry, "silent", f"no message came for {waited_s:.1f} s", now)
            elif received > _MOST_BYTES and entry.since < before:
                detail = f"it has sent more than {_MOST_BYTES} bytes before a message was complete"
                self._refuse(entry, "large", detail, now)
            elif received >= _GREETING_BYTES and entry.stage is _Stage.SILENT:
                self._move(entry, _Stage.GREETED)
        for group in list(self._groups.values()):
            self._bound_announced(
                list(group.get(_Stage.GREETED, {}).values()), self._most_announcing // 2, now
            )
        greeted = [entry for entry in self._entries.values() if entry.stage is _Stage.GREETED]
        self._bound_announced(greeted, self._most_announcing, now)

    # ----------------------------------------------------------------------------------------------- inside

    def _far_s(self, entry: _AcceptedConnection) -> float:
        """Return how long a connection from far away may take."""
        progress = progress_of(entry.descriptor)
        return 0.0 if progress is None else connecting_s(progress.smoothed_rtt_s, self._limit_s)

    def _bound_announced(self, greeted: list[_AcceptedConnection], most: int, now: float) -> None:
        """Bound the memory of frames that connections have announced: first of those whose handshake takes
        long.
        """
        old = [entry for entry in greeted if now - entry.since > _YOUNG_S]
        self._random.shuffle(old)
        young = [entry for entry in greeted if now - entry.since <= _YOUNG_S]
        self._random.shuffle(young)
        excess = old[: max(0, len(greeted) - most)]
        excess += young[: max(0, len(greeted) - len(excess) - _CROWD * most)]
        for entry in excess:
            self._refuse(entry, "waiting", f"{len(greeted)} others have sent no whole message, either", now)

    def _evict(self, group: dict[_Stage, dict[int, _AcceptedConnection]], where: str, now: float) -> None:
        """Shut down one connection of an address."""
        detail = f"{_size(group) - 1} others wait {where}, too"
        self._refuse(self._whom_to_evict(group, now), "waiting", detail, now)

    def _whom_to_evict(
        self, group: dict[_Stage, dict[int, _AcceptedConnection]], now: float
    ) -> _AcceptedConnection:
        for entry in group.get(_Stage.LEFT, {}).values():
            return entry
        heard = group.get(_Stage.HEARD, {})
        for entry in heard.values():
            if now - entry.since > self._limit_s:
                return entry  # whoever is waited for tries again over another connection
            break
        while silent := list(group.get(_Stage.SILENT, {}).values()):
            # The greeting of the newest may be on its way, unless they are nearly all.
            older = silent[: (len(silent) + 1) // 2]
            crowded = 2 * len(silent) > _size(group)
            if not crowded:
                older = [entry for entry in older if now - entry.since > _GREETING_S]
            if not older:
                break
            entry = self._random.choice(older)
            if bytes_received(entry.descriptor) < _GREETING_BYTES:
                return entry
            self._move(entry, _Stage.GREETED)
        others = [*group.get(_Stage.GREETED, {}).values(), *heard.values()]
        return self._random.choice(others or list(group[_Stage.SILENT].values()))

    def _refuse(self, entry: _AcceptedConnection, reason: str, detail: str, now: float) -> None:
        self._take(entry)
        entry.stage = _Stage.SHUT
        self._refusals.note(reason, entry.name, detail, now)
        shut_down(entry.descriptor, self.port)

    def _forget(self, connection: Connection) -> None:
        """Forget a connection, or a stream, that has ended: with it ends the connection."""
        del self._heard[connection]
        self.on_end(main_of(connection))

    def _streams(self, connection: Connection) -> Iterator[_AcceptedConnection]:
        """Yield all streams of a connection over which a message has come."""
        identity = identity_of(connection)
        further = (connection_of(of_stream(identity, number)) for number in range(1, MOST_STREAMS))
        for stream in (connection, *further):
            entry = self._heard.get(stream)
            if entry is not None:
                yield entry

    def _put(self, entry: _AcceptedConnection, stage: _Stage) -> None:
        entry.stage = stage
        self._entries[entry.descriptor] = entry
        self._groups.setdefault(entry.group, {}).setdefault(stage, {})[entry.descriptor] = entry

    def _take(self, entry: _AcceptedConnection) -> None:
        if entry.stage is _Stage.IN_USE:
            self._in_use[entry.group] -= 1
            if not self._in_use[entry.group]:
                del self._in_use[entry.group]
        if self._entries.pop(entry.descriptor, None) is None:
            return
        group = self._groups[entry.group]
        del group[entry.stage][entry.descriptor]
        if not _size(group):
            del self._groups[entry.group]

    def _move(self, entry: _AcceptedConnection, stage: _Stage) -> None:
        del self._groups[entry.group][entry.stage][entry.descriptor]
        entry.stage = stage
        self._groups[entry.group].setdefault(stage, {})[entry.descriptor] = entry


def raise_descriptor_limit() -> None:
    """Let this process have more open files than by default (1024), as far as it may: every connection is
    one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_share() -> int:
    """Return how many connections may wait at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // _SHARE)


def most_sessions() -> int:
    """Return how many sessions others may open: half of the descriptors are for them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS // 4
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 2)


def _size(group: dict[_Stage, dict[int, _AcceptedConnection]]) -> int:
    return sum(map(len, group.values()))


def _group_of(address: str) -> str:
    """Return an address, or the network of an IPv6 one: whoever has one of these has all."""
    try:
        parsed = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


# Counts connections to the ROUTER, and those that it has refused in the handshake, and logs why.
#
# ZeroMQ reports them through a monitor: a connection's descriptor when it is accepted and when it ends, and
# in between, if so, why its handshake has failed. One thread of ZeroMQ reports both ends of a failure at
# once, so the end that follows a failure is that of the same connection. Of some protocols, such as HTTP,
# ZeroMQ reports no failure: such connections are accepted, and never established.

_EVENT: Final = struct.Struct("=HI")

_MONITORED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_CRYPTOGRAPHIC: Final = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)

_numbers: Final = itertools.count()
"""Distinguish the monitors of a process."""


class RefusedConnections:
    """Reads the monitor of a ROUTER.

    Attributes:
        socket: to be watched; call `read` when it is readable.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        refusals: Drops,
        counters: Counters,
        accepted: AcceptedConnections,
        *,
        has_key: bool,
    ) -> None:
        """Begin before the ROUTER listens. `has_key`: whether it requires the job's key."""
        self._accepted: Final = accepted
        self._router: Final = router
        self._refusals: Final = refusals
        self._counters: Final = counters
        self._has_key: Final = has_key
        self._failure: tuple[int, int] | None = None
        endpoint = f"inproc://netstorm-refused-{os.getpid()}-{next(_numbers)}"
        router.monitor(endpoint, int(_MONITORED))
        self.socket: Final = context.socket(zmq.PAIR)
        # Without a limit: at a limit ZeroMQ's thread would wait for this one, and nothing would move.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def read(self) -> bool:
        """Process events that have come, at most `_AT_ONCE`; return whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                event, value = _EVENT.unpack(self.socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return False
            if event == zmq.EVENT_ACCEPTED:
                self._counters.add("accepted_connections")
                self._accepted.accepted(value, _peer_of(value), clock.monotonic())
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._counters.add("established_connections")
            elif event != zmq.EVENT_DISCONNECTED:
                self._failure = (event, value)
            else:
                sender = self._accepted.ended(value)
                failure, self._failure = self._failure, None
                if failure is not None:
                    self._note(*failure, sender)
        return True

    def close(self) -> None:
        """Close the monitor; before the ROUTER."""
        self._router.disable_monitor()
        self.socket.close(0)

    def _note(self, event: int, value: int, sender: str) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return  # the authenticator has counted it, and knows more
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # Of two sides without a common key either may notice first, and the other one sees only the end.
            reason, detail = "handshake", "it has ended before it was established (without the job's key?)"
        elif value == _MISMATCH and self._has_key:
            reason, detail = "no_key", "it is not encrypted: a process of this job needs NETSTORM_KEY_FILE"
        elif value == _MISMATCH:
            reason, detail = "encrypted", "it is encrypted, but this process has no key (NETSTORM_KEY_FILE)"
        elif value == _CRYPTOGRAPHIC:
            reason, detail = "key", "it has the key of another job (NETSTORM_KEY_FILE), or was tampered with"
        else:
            detail = "it does not speak ZeroMQ's protocol, or repeats or changes what a process has sent"
            reason = "protocol"
        self._refusals.note(reason, sender, detail, clock.monotonic())


def _peer_of(descriptor: int) -> str:
    """Return the address at the other end of a connection, which ZeroMQ may have closed by now."""
    try:
        with borrowed_socket(descriptor) as connection:
            return plain_address(str(connection.getpeername()[0]))
    except (OSError, IndexError):
        return "an unknown address"


# Which process a message is from that the ROUTER has received: known by the key that its connection has.
#
# A connection's first message is looked at only if the connection's name proves that its opener holds the
# job's key (`ProcessProof`). Other connections are cut.

_REMEMBERED: Final = 4096
"""Connections whose proof is known to be valid. That of another one is checked with each message: 5 us."""


class Senders:
    """The processes whose connections were accepted, for jobs with a key.

    Attributes:
        port: on which connections are accepted.
    """

    def __init__(self, proof: ProcessProof, refusals: Drops) -> None:
        self.port = 0
        self._proof: Final = proof
        self._refusals: Final = refusals
        self._proven: Final[dict[bytes, str]] = {}
        """Keys by identity. Nobody else can use an identity: it is random, and told to this process alone."""

    def of(self, identity: bytes, frame: zmq.Frame) -> str:
        """Return the text of the key of a message's sender; empty: it does not prove that it holds the job's
        key, and its connection is cut.
        """
        return self._proven.get(identity) or self._prove(identity, frame)

    def _prove(self, identity: bytes, frame: zmq.Frame) -> str:
        user = _text(frame, "User-Id")  # what the authenticator has answered
        try:
            proven = is_identity(identity) and self._proof.is_valid(identity[1:], key_of_text(user))
        except ValueError:
            proven = False
        if not proven:
            detail = "it does not prove that it holds the job's key (or is another release)"
            sender = _text(frame, "Peer-Address") or "an unknown address"
            self._refusals.note("proof", sender, detail, clock.monotonic())
            shut_down(descriptor_of(frame), self.port)
            return ""
        if len(self._proven) >= _REMEMBERED:
            del self._proven[next(iter(self._proven))]
        self._proven[identity] = user
        return user


def _text(frame: zmq.Frame, name: str) -> str:
    """Return what ZeroMQ knows of the connection that a frame has come over; empty: nothing."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


# Which connections belong to which user, so that those of a removed one can be ended.
#
# Their TCP connections are shut down, and until ZeroMQ has noticed that, whatever it still delivers is
# dropped.

_MOST_CONNECTIONS: Final = 64
"""Of one user that are remembered: a node needs two, with their streams, and more after a break."""


class Users:
    """The users whose connections were accepted, for jobs with an allow list.

    Attributes:
        port: on which connections are accepted.
    """

    def __init__(self, admission: Admission) -> None:
        self.port = 0
        self._admission: Final = admission
        self._connections: Final[dict[str, dict[Connection, int]]] = {}
        """By user: its connections, oldest first, with the descriptors of their TCP connections."""

    def admits(self, user: str, connection: Connection, frame: zmq.Frame) -> bool:
        """Return whether the sender of a message is still admitted; if not, its connection is cut."""
        descriptor = descriptor_of(frame)
        if not self._admission.admits(user):
            shut_down(descriptor, self.port)
            return False
        connections = self._connections.setdefault(user, {})
        if connection not in connections:
            if len(connections) >= _MOST_CONNECTIONS:
                del connections[next(iter(connections))]
            connections[connection] = descriptor
        return True

    def expel(self, users: Iterable[str]) -> list[tuple[str, Connection]]:
        """Cut the connections of users; return each with its user."""
        expelled = []
        for user in users:
            for connection, descriptor in self._connections.pop(user, {}).items():
                expelled.append((user, connection))
                shut_down(descriptor, self.port)
        return expelled


# The names of connections on the wire: what a DEALER calls itself, and the ROUTER calls it.
#
# Each connection has a fresh one. With a job's key it is the proof that its opener holds the key
# (`ProcessProof`), else a random number.

LETTER: Final = b"N"
"""First byte of every identity: ZeroMQ reserves those that begin with 0. Those of a connection's further
streams begin with the following letters."""

MOST_STREAMS: Final = 8
_LETTERS: Final = bytes(range(LETTER[0], LETTER[0] + MOST_STREAMS))

_SIZES: Final = (1 + NUMBER_BYTES, 1 + PROOF_BYTES)


def is_identity(identity: bytes) -> bool:
    """Return whether a connection's identity can be that of a process of NetStorm."""
    return len(identity) in _SIZES and identity[0] in _LETTERS


def is_stream(identity: bytes) -> bool:
    """Return whether an identity is that of a connection's further stream."""
    return identity[:1] != LETTER


def of_stream(identity: bytes, number: int) -> bytes:
    """Return the identity of a stream of a connection; number 0 is the connection's own."""
    return _LETTERS[number : number + 1] + identity[1:]


def main_of(connection: Connection) -> Connection:
    """Return the number of the connection of which another number is a stream, or the connection's own."""
    identity = identity_of(connection)
    return connection_of(of_stream(identity, 0)) if identity[0] in _LETTERS[1:] else connection


def connection_of(identity: bytes) -> Connection:
    """Return the number of a connection that another process has opened: all its bytes, so that no table is
    needed, which strangers could fill by connecting.
    """
    return Connection(-int.from_bytes(identity, "big"))


def identity_of(connection: Connection) -> bytes:
    """Return the identity of a connection that another process has opened."""
    number = -connection
    return number.to_bytes((number.bit_length() + 7) // 8, "big")
