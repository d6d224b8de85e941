"""Source-routed messages: they go the way that is written in them, whatever policy a node on it believes in.

The data of asynchronous training goes between any two ranks, and in an overlay network only linked ones may
talk. How much a node has to pass on is bounded by what the ends have outstanding: a push and a pull of each
key. Unlike what is on an auxiliary path it needs no credit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import get_args

import msgspec

from netstorm.kvstore.paths.relay import astray, onward, without_loops
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Push, Routed, States, Value
from netstorm.pslite.machine import URGENT, Order, Send

__all__ = ["around_link", "check_route", "not_delivered", "order_of", "passed_on"]


def check_route(message: Routed, peer: Peer, rank: int, size: int) -> None:
    """Look whether a source-routed message can be here, of `size` ranks at `rank`, from `peer`.

    Raises:
        ProtocolViolation: it can not.
    """
    path, hop = message.path, message.hop
    if (
        not 2 <= len(path) <= size + 1
        or len(set(path[1:])) < len(path) - 1  # on a way around a link that has failed the first may be twice
        or not all(0 <= one < size for one in path)
        or not 1 <= hop < len(path)
        or path[hop] != rank
        or path[hop - 1] != int(peer)
    ):
        raise astray(message, peer, rank)


def order_of(message: Routed, offset: int) -> Order:
    """Return a message's place in links' queues; `offset`: of its chunk among the job's bytes."""
    if isinstance(message, (Push, Value, States)):
        return (-message.priority, message.number, offset)
    return URGENT


def passed_on(message: Routed, payload: Buffer | None, payload_crc: int, offset: int) -> Send | None:
    """Return what a node sends on to the next one of a message's path; None at the path's end."""
    return onward(message, payload, payload_crc, order_of(message, offset))


def around_link(send: Send, rank: int, way: tuple[int, ...]) -> Send:
    """Return a message as `rank` sends it along `way`, around a link that has failed, and on to its end."""
    message = send.message
    assert isinstance(message, get_args(Routed))
    walk = without_loops((*way, *message.path[message.hop + 1 :]))
    before = message.path[:1] if message.path[0] != rank else ()
    routed = msgspec.structs.replace(message, path=(*before, *walk), hop=len(before) + 1)
    return dataclasses.replace(send, message=routed, peer=Peer(walk[1]))


def not_delivered(returned: Iterable[Send]) -> Iterator[Send]:
    """Yield what is to be sent again of what a link that has failed gives back.

    What had arrived after all is known by its numbers there. Values are copied: they may be the user's own
    memory, which is his again as soon as the push is known to have been applied.
    """
    for send in returned:
        if isinstance(send.message, get_args(Routed)):
            copy = None if send.payload is None else bytes(memoryview(send.payload))
            yield dataclasses.replace(send, payload=copy)
