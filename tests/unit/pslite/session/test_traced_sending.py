"""A sender whose deliveries are traced sends what any other sends."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from netstorm.observe.trace import Trace
from netstorm.protocol.frames import Peer
from netstorm.pslite.sending import SendingHalf, SendQueueItem, TracedSendingHalf, Window

BULK = (0, 0, 0)


class Kept(Trace):
    """A trace whose deliveries can be looked at."""

    def __init__(self, now):
        super().__init__(now)
        self.delivered = []

    def add_delivery(self, delivery):
        self.delivered.append(delivery)


def test_a_message_is_noted_once_it_is_acknowledged_with_all_its_times():
    now = [1.0]
    trace = Kept(lambda: now[0])
    half = TracedSendingHalf(Window(10), Peer(4), trace)
    half.submit(SendQueueItem(b"12345678", order=BULK))
    half.submit(SendQueueItem(b"87654321", order=BULK))
    assert half.next(2.0) is not None
    assert half.next(2.0) is None
    assert trace.delivered == []
    half.acknowledge(1, (), 3.0)
    [one] = trace.delivered
    assert (one.peer, one.body, one.size, one.transmissions) == (4, b"12345678", 8, 1)
    assert (one.queued_at, one.sent_at, one.acknowledged_at) == (1.0, 2.0, 3.0)
    assert (one.in_flight, one.window, one.waiting) == (8, 10, 1)


def test_what_is_lost_is_noted_once_with_its_last_transmission():
    trace = Kept(lambda: 0.0)
    half = TracedSendingHalf(Window(100), Peer(4), trace)
    half.submit(SendQueueItem(b"1", order=BULK))
    half.next(1.0)
    half.disconnected()
    half.next(5.0)
    half.acknowledge(1, (), 6.0)
    assert [(one.sent_at, one.transmissions) for one in trace.delivered] == [(5.0, 2)]


@given(st.integers(0, 2**32))
def test_a_traced_sender_does_what_a_plain_one_does(seed):
    steps = random.Random(seed)
    trace = Kept(lambda: 0.0)
    halves = [SendingHalf(Window(40)), TracedSendingHalf(Window(40), Peer(1), trace)]
    sent: list[list[int]] = [[], []]
    for step in range(60):
        what, number = steps.random(), steps.randrange(1, 9)
        for half, numbers in zip(halves, sent, strict=True):
            if what < 0.4:
                half.submit(SendQueueItem(bytes(number), order=(0, 0, number)))
            elif what < 0.7:
                message = half.next(float(step))
                numbers.extend([] if message is None else [message.sequence])
            elif what < 0.95 and half.unacknowledged:
                half.acknowledge(min(half.unacknowledged), (), float(step))
            elif what >= 0.95:
                half.disconnected()
    assert sent[0] == sent[1]
    assert trace.recorded == 0
    assert len(trace.delivered) == len(set(sent[1])) - len(halves[1].unacknowledged)
