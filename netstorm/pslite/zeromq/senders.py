"""Which process a message is from that the ROUTER has received: known by the key that its connection has.

A connection's first message is looked at only if the connection's name proves that its opener holds the job's
key (`security.process_proof`). Other connections are cut.
"""

from __future__ import annotations

from typing import Final

import zmq

from netstorm import clock
from netstorm.observe.log import Drops
from netstorm.pslite.security.curve import key_of_text
from netstorm.pslite.security.process_proof import ProcessProof
from netstorm.pslite.zeromq.identities import is_identity
from netstorm.pslite.zeromq.tcp_info import descriptor_of, shut_down

__all__ = ["Senders"]

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
