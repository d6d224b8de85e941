"""Encrypts a van's sockets, and answers ZeroMQ's questions about the keys of those that connect.

ZeroMQ asks over ZAP (its RFC 27), a socket inside the process. The van's own thread answers, from `poll`.
Without an answer nobody is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import zmq

from netstorm import clock
from netstorm.observe.log import Drops
from netstorm.pslite.security.admission import Admission
from netstorm.pslite.security.credentials import Credentials
from netstorm.pslite.security.curve import KEY_BYTES

__all__ = ["MESSAGE_OVERHEAD", "Authenticator"]

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

    def answer(self) -> None:
        """Answer all questions that have come."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            user = self._decide(request)
            status, text = (b"200", b"") if user else (b"400", b"not admitted")
            number = request[1] if len(request) > 1 else b""
            self.socket.send_multipart([b"1.0", number, status, text, user.encode(), b""], zmq.NOBLOCK)

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
