"""Blocks and their owners, a block's order of things, clocks, and the states of blocks on their way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import (
    Block,
    BlockCopies,
    BlockState,
    Clocks,
    Owners,
    block_extent,
    chunks_of,
    pieces_of,
)
from netstorm.kvstore.asynchronous.server import Handover
from netstorm.kvstore.forms import Key
from netstorm.protocol.messages import CopiesHeld, HeldCopy, KeyGrant, Push


def key(elements: int = 10, chunk_size: int = 4, first_slot: int = 0, number: int = 0) -> Key:
    made = Key(0, "k", (elements,), "float32")
    made.set_grant(
        KeyGrant(namespace=0, name="k", key=number, first_slot=first_slot, offset=0, chunk_size=chunk_size)
    )
    return made


def push(number: int = 0, chunk: int = 0) -> Push:
    return Push(
        path=(1, 0), hop=1, key=0, chunk=chunk, number=number, seen=0, clock=0, dtype="float32", rule="r"
    )


def values(*numbers: float) -> bytes:
    return np.array(numbers, np.float32).tobytes()


def test_a_block_is_a_chunk_or_the_whole_key():
    assert block_extent(key(), 2, whole=False) == slice(8, 10)
    assert block_extent(key(), 0, whole=True) == slice(0, 10)


def test_owners_get_blocks_in_proportion_to_their_weights():
    owners, large = Owners((3, 0, 1)), key(elements=4000)
    owned = owners.count(large, whole=False)
    assert owned == {0: 750, 2: 250}
    assert owners.ranks == (0, 2)
    assert [owners.owner(large, block) for block in owners.blocks(large, whole=False)][:4].count(0) == 3


def test_small_keys_at_the_begin_of_a_job_are_spread_over_owners_and_others_by_their_bytes():
    owners = Owners((1, 1, 1), eligible=(0, 1, 2))
    small = [key(elements=3, number=number) for number in range(6)]
    assert [owners.owner(one, 0) for one in small] == [0, 1, 2, 0, 1, 2]
    assert [owners.replica(one, 0) for one in small] == [1, 2, 0, 1, 2, 0]
    assert owners.owner(key(elements=3, first_slot=7, number=3), 0) == 7 % 3
    assert [owners.owner(key(number=1), block) for block in range(3)] == [0, 1, 2]


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


# ------------------------------------------------------- states of blocks on their way, and at who keeps them

NBYTES = 3 * 2**20 // 2


def state(version: int = 5, states: bytes = b"momentum") -> BlockState:
    return BlockState(
        version=version, applied=[3, 2], begins=[0, -1], values=bytes([version]) * NBYTES, states=states
    )


def test_a_state_arrives_whole_in_whatever_order_its_pieces_come():
    pieces = list(pieces_of(state(), 7, 2, view=4))
    copies = BlockCopies(2)
    assert len(pieces) == 2
    assert copies.add(1, *pieces[1], NBYTES) is None
    found = copies.add(1, *pieces[0], NBYTES)
    assert found is not None
    assert (bytes(found.values), found.states) == (state().values, b"momentum")
    assert (found.version, found.applied, found.begins) == (5, [3, 2], [0, -1])


def test_a_later_state_takes_the_place_of_one_that_is_still_coming():
    copies = BlockCopies(2)
    early, later = list(pieces_of(state(5), 0, 0, view=1)), list(pieces_of(state(6), 0, 0, view=1))
    assert copies.add(1, *early[0], NBYTES) is None
    assert copies.add(1, *later[0], NBYTES) is None
    assert copies.add(1, *early[1], NBYTES) is None
    found = copies.add(1, *later[1], NBYTES)
    assert found is not None
    assert found.version == 6


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"values": 1}, "1 bytes of values: the block has 1572864"),
        ({"version": 0}, "version 0 of block 0 of key 0"),
        ({"version": 2**64 - 1}, "version 18446744073709551615 of block 0"),
        ({"piece": 2}, "piece 2 of 2"),
        ({"piece": -1}, "piece -1 of 2"),
        ({"pieces": 1 << 40}, "of 1099511627776: expected at most 27"),
        ({"applied": (1,)}, "counts of 1 and 2 ranks: the job has 2"),
        ({"applied": (-1, 0)}, r"pushes \(-1, 0\) of each rank"),
        ({"applied": (3, 3)}, r"pushes \(3, 3\) of each rank: expected counts, and no more than the version"),
        ({"begins": (-2, 0)}, r"counted from \(-2, 0\)"),
        ({"begins": (0, 2**60)}, "counted from"),
    ],
    ids=str,
)
def test_states_are_of_the_block_and_no_larger_than_one_can_be(wrong, text):
    message, payload = next(pieces_of(state(), 0, 0, view=1))
    with pytest.raises(ProtocolViolation, match=text):
        BlockCopies(2).add(1, msgspec.structs.replace(message, **wrong), payload, NBYTES)


@pytest.mark.parametrize("wrong", [{"pieces": 3}, {"applied": (2, 2)}, {"begins": (0, 0)}], ids=str)
def test_pieces_of_two_states_are_not_put_together(wrong):
    copies, (first, second) = BlockCopies(2), list(pieces_of(state(), 0, 0, view=1))
    assert copies.add(1, *first, NBYTES) is None
    with pytest.raises(ProtocolViolation, match="as with the first that came"):
        copies.add(1, msgspec.structs.replace(second[0], **wrong), second[1], NBYTES)


def test_a_piece_is_no_larger_than_those_that_a_node_sends():
    message, payload = next(pieces_of(state(), 0, 0, view=1))
    with pytest.raises(ProtocolViolation, match=r"piece 0 of version 5 .* has 1048577 bytes"):
        BlockCopies(2).add(1, message, bytes(payload) + b"x", NBYTES)


def held(*copies: HeldCopy) -> CopiesHeld:
    return CopiesHeld(path=(), hop=0, view=1, copies=copies)


def test_the_newest_state_is_known_once_all_have_said_what_they_have():
    handover = Handover({1, 2})
    handover.add(1, held(HeldCopy(key=0, block=3, version=7)))
    assert handover.waits_for == {2}
    handover.add(2, held(HeldCopy(key=0, block=3, version=9), HeldCopy(key=1, block=0, version=1)))
    assert handover.is_complete
    assert handover.newest((0, 3)) == (9, 2)
    assert handover.newest((0, 4)) == (0, -1)
    with pytest.raises(ProtocolViolation, match="rank 2 says twice in one view"):
        handover.add(2, held(HeldCopy(key=9, block=0, version=1)))


def test_others_hear_of_the_first_state_and_of_the_first_that_has_more_than_initial_values():
    handover = Handover()
    news = [handover.is_news((0, 3), version) for version in (1, 1, 2, 3, 4)]
    assert news == [True, False, True, False, False]
    assert handover.is_news((0, 4), 7)


def test_a_rank_that_sends_no_state_of_a_block_has_none_unless_it_was_a_copy_of_long_ago():
    handover, block = Handover({1, 2}), Block(key(), 0, range(1), ranks=3)
    for rank, version in ((1, 7), (2, 9)):
        handover.add(rank, held(HeldCopy(key=block.place[0], block=0, version=version)))
    handover.refuse(block, 2, "four bytes: expected eight", was_kept=True)
    assert handover.newest(block.place) == (9, 2)
    said = handover.refuse(block, 2, "four bytes: expected eight", was_kept=False)
    assert said.endswith("rank 2 has sent of block 0 of key 'k' are four bytes: expected eight")
    assert handover.newest(block.place) == (7, 1)
    assert said in handover.lost_text(block.key, 0, "3 were confirmed", 0, departed=())


def test_a_lost_owners_blocks_are_its_replicas_and_a_returned_one_has_its_own_again():
    owners, large = Owners((1, 1, 1, 1)), key(elements=400)
    blocks = owners.blocks(large, whole=False)
    before = {block: (owners.owner(large, block), owners.replica(large, block)) for block in blocks}
    owners.change((0, 1, 3))
    for block, (owner, replica) in before.items():
        assert owners.owner(large, block) == (replica if owner == 2 else owner)
        assert owners.replica(large, block) not in (2, owners.owner(large, block))
    owners.change((0, 1, 2, 3))
    assert {block: (owners.owner(large, block), owners.replica(large, block)) for block in blocks} == before
    owners.change((2,))
    assert owners.replica(large, 0) is None


def test_a_push_that_is_being_applied_counts_at_a_change_of_owners():
    block = Block(key(), 0, range(1), ranks=2)
    block.add_part(1, push(0), values(0, 0, 0, 0))
    block.queue.popleft()
    block.being_applied = 1
    block.interrupt()
    assert (block.version, block.version_soon) == (0, 1)
    assert not block.add_part(1, push(0), values(0, 0, 0, 0))
    block.forget(1)  # its process has left; what is being applied is in the value all the same
    assert block.version_soon == 1
    assert block.add_part(1, push(0), values(0, 0, 0, 0))  # of its next process


def test_owners_agree_on_clocks_in_whatever_order_they_compare_notes():
    heard = [(4, -1, 2), (3, -1, 5), (4, 7, -1)]
    found = []
    for first in range(3):
        clocks = Clocks(3)
        clocks.forget(1)
        for ended in (*heard[first:], *heard[:first]):
            clocks.merge(ended)
        found.append(clocks.ended_by_rank)
    assert found == 3 * [(4, 7, 5)]


def test_nobody_waits_for_a_newcomer_before_its_first_clock_has_ended():
    clocks = Clocks(2)
    clocks.forget(1)
    assert clocks.reached(0, 3)
    assert clocks.slowest([0, 1]) == 3
    assert clocks.reached(1, 2)
    assert not clocks.reached(1, 2)
    assert clocks.slowest([0, 1]) == 2
