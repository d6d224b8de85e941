"""Source-routed messages: they follow the path that they carry, whatever policy a node on it has. Pure.

The data of asynchronous training goes between any two ranks, but only ranks with a link can talk directly.
What a node has to forward is bounded by what the ends have outstanding: a push and a pull of each key. So,
unlike on auxiliary paths, arrival need not be confirmed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import get_args

import msgspec

from netstorm.kvstore.paths.relay import forwarded_send, without_loops, wrong_path_error
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Push, Routed, States, Value
from netstorm.pslite.machine import URGENT, Order, Send

__all__ = ["check_route", "forwarded", "messages_to_resend", "queue_order", "reroute_message"]


def check_route(message: Routed, peer: Peer, rank: int, size: int) -> None:
    """Check that the path of a message leads from `peer` to `rank`, in a job of `size` ranks.

    Raises:
        ProtocolViolation: it does not.
    """
    path, hop = message.path, message.hop
    if (
        not 2 <= len(path) <= size + 1
        or len(set(path[1:])) < len(path) - 1  # around a failed link path[0] may occur twice
        or not all(0 <= hop_rank < size for hop_rank in path)
        or not 1 <= hop < len(path)
        or path[hop] != rank
        or path[hop - 1] != int(peer)
    ):
        raise wrong_path_error(message, peer, rank)


def queue_order(message: Routed, offset: int) -> Order:
    """Return a message's place in links' queues. `offset` is that of its chunk among the job's bytes."""
    if isinstance(message, (Push, Value, States)):
        return (-message.priority, message.number, offset)
    return URGENT


def forwarded(message: Routed, payload: Buffer | None, payload_crc: int | None, offset: int) -> Send | None:
    """Return a message as it goes to the next node of its path; None at the path's end."""
    return forwarded_send(message, payload, payload_crc, queue_order(message, offset))


def reroute_message(send: Send, rank: int, detour: tuple[int, ...]) -> Send:
    """Return a message as `rank` sends it along `detour`, around a failed link, and on to its end."""
    message = send.message
    assert isinstance(message, get_args(Routed))
    walk = without_loops((*detour, *message.path[message.hop + 1 :]))
    before = message.path[:1] if message.path[0] != rank else ()
    routed = msgspec.structs.replace(message, path=(*before, *walk), hop=len(before) + 1)
    return dataclasses.replace(send, message=routed, peer=Peer(walk[1]))


def messages_to_resend(returned: Iterable[Send]) -> Iterator[Send]:
    """Yield what to send again, of all that a failed link returns.

    The receiver drops what had arrived after all, by its numbers. Values are copied: they may be the user's
    memory, which the user may change once the push has been applied.
    """
    for send in returned:
        if isinstance(send.message, get_args(Routed)):
            copy = None if send.payload is None else bytes(memoryview(send.payload))
            yield dataclasses.replace(send, payload=copy)
