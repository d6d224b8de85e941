"""What is sent again, and what is not."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.observe.trace import Trace
from netstorm.protocol.frames import Checksum, Peer, checksum
from netstorm.pslite import sending
from netstorm.pslite.machine import URGENT
from netstorm.pslite.sending import SendingHalf, SendQueueItem, TracedSendingHalf, Window

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


orders = st.lists(st.just(URGENT) | st.tuples(st.integers(-3, 3), st.integers(0, 3), st.integers(0, 3)))


def next_body(half):
    message = half.next(0.0)
    assert message is not None
    return message.body


@given(orders)
def test_messages_leave_by_order_numbered_as_they_leave_and_those_of_equal_order_as_they_came(orders):
    half = SendingHalf(Window())
    for number, order in enumerate(orders):
        half.submit(SendQueueItem(b"%03d" % number, bytes(number), order=order))
    assert half.queued_bytes == sum(3 + number for number in range(len(orders)))
    taken = list(iter(lambda: half.next(0.0), None))
    expected = sorted(range(len(orders)), key=lambda number: (orders[number], number))
    assert [int(message.body) for message in taken] == expected
    assert [message.sequence for message in taken] == list(range(1, len(orders) + 1))
    assert half.queued_bytes == 0


def test_the_window_holds_bulk_back_and_lets_urgent_messages_pass():
    half = sender(messages=10, window=12)
    assert transmit_all(half) == [1, 2, 3]
    half.submit(SendQueueItem(b"urgent", order=URGENT))
    assert transmit_all(half) == [4]
    half.acknowledge(2, (), 0.0)
    half.acknowledge(4, (), 0.0)
    assert transmit_all(half) == [5, 6, 7]


def test_what_is_acknowledged_is_forgotten_and_an_old_acknowledgement_does_no_harm():
    half = sender(messages=5)
    transmit_all(half)
    assert half.acknowledge(2, (4,), 0.0)
    assert sorted(half.unacknowledged) == [3, 5]
    half.acknowledge(5, (), 0.0)
    assert not half.has_work()
    assert not half.acknowledge(1, (), 0.0)
    assert not half.acknowledge(-5, (), 0.0)


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
    mark = half.mark(0)
    half.submit(SendQueueItem(b"after the query", order=BULK))
    assert transmit_all(half) == [4]
    half.acknowledge(1, (), 0.0, mark=mark)
    assert transmit_all(half) == [2, 3]


def test_each_stream_shows_its_own_losses_alone():
    half = SendingHalf(Window(10**6))
    half.window.widen(3)
    for number in range(6):
        half.submit(SendQueueItem(b"%d" % number, bytes(100), order=BULK))
    sent = [half.next(0.0) for _ in range(6)]
    assert [message.stream for message in sent if message] == [0, 1, 2, 0, 1, 2], (
        "that with the least in flight"
    )
    half.acknowledge(0, (2, 3), 0.0)  # 1 was sent before both, over another stream
    assert transmit_all(half) == []
    half.submit(SendQueueItem(b"no payload", order=BULK))
    half.acknowledge(0, (2, 3, 4), 0.0)  # 4 has passed 1 on their stream
    assert transmit_all(half) == [1, 7]
    assert half.unacknowledged[7].stream == 0
    half.acknowledge(1, (2, 3, 4), 0.0, mark=half.mark(turn=4))  # the answer to a query over stream 1
    assert transmit_all(half) == [5]
    half.disconnected()
    assert half.window.streams == [0]
    half.acknowledge(5, (7,), 0.0)
    assert transmit_all(half) == [6]
    assert half.unacknowledged[6].stream == 0


def test_a_message_that_was_refused_goes_again_and_nothing_else_unless_it_is_acknowledged_after_all():
    half = sender(messages=3)
    transmit_all(half)
    assert half.resend(2)
    assert not half.resend(2)
    assert not half.resend(99)
    assert transmit_all(half) == [2]
    assert half.resend(2)
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


def test_urgent_messages_wait_for_no_window_not_even_behind_what_is_lost():
    half = sender(messages=2, window=8)
    assert transmit_all(half) == [1, 2]
    half.submit(SendQueueItem(b"help", order=URGENT))
    half.submit(SendQueueItem(b"more", order=URGENT))
    assert transmit_all(half) == [3, 4]
    half.acknowledge(0, (4,), 0.0)
    assert transmit_all(half) == [1, 2, 3], "the lost urgent one goes beyond the window"
    assert half.resend(2)
    assert transmit_all(half) == []
    half.submit(SendQueueItem(b"soon", order=URGENT))
    assert transmit_all(half) == [5]


# ----------------------------------------------------------------------------- where there is no room for one


def test_what_has_no_room_is_sent_again_when_it_is_asked_for_and_others_pass_it():
    half = sender(messages=5, window=12)
    assert transmit_all(half) == [1, 2, 3]
    half.keep(2)
    assert transmit_all(half) == [4], "it is in flight no more"
    half.acknowledge(1, (3, 4), 0.0)
    assert transmit_all(half) == [5], "it is not lost"
    half.acknowledge(1, (3, 4, 5), 0.0, mark=half.mark(0))
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


def test_messages_without_room_hold_up_no_urgent_ones_and_are_passed_by_so_many(monkeypatch):
    monkeypatch.setattr(sending, "_SPAN", 3)
    half = sender(messages=9, window=12)
    assert transmit_all(half) == [1, 2, 3]
    half.keep(1)
    half.keep(1)
    assert half.window.in_flight == 8, "it is in flight no more, once"
    half.acknowledge(0, (2, 3), 0.0)
    assert transmit_all(half) == [4], "the other side keeps the numbers of few"
    half.submit(SendQueueItem(b"soon", order=URGENT))
    assert transmit_all(half) == [5]
    half.acknowledge(5, (), 0.0)  # it had room after all
    assert transmit_all(half) == [6, 7, 8]
    assert half.window.in_flight == 12


def test_over_a_new_connection_nothing_is_without_room():
    half = sender(messages=4, window=8)
    assert transmit_all(half) == [1, 2]
    half.keep(1)
    half.keep(2)
    half.disconnected()
    assert transmit_all(half) == [1, 2]
    half.acknowledge(2, (), 0.0)
    assert transmit_all(half) == [3, 4], "not one at a time"


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


# ----------------------------------------------------------------------------------------------------


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


# -------------------------------------------------------------------------- how many bytes may be in flight


MIB = 1024 * 1024


def message(size):
    outgoing = SendQueueItem(bytes(size))
    outgoing.transmissions = 1
    return outgoing


class Link:
    """A link of a given rate and propagation delay, with an unlimited queue before it: the oracle."""

    def __init__(self, window, rate, rtt_s, size):
        self.window, self.rate, self.rtt_s, self.size = window, rate, rtt_s, size
        self.now = self.free_at = 0.0
        self.in_flight = []

    def run(self, messages):
        while messages or self.in_flight:
            while messages and self.window.allows(self.size, 0.0):
                outgoing = message(self.size)
                self.window.sent(outgoing, self.now)
                self.free_at = max(self.free_at, self.now) + self.size / self.rate
                self.in_flight.append((self.free_at + self.rtt_s, outgoing))
                messages -= 1
            self.now, outgoing = self.in_flight.pop(0)
            self.window.acknowledged(outgoing, self.now)


def test_bytes_come_free_when_they_are_acknowledged_and_an_empty_link_may_always_send_one_message():
    window = Window(fixed_bytes=1000)
    first, large = message(600), message(5000)
    window.sent(first, 0.0)
    assert window.allows(400, 0.0)
    assert not window.allows(401, 0.0)
    window.acknowledged(first, 0.1)
    assert window.in_flight == 0
    assert window.allows(5000, 0.0)
    window.sent(large, 0.2)
    assert not window.allows(1, 0.0)
    window.restart()
    assert window.allows(1000, 0.0)
    assert (window.in_flight, window.min_rtt_s) == (0, math.inf)


@pytest.mark.parametrize("shallow", [False, True])
@pytest.mark.parametrize(("rate", "rtt_s"), [(2.5e6, 0.15), (125e6, 0.1), (19e6, 0.03)])
def test_the_window_grows_until_it_fills_the_link_and_not_without_bound(rate, rtt_s, shallow):
    window = Window(shallow=shallow)
    link = Link(window, rate, rtt_s, 256 * 1024)
    link.run(500)
    product = rate * rtt_s
    assert window.size >= 2 * product
    # The smallest RTT seen has a message's own transmission in it, and that of those before it at the start.
    assert window.size <= max(4 * MIB, 4 * (product + 4 * 256 * 1024))
    assert window.rate == pytest.approx(rate, rel=0.1)
    after_a_while = window.size
    link.run(500)  # a queue stands at the link
    assert window.size <= after_a_while * 1.1


def test_the_window_is_bounded_however_long_and_fat_the_link_seems_and_one_that_is_set_stays():
    window, fixed = Window(), Window(fixed_bytes=1000)
    Link(window, 10e9, 1.0, MIB).run(500)
    assert window.size == 64 * MIB
    Link(fixed, rate=1e8, rtt_s=0.1, size=333).run(20)
    assert fixed.size == 1000


def test_four_messages_fit_however_large_they_are():
    window = Window()
    window.sent(message(3 * MIB), 0.0)
    assert window.size >= 12 * MIB


def test_a_message_that_was_sent_twice_measures_nothing():
    window = Window()
    twice = message(1000)
    twice.transmissions = 2
    window.sent(twice, 0.0)
    window.acknowledged(twice, 5.0)
    assert window.rate == 0
    assert window.smooth_rtt_s == 0


def test_a_pause_of_the_sender_is_not_the_links_slowness():
    window = Window()
    link = Link(window, 12.5e6, 0.05, 256 * 1024)
    link.run(100)
    rate = window.rate
    link.now += 100.0
    link.run(4)
    assert window.rate == rate


def test_a_rate_that_is_not_reached_any_more_is_forgotten():
    window = Window()
    link = Link(window, 100e6, 0.05, 256 * 1024)
    link.run(200)
    link.rate = 5e6
    link.run(700)
    assert window.rate == pytest.approx(5e6, rel=0.2)


def test_very_small_messages_are_limited_by_their_number():
    window = Window()
    number = 0
    while window.allows(1, 0.0):
        window.sent(message(1), 0.0)
        number += 1
    assert number == 4096


@pytest.mark.parametrize(("messages", "seen"), [(1, 0.0), (3, 5e6), (4, 5e6), (40, 5e6)])
def test_a_few_messages_at_a_time_show_what_a_link_carries_while_it_is_busy_and_one_does_not(messages, seen):
    window = Window()
    link = Link(window, rate=5e6, rtt_s=0.2, size=MIB // 4)
    for _ in range(3):  # with pauses, which are not the link's
        link.run(messages)
        link.now += 1.0
    assert window.busy_rate == pytest.approx(seen, rel=0.02)


def test_the_rate_of_a_busy_link_follows_it():
    window = Window()
    link = Link(window, rate=5e6, rtt_s=0.02, size=MIB // 4)
    link.run(50)
    link.rate = 1e6
    link.run(60)
    assert window.busy_rate == pytest.approx(1e6, rel=0.1)


def test_a_shallow_window_fills_its_link_with_little_and_is_two_messages_once_that_has_slowed_down():
    window = Window(shallow=True)
    link = Link(window, rate=2.5e6, rtt_s=0.01, size=32 * 1024)
    link.run(200)
    assert window.busy_rate == pytest.approx(2.5e6, rel=0.02)
    assert 2 * link.size <= window.size <= 8 * link.size
    link.rate = 0.25e6
    link.run(12)
    assert window.size == 2 * link.size
    assert Window(fixed_bytes=1000, shallow=True).size == 1000


def test_a_shallow_window_does_not_take_a_sender_with_little_to_send_for_a_slow_link():
    window = Window(shallow=True)
    link = Link(window, 125e6, 0.1, 256 * 1024)
    link.run(500)
    rate = window.rate
    link.run(1)
    assert window.rate == rate == pytest.approx(125e6, rel=0.1)


# ------------------------------------------ a sender whose deliveries are traced sends what any other sends


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
