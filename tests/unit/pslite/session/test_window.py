"""How many bytes may be in flight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.pslite.sending import SendQueueItem, Window

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
            while messages and self.window.allows(self.size):
                outgoing = message(self.size)
                self.window.sent(outgoing, self.now)
                self.free_at = max(self.free_at, self.now) + self.size / self.rate
                self.in_flight.append((self.free_at + self.rtt_s, outgoing))
                messages -= 1
            self.now, outgoing = self.in_flight.pop(0)
            self.window.acknowledged(outgoing, self.now)


def test_an_empty_link_may_always_send_one_message_and_no_second_that_does_not_fit():
    window = Window(fixed_bytes=1000)
    assert window.allows(5000)
    window.sent(message(5000), 0.0)
    assert not window.allows(1)


def test_bytes_come_free_when_they_are_acknowledged():
    window = Window(fixed_bytes=1000)
    first = message(600)
    window.sent(first, 0.0)
    assert window.allows(400)
    assert not window.allows(401)
    window.acknowledged(first, 0.1)
    assert window.allows(1000)
    assert window.in_flight == 0


@given(st.integers(1, 10**9))
def test_a_window_that_is_set_stays_as_it_is(size):
    window = Window(fixed_bytes=size)
    Link(window, rate=1e8, rtt_s=0.1, size=max(1, size // 3)).run(20)
    assert window.size == size


@pytest.mark.parametrize("shallow", [False, True])
@pytest.mark.parametrize(("rate", "rtt_s"), [(12.5e6, 0.15), (2.5e6, 0.15), (125e6, 0.1), (19e6, 0.03)])
def test_the_window_grows_until_it_fills_the_link_and_not_without_bound(rate, rtt_s, shallow):
    window = Window(shallow=shallow)
    link = Link(window, rate, rtt_s, 256 * 1024)
    link.run(2000)
    product = rate * rtt_s
    assert window.size >= 2 * product
    # The smallest RTT seen has a message's own transmission in it, and that of those before it at the start.
    assert window.size <= max(4 * MIB, 4 * (product + 4 * 256 * 1024))
    assert window.rate == pytest.approx(rate, rel=0.1)


def test_a_queue_that_stands_at_the_link_does_not_enlarge_the_window_further():
    window = Window()
    link = Link(window, 12.5e6, 0.05, 256 * 1024)
    link.run(200)
    after_a_while = window.size
    link.run(5000)
    assert window.size <= after_a_while * 1.1


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
    link.run(1000)
    link.rate = 5e6
    link.run(3000)
    assert window.rate == pytest.approx(5e6, rel=0.2)


def test_very_small_messages_are_limited_by_their_number():
    window = Window()
    number = 0
    while window.allows(1):
        window.sent(message(1), 0.0)
        number += 1
    assert number == 4096


def test_a_new_connection_begins_empty_and_measures_the_round_trip_anew():
    window = Window(fixed_bytes=10)
    window.sent(message(10), 0.0)
    window.restart()
    assert window.allows(10)
    assert window.in_flight == 0


def test_the_window_is_bounded_however_long_and_fat_the_link_seems():
    window = Window()
    Link(window, 10e9, 1.0, 1024 * 1024).run(3000)
    assert window.size == 64 * MIB


@pytest.mark.parametrize("messages", [3, 4, 10, 40])
def test_a_few_messages_at_a_time_show_what_a_link_carries_while_it_is_busy(messages):
    window = Window()
    link = Link(window, rate=5e6, rtt_s=0.2, size=MIB // 4)
    for _ in range(3):  # with pauses, which are not the link's
        link.run(messages)
        link.now += 1.0
    assert window.busy_rate == pytest.approx(5e6, rel=0.02)


def test_one_message_at_a_time_tells_nothing_of_a_busy_link():
    window = Window()
    link = Link(window, rate=5e6, rtt_s=0.2, size=MIB // 4)
    for _ in range(10):
        link.run(1)
    assert window.busy_rate == 0.0


def test_the_rate_of_a_busy_link_follows_it():
    window = Window()
    link = Link(window, rate=5e6, rtt_s=0.02, size=MIB // 4)
    link.run(50)
    link.rate = 1e6
    link.run(60)
    assert window.busy_rate == pytest.approx(1e6, rel=0.1)


def test_a_shallow_window_fills_its_link_with_little_more_than_two_messages():
    window = Window(shallow=True)
    link = Link(window, rate=2.5e6, rtt_s=0.01, size=32 * 1024)
    link.run(200)
    assert window.busy_rate == pytest.approx(2.5e6, rel=0.02)
    assert 2 * link.size <= window.size <= 8 * link.size


def test_a_shallow_window_of_a_link_that_has_slowed_down_is_two_messages_at_once():
    window = Window(shallow=True)
    link = Link(window, rate=2.5e6, rtt_s=0.01, size=32 * 1024)
    link.run(200)
    link.rate = 0.25e6
    link.run(12)
    assert window.size == 2 * link.size
    assert Window(fixed_bytes=1000, shallow=True).size == 1000
