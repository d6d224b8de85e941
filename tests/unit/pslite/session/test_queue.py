from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.frames import Checksum, checksum
from netstorm.pslite.machine import URGENT
from netstorm.pslite.sending import SendingHalf, SendQueueItem, Window

orders = st.lists(st.just(URGENT) | st.tuples(st.integers(-3, 3), st.integers(0, 3), st.integers(0, 3)))


def next_body(half):
    message = half.next(0.0)
    assert message is not None
    return message.body


@given(orders)
def test_messages_come_out_by_order_and_those_of_equal_order_as_they_came(orders):
    half = SendingHalf(Window())
    for number, order in enumerate(orders):
        half.submit(SendQueueItem(b"%d" % number, order=order))
    taken = [int(next_body(half)) for _ in orders]
    assert taken == sorted(range(len(orders)), key=lambda number: (orders[number], number))


def test_a_message_that_comes_later_overtakes_if_it_is_more_urgent():
    half = SendingHalf(Window())
    half.submit(SendQueueItem(b"bulk", order=(0, 0, 0)))
    half.submit(SendQueueItem(b"control"))
    half.submit(SendQueueItem(b"higher priority", order=(-1, 9, 9)))
    assert [next_body(half) for _ in range(3)] == [b"control", b"higher priority", b"bulk"]


@given(st.lists(st.integers(0, 1000)))
def test_the_queue_knows_its_bytes(sizes):
    half = SendingHalf(Window())
    for size in sizes:
        half.submit(SendQueueItem(b"header", payload=bytes(size)))
    assert half.queued_bytes == sum(sizes) + 6 * len(sizes)
    for _ in sizes:
        assert half.next(0.0) is not None
    assert half.queued_bytes == 0
    assert half.next(0.0) is None


def test_a_message_counts_its_payload_in_bytes_whatever_its_type():
    assert SendQueueItem(b"12", payload=np.zeros((3, 4), np.float64)).size == 2 + 96


def test_the_checksum_is_computed_when_it_is_needed_unless_it_is_known():
    payload = np.arange(10, dtype=np.float32)
    assert SendQueueItem(b"").crc() is None
    assert SendQueueItem(b"", payload=payload).crc() == checksum(payload.tobytes())
    assert SendQueueItem(b"", payload=payload, payload_crc=7).crc() == 7


def test_a_copy_of_the_payload_has_the_checksum_of_what_was_copied():
    payload = bytearray(b"123456789")
    message = SendQueueItem(b"", payload=payload, payload_crc=Checksum(payload))
    message.copy_payload()
    payload[:] = bytes(9)
    assert (message.payload, message.crc()) == (b"123456789", 0xE3069283)


def test_what_is_taken_out_leaves_the_others_in_order():
    half = SendingHalf(Window())
    for number in range(6):
        half.submit(SendQueueItem(b"%d" % number, order=(0, 0, -number), tag=None if number == 3 else number))
    taken = half.take_back(lambda tag: tag in (1, 4))
    assert [message.body for message in taken] == [b"4", b"1"]
    assert half.queued_bytes == len(half.queue) == 4
    assert [next_body(half) for _ in range(4)] == [b"5", b"3", b"2", b"0"]
    assert half.take_back(lambda _: True) == []
