"""Blocks and their owners, a block's order of things, clocks, and the way of a message."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import Block, Clocks, Owners, chunks_of
from netstorm.kvstore.forms import Key
from netstorm.kvstore.paths.routes import check_route, forwarded_send, queue_order, reroute_message
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import KeyGrant, Push, Tick
from netstorm.pslite.machine import URGENT, Send


def key(elements: int = 10, chunk_size: int = 4, first_slot: int = 0) -> Key:
    made = Key(0, "k", (elements,), "float32")
    made.set_grant(
        KeyGrant(namespace=0, name="k", key=0, first_slot=first_slot, offset=0, chunk_size=chunk_size)
    )
    return made


def push(number: int = 0, chunk: int = 0) -> Push:
    return Push(
        path=(1, 0), hop=1, key=0, chunk=chunk, number=number, seen=0, clock=0, dtype="float32", rule="r"
    )


def values(*numbers: float) -> bytes:
    return np.array(numbers, np.float32).tobytes()


def test_owners_get_blocks_in_proportion_to_their_weights():
    owners, large = Owners((3, 0, 1)), key(elements=4000)
    owned = owners.count(large, whole=False)
    assert owned == {0: 750, 2: 250}
    assert owners.ranks == (0, 2)
    assert [owners.owner(large, block) for block in owners.blocks(large, whole=False)][:4].count(0) == 3


def test_a_whole_key_is_one_block_and_an_empty_one_none():
    owners = Owners((1, 1))
    assert owners.blocks(key(), whole=True) == [0]
    assert owners.blocks(key(), whole=False) == [0, 1, 2]
    assert list(chunks_of(key(), 0, whole=True)) == [0, 1, 2]
    for whole in (True, False):
        assert owners.blocks(key(elements=0), whole=whole) == []


def test_pushes_of_a_rank_are_queued_in_its_order_and_once_however_they_come():
    block = Block(key(), 0, range(1), ranks=2)
    assert block.add_part(1, push(1), values(1, 1, 1, 1))
    assert not block.queue
    assert block.add_part(1, push(0), values(0, 0, 0, 0))
    assert [gathering.push.number for _, gathering in block.queue] == [0, 1]
    assert not block.add_part(1, push(0), values(0, 0, 0, 0))
    assert not block.add_part(1, push(1), values(1, 1, 1, 1))
    assert len(block.queue) == 2


def test_a_whole_key_is_queued_when_its_last_part_is_here():
    block = Block(key(), 0, range(3), ranks=2)
    assert block.add_part(1, push(chunk=2), values(9, 10))
    assert not block.add_part(1, push(chunk=2), values(9, 10))
    assert block.add_part(1, push(chunk=0), values(1, 2, 3, 4))
    assert not block.queue
    assert block.add_part(1, push(chunk=1), values(5, 6, 7, 8))
    ((_, gathering),) = block.queue
    assert np.asarray(gathering.gradient).tolist() == list(range(1, 11))


def test_a_clock_has_come_when_all_that_was_pushed_in_it_has_been_applied():
    clocks = Clocks(2)
    assert not clocks.ended(0, 1, pushed=2)  # it overtook its pushes
    assert not clocks.applied(0, 0)
    assert not clocks.applied(0, 1)  # of the next one
    assert clocks.applied(0, 0)
    assert clocks.ended(0, 2, pushed=1)
    assert not clocks.ended(0, 1, pushed=2)  # said twice, around a link that failed
    assert (clocks.of(0), clocks.of(1)) == (2, 0)
    assert clocks.slowest([0, 1]) == 0
    assert clocks.slowest([]) is None


def test_clocks_that_end_in_another_order_come_in_their_own():
    clocks = Clocks(1)
    assert not clocks.ended(0, 2, pushed=0)
    assert clocks.ended(0, 1, pushed=0)
    assert clocks.of(0) == 2


def tick(path: tuple[int, ...], hop: int) -> Tick:
    return Tick(path=path, hop=hop, namespace=0, clock=1, pushed=0)


def test_a_message_is_passed_on_until_the_end_of_its_path():
    first = tick((3, 1, 2), 1)
    check_route(first, Peer(3), rank=1, size=4)
    send = forwarded_send(first, None, 0, queue_order(first, 0))
    assert send is not None
    assert (send.peer, send.message) == (2, msgspec.structs.replace(first, hop=2))
    assert forwarded_send(tick((3, 1, 2), 2), None, 0, URGENT) is None


@pytest.mark.parametrize(
    ("path", "hop"),
    [((), 0), ((1,), 0), ((3, 1), 0), ((3, 2), 1), ((2, 1), 1), ((3, 1, 1), 1), ((3, 1, 9), 1), ((3, 1), 2),
     ((3, 1), -1), ((0, 3, 1, 2, 0, 3), 2)],
)  # fmt: skip
def test_a_message_on_a_path_that_does_not_lead_here_is_refused(path, hop):
    with pytest.raises(ProtocolViolation, match="does not lead"):
        check_route(tick(path, hop), Peer(3), rank=1, size=4)


def test_a_message_goes_around_a_link_that_has_failed_and_on_to_its_end():
    send = Send(peer=Peer(2), message=tick((3, 1, 2, 0), 2))
    around = reroute_message(send, 1, (1, 0, 2))
    assert isinstance(around.message, Tick)
    assert (around.peer, around.message.path, around.message.hop) == (0, (3, 1, 0), 2)
    check_route(around.message, Peer(1), rank=0, size=4)
    own = reroute_message(Send(peer=Peer(2), message=tick((1, 2), 1)), 1, (1, 3, 2))
    assert isinstance(own.message, Tick)
    assert (own.peer, own.message.path, own.message.hop) == (3, (1, 3, 2), 1)
    back = reroute_message(Send(peer=Peer(2), message=tick((3, 1, 2), 2)), 1, (1, 3, 2))
    assert isinstance(back.message, Tick)
    check_route(back.message, Peer(1), rank=3, size=4)  # over the first again: that is no loop
