"""A node on an auxiliary path: what it does with what it relays, and with what has come to its end there.

A path is in the part (the paper's PATH, arXiv 2404.11352 §VII-B), and a node on it goes by that alone,
whatever policy it believes in: nodes whose policies differ would send a chunk to and fro between them. The
part itself is as if path[0] had sent it directly. Its arrival is confirmed back along the path to path[0],
which has only so many parts on a path that are not confirmed: so a relay with a slow exit holds no more than
that.
"""

from __future__ import annotations

import msgspec

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Delivered, Part
from netstorm.pslite.machine import Order, Send

__all__ = ["check_path", "confirmed", "credit", "onward"]


def check_path(message: Part | Delivered, peer: Peer, rank: int, size: int) -> None:
    """Look whether a message on an auxiliary path can be here, of `size` ranks at `rank`, from `peer`.

    Raises:
        ProtocolViolation: it can not.
    """
    path, hop = message.path, message.hop
    back = isinstance(message, Delivered)
    if (
        not 3 <= len(path) <= size
        or len(set(path)) < len(path)
        or not all(0 <= one < size for one in path)
        or not (0 if back else 1) <= hop < len(path) - back
        or path[hop] != rank
        or path[hop + 1 if back else hop - 1] != int(peer)
    ):
        raise ProtocolViolation(
            f"{type(message).__name__} from rank {peer} at hop {hop} of path {list(path[:16])}, which does "
            f"not lead from there to rank {rank}"
        )


def onward(part: Part, payload: Buffer | None, payload_crc: int, order: Order) -> Send | None:
    """Return what a relay sends to the next node of a part's path; None at the path's end."""
    hop = part.hop + 1
    if hop == len(part.path):
        return None
    return Send(
        peer=Peer(part.path[hop]),
        message=msgspec.structs.replace(part, hop=hop),
        payload=payload,
        order=order,
        payload_crc=None if payload is None else payload_crc,
    )


def confirmed(part: Part) -> Send:
    """Return what the end of a path says of a part that is there."""
    hop = part.hop - 1
    return Send(
        peer=Peer(part.path[hop]),
        message=Delivered(
            path=part.path, hop=hop, key=part.key, round=part.round, chunk=part.chunk, phase=part.phase
        ),
        back=True,
    )


def credit(message: Delivered) -> Send | None:
    """Return what a relay passes back of a confirmation; None where it has come to the path's begin."""
    if message.hop == 0:
        return None
    hop = message.hop - 1
    return Send(peer=Peer(message.path[hop]), message=msgspec.structs.replace(message, hop=hop), back=True)
