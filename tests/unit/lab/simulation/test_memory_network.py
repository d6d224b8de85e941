"""The van in memory, and virtual time."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.lab.simulation.memory_network import FixedDelay, MemoryNetwork, MemoryVan, Timeline
from netstorm.pslite.van import Broken, Connection, Received

# ------------------------------------------------------------------------------------------------ memory van
# The in-memory van beyond what every van must do: virtual time, and the ways in which its network fails.


A, B = Connection(1), Connection(2)


class Pair:
    """A van `there` that listens, and a van `here` with a connection to it."""

    def __init__(self, delay_s=0.01, jitter_s=0.0, **network):
        self.timeline = Timeline()
        model = FixedDelay(self.timeline, delay_s=delay_s, jitter_s=jitter_s)
        self.network = MemoryNetwork(self.timeline, model, **network)
        self.here, self.there = MemoryVan(self.network, "here"), MemoryVan(self.network, "there")
        self.port = self.there.bind("*", 0)
        self.here.open(A, "there", self.port)

    def headers(self, van, seconds):
        self.pass_time(seconds)
        return [event.frames[0] for event in van.poll(0) if isinstance(event, Received)]

    def received(self, van):
        events = van.poll(0)
        messages = [event for event in events if isinstance(event, Received)]
        assert messages == events
        return messages

    def broken(self, van):
        events = van.poll(0)
        ends = [event for event in events if isinstance(event, Broken)]
        assert ends == events
        return ends

    def pass_time(self, seconds):
        self.timeline.run_until(lambda: False, self.timeline.now + seconds)


def test_a_message_arrives_after_the_delay_and_the_handshake():
    pair = Pair(delay_s=0.01)
    assert pair.here.transmit(A, b"header", b"payload")
    assert pair.headers(pair.there, 0.029) == []
    assert pair.headers(pair.there, 0.002) == [b"header"]


@given(seed=st.integers(0, 2**32), jitter=st.floats(0, 1))
def test_a_connection_keeps_its_order_whatever_the_delays(seed, jitter):
    timeline = Timeline()
    network = MemoryNetwork(timeline, FixedDelay(timeline, delay_s=0.01, jitter_s=jitter, seed=seed))
    here, there = MemoryVan(network, "here"), MemoryVan(network, "there")
    here.open(A, "there", there.bind("*", 0))
    sent = [bytes([n]) for n in range(40)]
    for n, header in enumerate(sent):
        timeline.run_until(lambda: False, n * 0.05)
        here.transmit(A, header, None)
    timeline.run_until(lambda: False, 10)
    assert [event.frames[0] for event in there.poll(0) if isinstance(event, Received)] == sent


def test_what_comes_in_is_a_copy_that_can_be_changed():
    pair = Pair()
    values = np.arange(4, dtype=np.float32)
    pair.here.transmit(A, b"", values)
    values[:] = 0
    pair.pass_time(1)
    [event] = pair.received(pair.there)
    got = np.frombuffer(event.frames[1], np.float32)
    got += 1
    assert got.tolist() == [1, 2, 3, 4]


def test_a_received_frame_is_forwarded_as_it_is_and_copied_for_its_receiver():
    pair = Pair()
    pair.here.transmit(A, b"", b"abc")
    pair.pass_time(1)
    [event] = pair.received(pair.there)
    pair.there.transmit(event.connection, b"back", event.frames[1])
    pair.pass_time(1)
    [back] = pair.received(pair.here)
    back.frames[1][0] = 0
    assert bytes(event.frames[1]) == b"abc"


def test_changing_a_frame_that_was_forwarded_is_found_out():
    pair = Pair()
    pair.here.transmit(A, b"", b"abc")
    pair.pass_time(1)
    [event] = pair.received(pair.there)
    pair.there.transmit(event.connection, b"back", event.frames[1])
    event.frames[1][0] = 0
    with pytest.raises(AssertionError, match="there changed a received frame"):
        pair.pass_time(1)


def test_nobody_listening_is_told_after_a_round_trip():
    pair = Pair(delay_s=0.01)
    pair.here.open(B, "there", pair.port + 1)
    pair.pass_time(0.019)
    assert pair.here.poll(0) == []
    pair.pass_time(0.002)
    reason = f"connection refused: nobody listens at there:{pair.port + 1}"
    assert pair.here.poll(0) == [Broken(B, reason, refused=True)]
    assert not pair.here.transmit(B, b"", None)


def test_a_reset_loses_what_is_in_flight_and_tells_both_sides():
    pair = Pair(delay_s=0.01)
    pair.here.transmit(A, b"first", None)
    pair.pass_time(1)
    [first] = pair.received(pair.there)
    pair.here.transmit(A, b"second", None)
    assert pair.network.reset("here", "there") == 1
    pair.pass_time(1)
    assert [type(event) for event in pair.there.poll(0)] == [Broken]
    assert [type(event) for event in pair.here.poll(0)] == [Broken]
    assert not pair.there.transmit(first.connection, b"", None)
    assert not pair.here.transmit(A, b"", None)


def test_a_short_cut_delays_and_loses_nothing():
    pair = Pair(detect_s=3.0)
    pair.pass_time(1)
    pair.network.cut("here", "there")
    pair.here.transmit(A, b"header", None)
    assert pair.headers(pair.there, 2) == []
    pair.network.heal("here", "there")
    assert pair.headers(pair.there, 0.1) == [b"header"]
    assert pair.headers(pair.there, 5) == []
    assert pair.here.poll(0) == []


def test_a_long_cut_breaks_the_connection_after_the_detection_time():
    pair = Pair(detect_s=3.0)
    pair.pass_time(1)
    pair.network.cut("here", "there")
    pair.pass_time(2.9)
    assert pair.here.poll(0) == []
    pair.pass_time(0.2)
    assert pair.here.poll(0) == [Broken(A, "nothing heard from there for 3 s")]


def test_a_connection_attempt_into_a_cut_times_out():
    pair = Pair(detect_s=3.0)
    pair.network.cut("here", "there", one_way=True)
    pair.here.open(B, "there", pair.port)
    pair.pass_time(3.1)
    assert {event.connection for event in pair.here.poll(0)} == {A, B}


def test_a_killed_process_resets_its_connections_and_refuses_new_ones():
    pair = Pair(delay_s=0.01)
    pair.pass_time(1)
    pair.there.die()
    pair.pass_time(0.02)
    assert pair.here.poll(0) == [Broken(A, "connection reset by there")]
    pair.here.open(B, "there", pair.port)
    pair.pass_time(0.03)
    [refused] = pair.broken(pair.here)
    assert "refused" in refused.reason


def test_a_host_without_power_is_noticed_by_its_silence():
    pair = Pair(detect_s=3.0)
    pair.pass_time(1)
    pair.there.die(silent=True)
    pair.pass_time(2.9)
    assert pair.here.poll(0) == []
    pair.pass_time(0.2)
    assert pair.here.poll(0) == [Broken(A, "nothing heard from there for 3 s")]
    pair.here.open(B, "there", pair.port)
    pair.pass_time(3.1)
    assert pair.here.poll(0) == [Broken(B, "nothing heard from there for 3 s")]


def test_closing_lets_what_was_sent_arrive_and_then_tells_the_other_side():
    pair = Pair()
    pair.pass_time(1)
    pair.here.transmit(A, b"last words", None)
    pair.here.close(A)
    pair.pass_time(1)
    event, end = pair.there.poll(0)
    assert isinstance(event, Received)
    assert event.frames == (b"last words",)
    assert end == Broken(event.connection, "closed by here")
    assert not pair.there.transmit(event.connection, b"", None)
    assert pair.network.connections() == 0


@pytest.mark.parametrize(("linger", "arrives"), [(0.0, False), (0.005, False), (1.0, True)])
def test_shutting_lingers_as_long_as_it_was_told_to(linger, arrives):
    pair = Pair(delay_s=0.01)
    pair.pass_time(1)
    pair.here.transmit(A, b"header", None)
    pair.here.shut(linger)
    pair.here.shut(linger)
    assert pair.headers(pair.there, 2) == ([b"header"] if arrives else [])
    assert pair.network.connections() == 0


def test_corruption_changes_one_bit_of_the_payload_and_never_the_header():
    pair = Pair(corrupt_probability=1.0)
    pair.here.transmit(A, b"header", bytes(100))
    pair.pass_time(1)
    [event] = pair.received(pair.there)
    assert event.frames[0] == b"header"
    assert sorted(event.frames[1])[:-1] == [0] * 99
    assert max(event.frames[1]) in {1 << bit for bit in range(8)}


def test_random_breaks_come_from_the_seed():
    def delivered(seed):
        pair = Pair(break_probability=0.05, seed=seed)
        for n in range(100):
            pair.here.transmit(A, bytes([n]), None)
        pair.pass_time(1)
        return len(pair.there.poll(0))

    assert [delivered(seed) for seed in range(5)] == [delivered(seed) for seed in range(5)]
    assert len({delivered(seed) for seed in range(5)}) > 1


def test_polling_lets_virtual_time_pass_only_as_far_as_needed():
    pair = Pair(delay_s=0.01)
    pair.here.transmit(A, b"header", None)
    assert len(pair.there.poll(10.0)) == 1
    assert pair.timeline.now == pytest.approx(0.03)
    assert pair.there.poll(10.0) == []
    assert pair.timeline.now == pytest.approx(10.03)


def test_waking_ends_one_poll():
    pair = Pair()
    pair.here.wake()
    assert pair.here.poll(10.0) == []
    assert pair.timeline.now == 0


def test_a_port_is_given_once():
    pair = Pair()
    other = MemoryVan(pair.network, "there")
    with pytest.raises(UsageError, match="is taken"):
        other.bind("there", pair.port)
    assert other.bind("there", 0) != pair.port


def test_traffic_is_counted_by_direction():
    pair = Pair()
    pair.here.transmit(A, b"12345", bytes(1000))
    pair.pass_time(1)
    assert pair.network.traffic == {("here", "there"): (1000 + 5 + 18, 1)}


# ---------------------------------------------------------------------------------------------- virtual time


@given(st.lists(st.floats(0, 100)))
def test_actions_run_in_order_of_time_and_then_of_asking(times):
    timeline = Timeline()
    done: list[tuple[float, int]] = []
    for number, time in enumerate(times):
        timeline.at(time, functools.partial(done.append, (time, number)))
    while timeline.step():
        pass
    assert done == sorted(done)
    assert len(done) == len(times)


def test_an_action_sees_its_own_time():
    timeline = Timeline(5.0)
    seen = []
    timeline.after(2.5, lambda: seen.append(timeline.now))
    timeline.at(1.0, lambda: seen.append(timeline.now))
    assert timeline.run_until(lambda: len(seen) == 2, 100.0)
    assert seen == [5.0, 7.5]


def test_what_was_called_off_is_not_done_and_takes_no_time():
    timeline = Timeline()
    timeline.at(1.0, lambda: None).cancel()
    assert not timeline.step()
    assert timeline.now == 0.0


def test_time_goes_to_the_limit_and_not_beyond():
    timeline = Timeline()
    timeline.at(3.0, lambda: None)
    assert not timeline.run_until(lambda: False, 2.0)
    assert timeline.now == 2.0
    assert not timeline.step(2.5)
    assert timeline.step(3.0)


def test_never_is_never_reached():
    timeline = Timeline()
    timeline.at(math.inf, lambda: None)
    assert not timeline.step()
