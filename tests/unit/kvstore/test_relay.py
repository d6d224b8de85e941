"""What a node makes of parts on auxiliary paths, and of what comes back."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.relay import check_path, confirmed, credit, onward
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Delivered, Part, Phase

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
        send = onward(part, b"1234", 77, (0, 0, 0))
        if send is None:
            break
        assert (send.payload, send.payload_crc) == (b"1234", 77)
        assert isinstance(send.message, Part)
        part, sender = send.message, rank
        assert int(send.peer) == part.path[part.hop]
    assert nodes == [0, 3, 1]
    send = confirmed(part)
    sender, back = rank, []
    while True:
        message = send.message
        assert isinstance(message, Delivered)
        rank = message.path[message.hop]
        assert int(send.peer) == rank
        assert send.back
        check_path(message, Peer(sender), rank, 4)
        back.append(rank)
        following = credit(message)
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
    message = confirmed(msgspec.structs.replace(PART, hop=3)).message
    assert isinstance(message, Delivered)
    message = msgspec.structs.replace(message, hop=hop)
    with pytest.raises(ProtocolViolation, match="path"):
        check_path(message, Peer(peer), rank, 4)
