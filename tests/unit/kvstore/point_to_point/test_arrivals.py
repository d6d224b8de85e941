"""The messages of one sender are delivered once, in order, and not more of them than was agreed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.messages import MOST_WAITING, PIECE_BYTES, Arrivals, Arrived


def message(number, nbytes=10, *, is_offer=False, channel="world", what="uint8 (10,)"):
    return Arrived(
        sender=3, number=number, channel=channel, tag=0, what=what, nbytes=nbytes, is_offer=is_offer
    )


@given(st.permutations(range(6)), st.lists(st.integers(0, 5)))
def test_every_message_is_delivered_once_and_in_order(order, again):
    arrivals = Arrivals(3)
    delivered = []
    for number in [*order, *again]:
        arrivals.add(message(number))
        delivered += [one.number for one in arrivals.take_ready()]
    assert delivered == list(range(6))


def test_a_message_that_has_come_before_is_not_added():
    arrivals = Arrivals(3)
    assert arrivals.add(message(1))
    assert not arrivals.add(message(1)), "it waits for message 0"
    assert arrivals.add(message(0))
    list(arrivals.take_ready())
    assert not arrivals.add(message(0))


def test_small_messages_wait_up_to_a_bound_and_matched_ones_make_room():
    arrivals = Arrivals(3)
    first = message(0, PIECE_BYTES)
    for one in (first, *(message(number, PIECE_BYTES) for number in range(1, 4))):
        arrivals.add(one)
    with pytest.raises(
        ProtocolViolation, match="message 4 from rank 3 comes while 4 with 1048576 bytes wait"
    ):
        arrivals.add(message(4, 0))
    arrivals.add(message(4, PIECE_BYTES * 100, is_offer=True))
    arrivals.matched(first)
    arrivals.add(message(5, PIECE_BYTES))


def test_offers_wait_up_to_a_bound():
    arrivals = Arrivals(3)
    for number in range(MOST_WAITING):
        arrivals.add(message(number, is_offer=True))
    with pytest.raises(ProtocolViolation, match="65536"):
        arrivals.add(message(MOST_WAITING, is_offer=True))


@pytest.mark.parametrize(
    "wrong",
    [
        message(-1),
        message(0, PIECE_BYTES + 1),
        message(0, -1, is_offer=True),
        message(0, channel="x" * 257),
        message(0, what=""),
        message(0, what="x" * 257),
    ],
)
def test_a_message_that_no_correct_node_sends_is_refused(wrong):
    with pytest.raises(ProtocolViolation, match="from rank 3"):
        Arrivals(3).add(wrong)


def test_they_have_ended_when_all_that_was_counted_has_been_delivered():
    arrivals = Arrivals(3)
    assert not arrivals.has_ended
    arrivals.add(message(1))
    with pytest.raises(ProtocolViolation, match="more than the 1 messages"):
        arrivals.end_after(1)
    arrivals.end_after(2)
    assert not arrivals.has_ended
    arrivals.add(message(0))
    list(arrivals.take_ready())
    ended: bool = arrivals.has_ended
    assert ended
    with pytest.raises(ProtocolViolation, match="no legal number"):
        arrivals.add(message(2))
