from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.frames import Checksum, checksum
from netstorm.pslite.machine import URGENT
from netstorm.pslite.sending import OutgoingQueue, SendQueueItem

orders = st.lists(st.just(URGENT) | st.tuples(st.integers(-3, 3), st.integers(0, 3), st.integers(0, 3)))


@given(orders)
def test_messages_come_out_by_order_and_those_of_equal_order_as_they_came(orders):
    queue = OutgoingQueue()
    for number, order in enumerate(orders):
        queue.push(SendQueueItem(b"%d" % number, order=order))
    taken = [int(queue.pop().body) for _ in orders]
    assert taken == sorted(range(len(orders)), key=lambda number: (orders[number], number))


def test_a_message_that_comes_later_overtakes_if_it_is_more_urgent():
    queue = OutgoingQueue()
    queue.push(SendQueueItem(b"bulk", order=(0, 0, 0)))
    queue.push(SendQueueItem(b"control"))
    queue.push(SendQueueItem(b"higher priority", order=(-1, 9, 9)))
    assert [queue.pop().body for _ in range(3)] == [b"control", b"higher priority", b"bulk"]


@given(st.lists(st.integers(0, 1000)))
def test_the_queue_knows_its_bytes(sizes):
    queue = OutgoingQueue()
    for size in sizes:
        queue.push(SendQueueItem(b"header", payload=bytes(size)))
    assert queue.bytes == sum(sizes) + 6 * len(sizes)
    for _ in sizes:
        first = queue.first()
        assert queue.pop() is first
    assert queue.bytes == 0
    assert queue.first() is None


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
    queue = OutgoingQueue()
    for number in range(6):
        queue.push(SendQueueItem(b"%d" % number, order=(0, 0, -number), tag=None if number == 3 else number))
    taken = queue.take_out(lambda tag: tag in (1, 4))
    assert [message.body for message in taken] == [b"4", b"1"]
    assert queue.bytes == len(queue) == 4
    assert [queue.pop().body for _ in range(4)] == [b"5", b"3", b"2", b"0"]
    assert queue.take_out(lambda _: True) == []
