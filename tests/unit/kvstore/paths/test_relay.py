"""How a node handles parts on auxiliary paths, and their confirmations."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.paths.routes import (
    check_path,
    delivery_confirmation,
    forwarded_send,
    relay_confirmation,
    reroute_part,
)
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Delivered, Part, Phase
from netstorm.pslite.machine import Send

PART = Part(
    key=3,
    round=4,
    chunk=5,
    phase=Phase.BROADCAST,
    version=1,
    tree=0,
    contributors=b"\1",
    dtype="float32",
    is_aux=True,
    path=(2, 0, 3, 1),
    hop=1,
)


def test_a_part_goes_along_its_path_and_its_confirmation_comes_back_the_same_way():
    part, sender, nodes = PART, 2, []
    while True:
        rank = part.path[part.hop]
        check_path(part, Peer(sender), rank, 4)
        nodes.append(rank)
        send = forwarded_send(part, b"1234", 77, (0, 0, 0))
        if send is None:
            break
        assert (send.payload, send.payload_crc) == (b"1234", 77)
        assert isinstance(send.message, Part)
        part, sender = send.message, rank
        assert int(send.peer) == part.path[part.hop]
    assert nodes == [0, 3, 1]
    send = delivery_confirmation(part)
    sender, back = rank, []
    while True:
        message = send.message
        assert isinstance(message, Delivered)
        rank = message.path[message.hop]
        assert int(send.peer) == rank
        assert send.back
        check_path(message, Peer(sender), rank, 4)
        back.append(rank)
        following = relay_confirmation(message)
        if following is None:
            break
        send, sender = following, rank
    assert back == [3, 0, 2]
    assert (message.key, message.round, message.chunk, message.phase) == (3, 4, 5, Phase.BROADCAST)


@pytest.mark.parametrize(
    ("changes", "peer", "rank"),
    [
        ({}, 2, 3),  # not the node that it is for
        ({}, 3, 0),  # not from the node before
        ({"hop": 0}, 1, 2),  # sent by nobody
        ({"hop": -1}, 3, 1),
        ({"hop": 4}, 1, 0),
        ({"hop": 9}, 1, 0),
        ({"path": (2, 0)}, 2, 0),  # no detour
        ({"path": ()}, 2, 0),
        ({"path": (2, 0, 2)}, 2, 0),  # a loop
        ({"path": (2, 0, 4)}, 2, 0),  # no such rank
        ({"path": (-2, 0, 1)}, -2, 0),
        ({"path": (2, 0, *range(10**4))}, 2, 0),
    ],
)
def test_a_path_that_makes_no_sense_is_refused(changes, peer, rank):
    with pytest.raises(ProtocolViolation, match="path"):
        check_path(msgspec.structs.replace(PART, **changes), Peer(peer), rank, 4)


@pytest.mark.parametrize(("hop", "peer", "rank"), [(2, 1, 0), (2, 0, 3), (3, 1, 1), (-1, 2, 1), (9, 0, 0)])
def test_a_confirmation_from_anywhere_else_is_refused(hop, peer, rank):
    message = delivery_confirmation(msgspec.structs.replace(PART, hop=3)).message
    assert isinstance(message, Delivered)
    message = msgspec.structs.replace(message, hop=hop)
    with pytest.raises(ProtocolViolation, match="path"):
        check_path(message, Peer(peer), rank, 4)


def plain(peer):
    part = msgspec.structs.replace(PART, is_aux=False, path=(), hop=0)
    return Send(peer=Peer(peer), message=part, payload=b"1234", order=(1,))


def walk(send, rank, size):
    """Follow a part from `rank` to its end; return the nodes that get it, and whom the end takes it for."""
    nodes: list[int] = []
    while True:
        part = send.message
        if not part.is_aux:
            return [*nodes, int(send.peer)], rank
        sender, rank = rank, int(send.peer)
        check_path(part, Peer(sender), rank, size)
        nodes.append(rank)
        further = forwarded_send(part, send.payload, 0, send.order)
        if further is None:
            return nodes, part.path[0]
        send = further


@pytest.mark.parametrize(
    ("send", "rank", "way", "nodes", "sender"),
    [
        (plain(1), 0, (0, 2, 1), [2, 1], 0),
        (plain(1), 0, (0, 3, 2, 1), [3, 2, 1], 0),
        # on a path 2-0-3-1, at 0, whose link to 3 has failed
        (forwarded_send(PART, None, 0, ()), 0, (0, 1, 3), [1], 2),  # the end is on the way
        (forwarded_send(PART, None, 0, ()), 0, (0, 2, 3), [2, 3, 1], 2),  # back over the node where it began
        (forwarded_send(PART, None, 0, ()), 0, (0, 4, 3), [4, 3, 1], 2),
        # its own path 0-3-1 begins with the link that failed
        (
            Send(peer=Peer(3), message=msgspec.structs.replace(PART, path=(0, 3, 1), hop=1)),
            0,
            (0, 1, 3),
            [1],
            0,
        ),
    ],
)
def test_around_a_failed_link_a_part_comes_to_its_end_as_if_its_first_node_had_sent_it(
    send, rank, way, nodes, sender
):
    around_it = reroute_part(send, rank, way)
    assert walk(around_it, rank, 5) == (nodes, sender)
    assert around_it.payload == send.payload


def test_two_failed_links_one_after_the_other():
    first = reroute_part(plain(1), 0, (0, 2, 1))
    assert isinstance(first.message, Part)
    at_2 = forwarded_send(first.message, b"1234", 7, (1,))
    assert at_2 is not None
    second = reroute_part(at_2, 2, (2, 0, 3, 1))
    assert walk(second, 2, 4) == ([0, 3, 1], 0)
