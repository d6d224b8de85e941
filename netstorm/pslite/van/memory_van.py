"""A van in memory: what the ZeroMQ van does, on virtual time and without sockets."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

from netstorm.errors import UsageError
from netstorm.protocol.frames import Buffer
from netstorm.pslite.measurement.tcp_progress import Progress
from netstorm.pslite.van.interface import Connection, Received, VanEvent
from netstorm.pslite.van.memory_network import MemoryNetwork
from netstorm.pslite.van.memory_pipes import Pipe

__all__ = ["MemoryVan"]

_POLL_AT_MOST: Final = 256
"""Most events that one `poll` returns: the owner also has timers to serve."""

_SILENT: Final = Progress(
    delivered=0,
    segment=0,
    retransmitted=0,
    unsent=0,
    window=0,
    busy_s=0.0,
    receiver_limited_s=0.0,
    smoothed_rtt_s=0.0,
    min_rtt_s=0.0,
)
"""Progress of a connection without any delivery."""


class MemoryVan:
    """One process's end of a `MemoryNetwork`. Implements `pslite.van.interface.Van`.

    Attributes:
        host: on which it is.
        key: stands for the key pair that a process makes when it begins.
        notify: called when there is an event to poll for and there was none before.
    """

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        """Put a van on host `host`; several may share one."""
        self.host = host
        self.key = network.new_key()
        self.notify: Callable[[], None] | None = None
        self._network: Final = network
        self._opened: dict[Connection, Pipe] = {}
        self._accepted: dict[Connection, Pipe] = {}
        self._accept_numbers = itertools.count(1)
        self._events: deque[VanEvent] = deque()
        self._woken = False
        self._shut = False

    # ------------------------------------------------------------------------------------------------ the van

    def bind(self, host: str, port: int) -> int:
        """Listen as `host`, and as this van's own host name."""
        self._check_open()
        return self._network.listen(self, host if host not in ("", "*") else self.host, port)

    def open(self, connection: Connection, host: str, port: int) -> None:
        """Begin to connect."""
        self._check_open()
        if connection <= 0 or connection in self._opened:
            raise UsageError(f"connection {connection} is not a new positive number")
        self._opened[connection] = self._network.connect(self, connection, host, port)

    def transmit(self, connection: Connection, header: bytes, payload: Buffer | None) -> bool:
        """Hand over a message; the payload is copied, unless it is a frame that a van has received."""
        pipe = self._opened.get(connection) or self._accepted.get(connection)
        if pipe is None or self._shut:
            return False
        taken = self._network.send(pipe, from_opener=connection > 0, header=header, payload=payload)
        if not taken and connection < 0:
            del self._accepted[connection]
        return taken

    def close(self, connection: Connection) -> None:
        """Close a connection. The opener of a connection accepted here is not told: a ROUTER cannot close
        it.
        """
        pipe = self._opened.pop(connection, None)
        if pipe is not None:
            self._network.hang_up(pipe, from_opener=True, drop=False, reason=f"closed by {self.host}")
        pipe = self._accepted.pop(connection, None)
        if pipe is not None:
            pipe.acceptor_knows_end = True

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""

    def refuse(self, connection: Connection, reason: str) -> None:
        """Cut a connection."""
        pipe = self._accepted.pop(connection, None)
        if pipe is not None:
            self._network.hang_up(pipe, from_opener=False, drop=True, reason=f"closed by {self.host}")

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Return events; if there are none, let at most `timeout_s` of virtual time pass first."""
        if timeout_s > 0 and not self._events and not self._woken:
            timeline = self._network.timeline
            timeline.run_until(lambda: bool(self._events) or self._woken, timeline.now + timeout_s)
        self._woken = False
        return [self._events.popleft() for _ in range(min(len(self._events), _POLL_AT_MOST))]

    def progress(self, connection: Connection) -> Progress | None:
        """Return what is known of a connection that was opened here: only its round trip."""
        pipe = self._opened.get(connection)
        if pipe is None or not pipe.established:
            return None
        trip = self._network.link_model.round_trip(self.host, pipe.host)
        return _SILENT._replace(smoothed_rtt_s=trip, min_rtt_s=trip)

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the host at the other end can be reached; its process may be stopped."""
        pipe = self._opened.get(connection) or self._accepted.get(connection)
        if pipe is None or not (pipe.established or connection < 0):
            return False
        return self._network.acknowledges(pipe, from_opener=connection > 0)

    def wake(self) -> None:
        """Make the `poll` that waits, or the next one, return."""
        self._woken = True
        if self.notify is not None:
            self.notify()

    def shut(self, linger_s: float) -> None:
        """Close everything. What was handed over has `linger_s` of virtual time to arrive."""
        if self._shut:
            return
        self._shut = True
        network = self._network
        network.unlisten(self)
        left = [(pipe, True) for pipe in self._opened.values()] + [
            (pipe, False) for pipe in self._accepted.values()
        ]
        for pipe, opened in left:
            network.hang_up(pipe, from_opener=opened, drop=linger_s <= 0, reason=f"closed by {self.host}")
        if linger_s > 0:
            network.timeline.after(linger_s, lambda: network.crash(self))
        self._opened.clear()
        self._accepted.clear()
        self._events.clear()

    # ------------------------------------------------------------------------------------------- the network

    def deliver(self, event: VanEvent) -> None:
        """Receive an event from the network."""
        if self._shut:
            return
        if isinstance(event, Received):
            if event.connection not in (self._opened if event.connection > 0 else self._accepted):
                return
        elif (self._opened if event.connection > 0 else self._accepted).pop(event.connection, None) is None:
            return
        self._events.append(event)
        if len(self._events) == 1 and self.notify is not None:
            self.notify()

    def accept(self, pipe: Pipe) -> Connection:
        """Return a number for a connection that another van has opened."""
        connection = Connection(-next(self._accept_numbers))
        self._accepted[connection] = pipe
        return connection

    def die(self, *, silent: bool = False) -> None:
        """End without closing anything, as a killed process does; `silent`: as a host without power."""
        self._shut = True
        self._network.crash(self, silent=silent)
        self._opened.clear()
        self._accepted.clear()
        self._events.clear()

    def _check_open(self) -> None:
        if self._shut:
            raise UsageError(f"the van of {self.host} has been shut")
