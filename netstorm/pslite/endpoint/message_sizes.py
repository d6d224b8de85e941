"""How large a message may be before it is decoded, by its class and by who has sent it. Pure.

Decoding takes 0.4 s and 40 MB for a megabyte of the worst values, so nobody gets more than he needs. Payloads
have their own bound (`MAXMSGSIZE`), and are not decoded.
"""

from __future__ import annotations

from typing import Final

from netstorm.errors import FrameError
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer, tag_in

__all__ = ["SMALL", "check_size"]

SMALL: Final = 2**18
"""Bytes that every message may have: measurements of the links of a thousand nodes."""

_MEDIUM: Final = 2**20
"""Of those that name all keys, or all that has been received, or describe a call of thousands of ranks."""

_LARGE: Final = 4 * 2**20
"""Of those to the scheduler that describe all keys, or what a node has of them."""

_BOUNDS: Final = {
    kind.__struct_config__.tag: bound
    for bound, kinds in (
        (
            _MEDIUM,
            (
                m.Ack,
                m.CallTimedOut,
                m.Failed,
                m.Heartbeat,
                m.Hello,
                m.StateOffered,
                m.StateReceived,
                m.Welcome,
            ),
        ),
        (
            _LARGE,
            (m.CallsWaiting, m.Finished, m.RegisterKeys, m.Resume, m.TopologyRequest, m.ViewReport),
        ),
    )
    for kind in kinds
}
"""By tag; of all others it is `SMALL`."""


def check_size(frame: Buffer, sender: Peer | None, own_rank: int) -> None:
    """Check the size of a message, without its payload, that is larger than `SMALL`.

    Args:
        frame: frame 0.
        sender: whose session it has come over; None: there is no session.
        own_rank: of this process; -1: the scheduler, or a node that has no rank yet.

    Raises:
        FrameError: no correct process of that kind sends as much.
    """
    if sender == SCHEDULER:
        return  # `open_frames` has a bound for all
    size, tag = len(frame), tag_in(frame)
    bound = _BOUNDS.get(tag, SMALL)
    if sender is None:
        bound = _MEDIUM if tag == m.Hello.__struct_config__.tag else SMALL
    elif own_rank >= 0:
        bound = min(bound, _MEDIUM)
    if size > bound:
        place = "a connection without a session" if sender is None else "a session with a node"
        raise FrameError(
            f"{size} bytes before the payload, on {place}: more than the {bound} that a message with tag "
            f"{tag} has there"
        )
