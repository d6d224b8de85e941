"""A node on an auxiliary path: forwarding of parts, and confirmation of their arrival. Pure.

A part carries its path (the paper's PATH, arXiv 2404.11352 §VII-B), and a node on it follows that alone,
whatever policy it has: nodes with different policies could send a chunk to and fro between them. At its end
the part counts as sent by path[0]. The end confirms its arrival back along the path, and path[0] limits the
parts on a path that are not confirmed. That bounds what a relay with a slow exit has to store.
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
    "check_path",
    "delivery_confirmation",
    "forwarded_send",
    "parts_to_resend",
    "relay_confirmation",
    "reroute_part",
    "without_detour",
    "without_loops",
    "wrong_path_error",
]


def check_path(message: Part | Delivered, peer: Peer, rank: int, size: int) -> None:
    """Check that the path of a message leads from `peer` to `rank`, in a job of `size` ranks.

    Raises:
        ProtocolViolation: it does not.
    """
    path, hop = message.path, message.hop
    back = isinstance(message, Delivered)
    again = isinstance(message, Part) and message.around  # then path[0] may occur a second time
    if (
        not 3 <= len(path) <= size + again
        or len(set(path)) < len(path) - again
        or len(set(path[1:])) < len(path) - 1
        or not all(0 <= hop_rank < size for hop_rank in path)
        or not (0 if back else 1) <= hop < len(path) - back
        or path[hop] != rank
        or path[hop + 1 if back else hop - 1] != int(peer)
    ):
        raise wrong_path_error(message, peer, rank)


def wrong_path_error(message: Part | Delivered | Routed, peer: Peer, rank: int) -> ProtocolViolation:
    """Return the error for a message from `peer` whose path does not lead to `rank`."""
    return ProtocolViolation(
        f"{type(message).__name__} from rank {peer} at hop {message.hop} of path {list(message.path[:16])}, "
        f"which does not lead from there to rank {rank}"
    )


def forwarded_send(
    message: Part | Routed, payload: Buffer | None, payload_crc: int | None, order: Order
) -> Send | None:
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


def reroute_part(send: Send, rank: int, detour: tuple[int, ...]) -> Send:
    """Return a part as `rank` sends it along `detour` to its next node, and on along the rest of its path.

    At its end it counts as sent by path[0], as on any auxiliary path.
    """
    part = send.message
    assert isinstance(part, Part)
    further = part.path[part.hop + 1 :] if part.is_aux else ()
    walk = without_loops((*detour, *further))
    before = part.path[:1] if part.is_aux and part.path[0] != rank else ()
    if len(walk) == 2 and not before:
        part = msgspec.structs.replace(part, is_aux=False, path=(), hop=0, around=False)
    else:
        path = (*before, *walk)
        part = msgspec.structs.replace(part, is_aux=True, path=path, hop=len(before) + 1, around=True)
    return dataclasses.replace(send, message=part, peer=Peer(walk[1]))


def without_detour(send: Send) -> Send:
    """Return a part as its sender sends it directly, without its auxiliary path."""
    part = send.message
    assert isinstance(part, Part)
    plain = msgspec.structs.replace(part, is_aux=False, path=(), hop=0)
    return dataclasses.replace(send, message=plain, peer=Peer(part.path[-1]))


def without_loops(walk: tuple[int, ...]) -> tuple[int, ...]:
    """Return a walk without its loops."""
    found: list[int] = []
    for rank in walk:
        if rank in found:
            del found[found.index(rank) :]
        found.append(rank)
    return tuple(found)


def delivery_confirmation(part: Part) -> Send:
    """Return the confirmation that the end of a path sends back for a part."""
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


def relay_confirmation(message: Delivered) -> Send | None:
    """Return a confirmation as a relay sends it further back; None at the begin of the path."""
    if message.hop == 0:
        return None
    hop = message.hop - 1
    return Send(peer=Peer(message.path[hop]), message=msgspec.structs.replace(message, hop=hop), back=True)


def parts_to_resend(
    returned: Iterable[Send], rank: int, is_obsolete: Callable[[Part], bool]
) -> Iterator[Send]:
    """Yield the parts that `rank` sends again, of all that a failed link returns.

    A sum that `is_obsolete` is dropped. Other sums of this rank are copied: they may be the user's memory,
    which the user may change once the result is there. If the sum had arrived after all, the result may come
    while the sum is sent again.
    """
    for send in returned:
        part = send.message
        if not isinstance(part, Part):
            continue
        own = part.phase is Phase.REDUCE and not (part.is_aux and part.path[0] != rank)
        if own and is_obsolete(part):
            continue
        if own and send.payload is not None:
            yield dataclasses.replace(send, payload=bytes(memoryview(send.payload)))
        else:
            yield send
