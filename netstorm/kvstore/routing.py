"""Source-routed messages: they go the way that is written in them, whatever policy a node on it believes in.

The data of asynchronous training goes between any two ranks, and in an overlay network only linked ones may
talk. How much a node has to pass on is bounded by what the ends have outstanding: a push and a pull of each
key. Unlike what is on an auxiliary path it needs no credit.
"""

from __future__ import annotations

import msgspec

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Push, Routed, Value
from netstorm.pslite.machine import URGENT, Order, Send

__all__ = ["check_route", "order_of", "passed_on"]


def check_route(message: Routed, peer: Peer, rank: int, size: int) -> None:
    """Look whether a source-routed message can be here, of `size` ranks at `rank`, from `peer`.

    Raises:
        ProtocolViolation: it can not.
    """
    path, hop = message.path, message.hop
    if (
        not 2 <= len(path) <= size
        or len(set(path)) < len(path)
        or not all(0 <= one < size for one in path)
        or not 1 <= hop < len(path)
        or path[hop] != rank
        or path[hop - 1] != int(peer)
    ):
        raise ProtocolViolation(
            f"{type(message).__name__} from rank {peer} at hop {hop} of path {list(path[:16])}, which does "
            f"not lead from there to rank {rank}"
        )


def order_of(message: Routed, offset: int) -> Order:
    """Return a message's place in links' queues; `offset`: of its chunk among the job's bytes."""
    if isinstance(message, (Push, Value)):
        return (-message.priority, message.number, offset)
    return URGENT


def passed_on(message: Routed, payload: Buffer | None, payload_crc: int, offset: int) -> Send | None:
    """Return what a node sends on to the next one of a message's path; None at the path's end."""
    hop = message.hop + 1
    if hop == len(message.path):
        return None
    return Send(
        peer=Peer(message.path[hop]),
        message=msgspec.structs.replace(message, hop=hop),
        payload=payload,
        order=order_of(message, offset),
        payload_crc=None if payload is None else payload_crc,
    )
