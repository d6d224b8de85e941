"""A node on an auxiliary path: what it does with what it relays, and with what has come to its end there.

A path is in the part (the paper's PATH, arXiv 2404.11352 §VII-B), and a node on it goes by that alone,
whatever policy it believes in: nodes whose policies differ would send a chunk to and fro between them. The
part itself is as if path[0] had sent it directly. Its arrival is confirmed back along the path to path[0],
which has only so many parts on a path that are not confirmed: so a relay with a slow exit holds no more than
that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import msgspec

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Delivered, Part, Phase, Routed
from netstorm.pslite.machine import Order, Send

__all__ = [
    "around",
    "astray",
    "check_path",
    "confirmed",
    "credit",
    "direct",
    "onward",
    "parts_again",
    "without_loops",
]


def check_path(message: Part | Delivered, peer: Peer, rank: int, size: int) -> None:
    """Look whether a message on an auxiliary path can be here, of `size` ranks at `rank`, from `peer`.

    Raises:
        ProtocolViolation: it can not.
    """
    path, hop = message.path, message.hop
    back = isinstance(message, Delivered)
    again = isinstance(message, Part) and message.around  # then path[0] may be on it a second time
    if (
        not 3 <= len(path) <= size + again
        or len(set(path)) < len(path) - again
        or len(set(path[1:])) < len(path) - 1
        or not all(0 <= one < size for one in path)
        or not (0 if back else 1) <= hop < len(path) - back
        or path[hop] != rank
        or path[hop + 1 if back else hop - 1] != int(peer)
    ):
        raise astray(message, peer, rank)


def astray(message: Part | Delivered | Routed, peer: Peer, rank: int) -> ProtocolViolation:
    """Return the error that a message from `peer` is not on its path at `rank`."""
    return ProtocolViolation(
        f"{type(message).__name__} from rank {peer} at hop {message.hop} of path {list(message.path[:16])}, "
        f"which does not lead from there to rank {rank}"
    )


def onward(message: Part | Routed, payload: Buffer | None, payload_crc: int, order: Order) -> Send | None:
    """Return what a relay sends to the next node of a message's path; None at the path's end."""
    hop = message.hop + 1
    if hop == len(message.path):
        return None
    return Send(
        peer=Peer(message.path[hop]),
        message=msgspec.structs.replace(message, hop=hop),
        payload=payload,
        order=order,
        payload_crc=None if payload is None else payload_crc,
    )


def around(send: Send, rank: int, way: tuple[int, ...]) -> Send:
    """Return a part's message as `rank` sends it along `way` to the node that it was for, and on to where it
    was going.

    To its end it is as if path[0] had sent it, as on any auxiliary path.
    """
    part = send.message
    assert isinstance(part, Part)
    further = part.path[part.hop + 1 :] if part.is_aux else ()
    walk = without_loops((*way, *further))
    before = part.path[:1] if part.is_aux and part.path[0] != rank else ()
    if len(walk) == 2 and not before:
        part = msgspec.structs.replace(part, is_aux=False, path=(), hop=0, around=False)
    else:
        path = (*before, *walk)
        part = msgspec.structs.replace(part, is_aux=True, path=path, hop=len(before) + 1, around=True)
    return dataclasses.replace(send, message=part, peer=Peer(walk[1]))


def direct(send: Send) -> Send:
    """Return a part's message as its sender sends it without the detour that it was to take."""
    part = send.message
    assert isinstance(part, Part)
    plain = msgspec.structs.replace(part, is_aux=False, path=(), hop=0)
    return dataclasses.replace(send, message=plain, peer=Peer(part.path[-1]))


def without_loops(walk: tuple[int, ...]) -> tuple[int, ...]:
    """Return a walk without the parts of it that come back to where they began."""
    found: list[int] = []
    for rank in walk:
        if rank in found:
            del found[found.index(rank) :]
        found.append(rank)
    return tuple(found)


def confirmed(part: Part) -> Send:
    """Return what the end of a path says of a part that is there."""
    hop = part.hop - 1
    return Send(
        peer=Peer(part.path[hop]),
        message=Delivered(
            path=part.path,
            hop=hop,
            key=part.key,
            round=part.round,
            chunk=part.chunk,
            phase=part.phase,
            version=part.version,
        ),
        back=True,
    )


def credit(message: Delivered) -> Send | None:
    """Return what a relay passes back of a confirmation; None where it has come to the path's begin."""
    if message.hop == 0:
        return None
    hop = message.hop - 1
    return Send(peer=Peer(message.path[hop]), message=msgspec.structs.replace(message, hop=hop), back=True)


def parts_again(returned: Iterable[Send], rank: int, is_known: Callable[[Part], bool]) -> Iterator[Send]:
    """Yield the parts that `rank` sends again, of all that a link that has failed gives back.

    A sum that `is_known` to have arrived, or that nobody wants any more, is not. Others are copied: they may
    be the user's own memory, which is his again with the result; that comes, if the sum had arrived after
    all, while it is under way.
    """
    for send in returned:
        part = send.message
        if not isinstance(part, Part):
            continue
        own = part.phase is Phase.REDUCE and not (part.is_aux and part.path[0] != rank)
        if own and is_known(part):
            continue
        if own and send.payload is not None:
            yield dataclasses.replace(send, payload=bytes(memoryview(send.payload)))
        else:
            yield send
