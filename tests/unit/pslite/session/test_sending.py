"""What is sent again, and what is not."""

from __future__ import annotations

import pytest

from netstorm.errors import ProtocolViolation
from netstorm.pslite.machine import URGENT
from netstorm.pslite.sending import SendingHalf, SendQueueItem, Window

BULK = (0, 0, 0)


def sender(*, messages=0, window=10**6, order=BULK):
    half = SendingHalf(Window(window))
    for number in range(messages):
        half.submit(SendQueueItem(b"%04d" % number, order=order))
    return half


def transmit_all(half):
    sent = []
    while (message := half.next(0.0)) is not None:
        sent.append(message.sequence)
    return sent


def test_messages_are_numbered_as_they_leave_not_as_they_come():
    half = sender()
    half.submit(SendQueueItem(b"later", order=(0, 0, 2)))
    half.submit(SendQueueItem(b"sooner", order=(0, 0, 1)))
    assert [(message.sequence, message.body) for message in iter(lambda: half.next(0.0), None)] == [
        (1, b"sooner"),
        (2, b"later"),
    ]


def test_the_window_holds_bulk_back_and_lets_urgent_messages_pass():
    half = sender(messages=10, window=12)
    assert transmit_all(half) == [1, 2, 3]
    half.submit(SendQueueItem(b"urgent", order=URGENT))
    assert transmit_all(half) == [4]
    half.acknowledge(2, (), 0.0)
    half.acknowledge(4, (), 0.0)
    assert transmit_all(half) == [5, 6, 7]


def test_what_is_acknowledged_is_forgotten():
    half = sender(messages=5)
    transmit_all(half)
    assert half.acknowledge(2, (4,), 0.0)
    assert sorted(half.unacknowledged) == [3, 5]
    half.acknowledge(5, (), 0.0)
    assert not half.has_work()


def test_after_a_new_connection_exactly_what_the_other_side_has_not_goes_again_in_order():
    half = sender(messages=9)
    transmit_all(half)
    half.disconnected()
    half.acknowledge(3, (5, 8), 0.0)
    assert transmit_all(half) == [4, 6, 7, 9]


def test_without_any_news_nothing_is_sent_again():
    half = sender(messages=3)
    transmit_all(half)
    for _ in range(5):
        assert not half.acknowledge(0, (), 100.0)
    assert half.next(1000.0) is None


def test_a_message_is_lost_once_a_later_one_has_arrived_and_goes_again_once():
    half = sender(messages=5)
    transmit_all(half)
    half.acknowledge(1, (3,), 0.0)
    assert transmit_all(half) == [2]
    half.acknowledge(1, (3, 4), 0.0)  # sent before 2 was sent again: says nothing about that
    assert transmit_all(half) == []
    half.acknowledge(1, (3, 4, 5), 0.0)
    assert transmit_all(half) == []
    half.acknowledge(5, (), 0.0)
    assert not half.has_work()


def test_the_answer_to_a_query_shows_that_what_was_sent_before_it_is_lost():
    half = sender(messages=3)
    transmit_all(half)
    mark = half.mark()
    half.submit(SendQueueItem(b"after the query", order=BULK))
    assert transmit_all(half) == [4]
    half.acknowledge(1, (), 0.0, mark=mark)
    assert transmit_all(half) == [2, 3]


def test_a_message_that_was_refused_goes_again_and_nothing_else():
    half = sender(messages=3)
    transmit_all(half)
    assert half.resend(2)
    assert not half.resend(2)
    assert not half.resend(99)
    assert transmit_all(half) == [2]


def test_a_message_that_waits_to_go_again_and_is_acknowledged_after_all_stays():
    half = sender(messages=3)
    transmit_all(half)
    half.resend(2)
    half.acknowledge(3, (), 0.0)
    assert transmit_all(half) == []
    assert half.window.in_flight == 0


def test_what_goes_again_counts_in_the_window_and_goes_before_new_bulk():
    half = sender(messages=6, window=12)
    assert transmit_all(half) == [1, 2, 3]
    half.disconnected()
    half.acknowledge(0, (), 0.0)
    assert half.window.in_flight == 0
    half.submit(SendQueueItem(b"more urgent bulk", order=(-5, 0, 0)))
    assert transmit_all(half) == [1, 2, 3]
    half.acknowledge(3, (), 0.0)
    assert half.next(0.0).body == b"more urgent bulk"


@pytest.mark.parametrize(("received", "beyond"), [(4, ()), (0, (4,)), (0, (0,)), (2**63, ()), (0, (-1,))])
def test_an_acknowledgement_of_what_was_never_sent_is_a_violation_and_changes_nothing(received, beyond):
    half = sender(messages=3)
    transmit_all(half)
    with pytest.raises(ProtocolViolation, match="3 messages were sent"):
        half.acknowledge(received, beyond, 0.0)
    assert len(half.unacknowledged) == 3


def test_an_old_acknowledgement_does_no_harm():
    half = sender(messages=3)
    transmit_all(half)
    half.acknowledge(3, (), 0.0)
    assert not half.acknowledge(1, (), 0.0)
    assert not half.acknowledge(-5, (), 0.0)


def test_what_is_taken_back_is_not_sent_and_what_was_sent_no_longer_uses_its_owners_memory():
    half = sender(window=8)
    memory = [bytearray(b"%04d" % number) for number in range(4)]
    for number, payload in enumerate(memory):
        half.submit(SendQueueItem(b"", payload, order=(0, 0, number), tag=number))
    assert transmit_all(half) == [1, 2]
    taken = half.take_back(lambda tag: tag in (0, 3))
    assert [message.tag for message in taken] == [3]
    for payload in memory:
        payload[:] = b"gone"
    assert [bytes(half.unacknowledged[sequence].payload) for sequence in (1, 2)] == [b"0000", b"gone"]
    half.acknowledge(2, (), 1.0)
    assert transmit_all(half) == [3]
    assert half.unacknowledged[3].tag == 2


# ----------------------------------------------------------------------------- where there is no room for one


def test_what_has_no_room_is_sent_again_when_it_is_asked_for_and_others_pass_it():
    half = sender(messages=5, window=12)
    assert transmit_all(half) == [1, 2, 3]
    half.keep(2)
    assert transmit_all(half) == [4], "it is in flight no more"
    half.acknowledge(1, (3, 4), 0.0)
    assert transmit_all(half) == [5], "it is not lost"
    half.acknowledge(1, (3, 4, 5), 0.0, mark=half.mark())
    assert transmit_all(half) == []
    assert half.has_work()
    assert half.resend(2)
    assert not half.resend(2)
    assert transmit_all(half) == [2]
    half.acknowledge(5, (), 0.0)
    assert not half.has_work()
    assert half.window.in_flight == 0


def test_what_has_no_room_goes_again_over_a_new_connection():
    half = sender(messages=2)
    transmit_all(half)
    half.keep(1)
    half.disconnected()
    half.acknowledge(0, (2,), 0.0)
    assert transmit_all(half) == [1]


def test_once_a_window_of_messages_has_no_room_others_are_tried_one_at_a_time():
    half = sender(messages=9, window=8)
    assert transmit_all(half) == [1, 2]
    half.keep(1)
    half.keep(2)
    assert transmit_all(half) == [3]
    half.acknowledge(0, (3,), 0.0)
    assert transmit_all(half) == [4]
    assert half.resend(1)
    assert half.resend(2)
    half.acknowledge(0, (3, 4), 0.0)
    assert transmit_all(half) == [1, 2]
