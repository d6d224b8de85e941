"""Messages that a link did not deliver, as the machine that sent them knows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from netstorm.protocol.frames import Peer, decode_body
from netstorm.pslite.machine import Send
from netstorm.pslite.session.queue import Outgoing

__all__ = ["as_sends"]


def as_sends(peer: Peer, messages: Iterable[Outgoing]) -> list[Send]:
    """Return messages for `peer` as the machine sent them."""
    return [
        Send(
            peer=peer,
            message=decode_body(message.body),
            payload=message.payload,
            order=message.order,
            tag=message.tag,
        )
        for message in messages
    ]
