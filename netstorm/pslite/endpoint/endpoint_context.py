"""What all sessions of an endpoint share: connection numbers, the clock, and passive measurement. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

from netstorm.observe.trace import Trace
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.pslite.endpoint.local_process import LocalProcess
from netstorm.pslite.endpoint.session_table import SessionTable
from netstorm.pslite.endpoint.traffic_observer import TrafficObserver
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.receiving import new_held_bytes
from netstorm.pslite.session.sending import SendingHalf
from netstorm.pslite.session.session import Session
from netstorm.pslite.session.traced_sending import TracedSendingHalf
from netstorm.pslite.session.window import Window
from netstorm.pslite.van.interface import Connection

__all__ = ["EndpointContext"]

_BUSY_BYTES: Final = 16 * 1024
"""A link with less than this in flight and queued is not busy: it is the initial window of a TCP
connection."""


class EndpointContext:
    """Implements `pslite.session.session.SessionContext`.

    Attributes:
        held_bytes: see `SessionContext`.
        observer: told of acknowledgements, for passive measurement.
        acknowledgement_stamp: `sent_at` of the acknowledgement that is being processed, in ns.
        acknowledges: see `SessionContext`; the driver sets it.
        may_be_busy: see `SessionContext`; the endpoint sets it.
        resumed_at: when this process last went on after it had not run for a while.
    """

    def __init__(
        self,
        process: LocalProcess,
        sessions: SessionTable,
        *,
        limits: Limits,
        rng: random.Random,
        stamp: Callable[[], int],
        trace: Trace | None,
    ) -> None:
        """`stamp`: returns the cluster clock in ns; `trace`: records all deliveries."""
        self.limits: Final = limits
        self.held_bytes: Final = new_held_bytes()
        self.incarnation: Final = process.incarnation
        self.random: Final = rng
        self.tokens = random.Random(f"tokens {process.incarnation}")
        self.stamp: Final = stamp
        self.observer: TrafficObserver | None = None
        self.acknowledgement_stamp = 0
        self.acknowledges: Callable[[Connection], bool] = lambda _: False
        self.may_be_busy: Callable[[Peer, float], bool] = lambda _, __: False
        self.resumed_at = -math.inf
        self._process: Final = process
        self._sessions: Final = sessions
        self._trace: Final = trace

    @property
    def boot(self) -> int:
        """See `SessionContext`."""
        return self._process.boot

    def new_connection(self) -> Connection:
        """See `SessionContext`."""
        return self._sessions.new_connection()

    def hello(self, session: Session, boot: int) -> m.Hello:
        """See `SessionContext`."""
        assert session.connection is not None
        self._sessions.by_connection[session.connection] = session
        received, beyond = session.receiving.received_numbers()
        return m.Hello(
            job=self._process.job,
            sender=self._process.rank,
            incarnation=self.incarnation,
            receiver=int(session.peer),
            session=session.identity,
            received=received,
            beyond=beyond,
            resuming=session.incarnation is not None,
            boot=boot,
        )

    def new_sending(self, peer: Peer) -> SendingHalf:
        """See `SessionContext`."""
        window = Window(self.limits.window_bytes, shallow=self.limits.shallow_windows)

        def acknowledged(message: Outgoing, now: float) -> None:
            if self.observer is not None and message.payload is not None:
                self.observer.acknowledged(
                    peer,
                    message.size,
                    message.sent_at,
                    now,
                    self.acknowledgement_stamp,
                    resent=message.transmissions > 1 or message.sent_at <= self.resumed_at,
                )

        if self._trace is None:
            return SendingHalf(window, acknowledged)
        return TracedSendingHalf(window, peer, self._trace, acknowledged)

    def contended(self, peer: Peer) -> bool:
        """See `SessionContext`."""
        if self.observer is None or not self.observer.may_contend:
            return False
        return any(
            other.sending.window.in_flight + other.sending.queue.bytes > _BUSY_BYTES
            for to, other in self._sessions.opened.items()
            if to not in (peer, SCHEDULER)
        )

    def release(self, connection: Connection) -> None:
        """See `SessionContext`."""
        self._sessions.release(connection)
