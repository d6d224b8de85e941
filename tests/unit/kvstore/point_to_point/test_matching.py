"""Which receive takes which message."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netstorm.kvstore.messages import Arrived, Matching
from netstorm.kvstore.operations import ANY_PEER, ReceiveOperation


def receive(peer, tag=0, channel="world", peers=()):
    return ReceiveOperation(
        peer=peer,
        channel=channel,
        tag=tag,
        destination=np.zeros(1, np.uint8),
        what="uint8 (1,)",
        done=lambda _: None,
        peers=peers,
    )


def arrived(sender, tag=0, channel="world", number=0):
    return Arrived(sender=sender, number=number, channel=channel, tag=tag, what="uint8 (1,)", nbytes=1)


def test_a_message_waits_for_a_receive_and_a_receive_for_a_message():
    matching = Matching()
    early, late = arrived(1), receive(2)
    assert matching.arrive(early) is None
    assert matching.post(late) is None
    assert matching.post(receive(1)) is early
    assert matching.arrive(arrived(2)) is late
    assert not [*matching.posted(), *matching.waiting()]


def test_sender_tag_and_channel_must_agree():
    matching = Matching()
    matching.post(receive(1, tag=2, channel="a"))
    for other in (arrived(2, 2, "a"), arrived(1, 3, "a"), arrived(1, 2, "b")):
        assert matching.arrive(other) is None
    assert matching.arrive(arrived(1, 2, "a")) is not None


def test_the_first_receive_takes_a_message_even_if_a_later_one_names_its_sender():
    matching = Matching()
    first, second = receive(ANY_PEER), receive(1)
    matching.post(first)
    matching.post(second)
    assert matching.arrive(arrived(1)) is first
    assert matching.arrive(arrived(1)) is second


def test_a_receive_takes_the_first_message_of_the_ranks_it_names():
    matching = Matching()
    messages = [arrived(3), arrived(2, number=0), arrived(1), arrived(2, number=1)]
    for message in messages:
        matching.arrive(message)
    assert matching.post(receive(ANY_PEER, peers=(1, 2))) is messages[1]
    assert matching.post(receive(2)) is messages[3]
    assert matching.post(receive(ANY_PEER)) is messages[0]


def test_a_message_is_not_kept_where_nothing_will_be_received():
    matching = Matching()
    assert matching.arrive(arrived(1), keep=False) is None
    assert matching.post(receive(1)) is None


def test_receives_are_withdrawn_one_by_one():
    matching = Matching()
    receives = [receive(1), receive(2), receive(1)]
    for one in receives:
        matching.post(one)
    assert matching.take_posted(lambda one: one.peer == 1) == [receives[0], receives[2]]
    assert list(matching.posted()) == [receives[1]]


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 2), st.integers(0, 1))))
def test_no_pair_is_left_that_would_match(events):
    matching = Matching()
    for is_receive, rank, tag in events:
        if is_receive:
            matching.post(receive(rank, tag))
        else:
            matching.arrive(arrived(abs(rank), tag))
    left = [
        (one, other)
        for one in matching.posted()
        for other in matching.waiting()
        if (one.channel, one.tag) == (other.channel, other.tag) and one.takes(other.sender)
    ]
    assert not left
