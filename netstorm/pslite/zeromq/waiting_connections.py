"""Connections that were accepted and have no session: few, few from one address, and of few bytes.

ZeroMQ has bounds of its own: a time for the handshake (HANDSHAKE_IVL), and a size of messages (MAXMSGSIZE),
which has to be that of chunks. It knows no bound on the number of connections, and takes as much in a
handshake as in a message. So what strangers could open and send is bounded here, and what members could open
beside their sessions: what is too much is shut down.

Whom to shut down is decided so that a process of the job gets through while a stranger opens one connection
after the other: first connections that have not said ZeroMQ's greeting, which a process does as soon as it is
connected, then any at random. The oldest would be the honest one, whose handshake takes round trips of a WAN.
"""

from __future__ import annotations

import enum
import ipaddress
import random
import resource
from typing import Final

from netstorm.observe.log import Drops
from netstorm.pslite.van.interface import Connection
from netstorm.pslite.zeromq.tcp_info import bytes_received, shut_down

__all__ = ["WaitingConnections", "descriptor_share", "most_sessions", "raise_descriptor_limit"]

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


class _Entry:
    """One connection."""

    __slots__ = ("address", "connection", "descriptor", "group", "since", "stage", "user")

    def __init__(self, descriptor: int, address: str, now: float) -> None:
        self.descriptor: Final = descriptor
        self.address: Final = address
        self.group: Final = _group_of(address)
        self.since = now
        """When it was accepted, or left."""
        self.stage = _Stage.SILENT
        self.connection: Connection | None = None
        self.user = ""

    @property
    def name(self) -> str:
        """Who it is, for a person."""
        return f"{self.address} (key {self.user})" if self.user else self.address


class WaitingConnections:
    """Connections to one port that have no session. All methods belong to the van's thread.

    Attributes:
        port: on which they were accepted.
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
            limit_s: how long a connection may wait for its first message, or be left.
            max_message_bytes: largest frame that ZeroMQ accepts.
            rng: decides whom to shut down.
        """
        self.port = 0
        self._refusals: Final = refusals
        self._limit_s: Final = limit_s
        self._most = descriptor_share()
        self._most_announcing: Final = max(16, _ANNOUNCED_BYTES // max_message_bytes)
        self._random: Final = rng or random.Random()
        self._entries: Final[dict[int, _Entry]] = {}
        """By descriptor: those that wait, the oldest first."""
        self._groups: Final[dict[str, dict[_Stage, dict[int, _Entry]]]] = {}
        """The same by address and stage."""
        self._heard: Final[dict[Connection, _Entry]] = {}
        """All over which a message has come, those with a session, too."""
        self._descriptors: Final[dict[int, Connection]] = {}
        """The same by descriptor."""
        self._checked_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    # ---------------------------------------------------------------------------------------- what happens

    def accepted(self, descriptor: int, sender: str, now: float) -> None:
        """Record a connection that ZeroMQ has accepted. If there are too many, one is shut down."""
        self.ended(descriptor)
        entry = _Entry(descriptor, sender, now)
        self._put(entry, _Stage.SILENT)
        ours = self._groups[entry.group]
        if _size(ours) > max(1, self._most // 2):
            self._evict(ours, "from its address", now)
        elif len(self._entries) > self._most:
            self._evict(max(self._groups.values(), key=_size), "here", now)

    def knows(self, connection: Connection) -> bool:
        """Return whether a message has come over a connection before."""
        return connection in self._heard

    def heard(self, connection: Connection, descriptor: int, user: str) -> None:
        """Record the first message over a connection, and the text of the key of its sender."""
        entry = self._entries.get(descriptor)
        if entry is None:
            return  # it has been shut down, or nobody knows its descriptor
        self._take(entry)
        entry.connection, entry.user = connection, user
        self._heard[connection] = entry
        self._descriptors[descriptor] = connection
        self._put(entry, _Stage.HEARD)

    def admitted(self, connection: Connection) -> None:
        """Record that a session uses a connection: it does not wait any more."""
        entry = self._heard.get(connection)
        if entry is not None:
            self._take(entry)

    def left(self, connection: Connection, now: float) -> None:
        """Record that no session uses a connection, or will: its opener closes it, or it is shut down."""
        entry = self._heard.get(connection)
        if entry is not None:
            self._take(entry)
            entry.since = now
            self._put(entry, _Stage.LEFT)

    def refuse(self, connection: Connection, reason: str, detail: str, now: float) -> None:
        """Shut a connection down whose sender does what no process of a job does."""
        entry = self._heard.get(connection)
        if entry is not None:
            self._refuse(entry, reason, detail, now)

    def ended(self, descriptor: int) -> None:
        """Record that ZeroMQ has closed a connection."""
        entry = self._entries.get(descriptor)
        if entry is not None:
            self._take(entry)
        connection = self._descriptors.pop(descriptor, None)
        if connection is not None:
            self._heard.pop(connection, None)

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
            if now - entry.since > self._limit_s:
                if entry.stage is _Stage.LEFT:
                    self._refuse(entry, "left", f"it has had no session for {self._limit_s:g} s", now)
                else:
                    self._refuse(entry, "silent", f"no message came for {self._limit_s:g} s", now)
            elif entry.stage is not _Stage.LEFT:
                received = bytes_received(entry.descriptor)
                if received > _MOST_BYTES and entry.since < before:
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

    def _bound_announced(self, greeted: list[_Entry], most: int, now: float) -> None:
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

    def _evict(self, group: dict[_Stage, dict[int, _Entry]], where: str, now: float) -> None:
        """Shut down one connection of an address."""
        detail = f"{_size(group) - 1} others wait {where}, too"
        self._refuse(self._whom_to_evict(group, now), "waiting", detail, now)

    def _whom_to_evict(self, group: dict[_Stage, dict[int, _Entry]], now: float) -> _Entry:
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

    def _refuse(self, entry: _Entry, reason: str, detail: str, now: float) -> None:
        self._take(entry)
        self._refusals.note(reason, entry.name, detail, now)
        shut_down(entry.descriptor, self.port)

    def _put(self, entry: _Entry, stage: _Stage) -> None:
        entry.stage = stage
        self._entries[entry.descriptor] = entry
        self._groups.setdefault(entry.group, {}).setdefault(stage, {})[entry.descriptor] = entry

    def _take(self, entry: _Entry) -> None:
        if self._entries.pop(entry.descriptor, None) is None:
            return  # it has a session
        group = self._groups[entry.group]
        del group[entry.stage][entry.descriptor]
        if not _size(group):
            del self._groups[entry.group]

    def _move(self, entry: _Entry, stage: _Stage) -> None:
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
    return _MOST_DESCRIPTORS // 2 if soft == resource.RLIM_INFINITY else soft // 2


def _size(group: dict[_Stage, dict[int, _Entry]]) -> int:
    return sum(map(len, group.values()))


def _group_of(address: str) -> str:
    """Return an address, or the network of an IPv6 one: whoever has one of these has all."""
    try:
        found = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address
