"""One lane over a path that loses, doubles, reorders and changes packets: exact, bounded, and fast enough."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import FrameError, ProtocolViolation
from netstorm.observe.log import Counters
from netstorm.pslite.datagram.lane import OF_MESSAGE, Ranges, ReceivingLane, SendingLane
from netstorm.pslite.datagram.pace import Pace
from netstorm.pslite.datagram.packets import (
    ACK,
    DATA,
    FRAGMENT,
    HEAD,
    KEY_BYTES,
    MOST_RANGES,
    acknowledgement,
    addressee,
    fragment,
    new_cipher,
    open_packet,
    ranges_in,
    read_fragment,
    seal_packet,
)
from netstorm.pslite.sending import SendQueueItem

KEY = bytes(range(KEY_BYTES))


@dataclass(frozen=True)
class Faults:
    loss: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0
    corrupt: float = 0.0


class Wire:
    """A sender, a receiver, and a path of one queue between them, on virtual time."""

    def __init__(self, *, faults=Faults(), seed=0, rate=20e6, latency=0.02, buffer_s=0.1, room=1 << 22):
        self.counters = Counters()
        self.now = 0.0
        self.rate, self.latency, self.buffer_s, self.faults = rate, latency, buffer_s, faults
        self.sender = SendingLane(
            channels=3, room=room, pace=Pace(2 * latency, 0.0, 0.0), counters=self.counters
        )
        self.receiver = ReceivingLane(room=room, counters=self.counters)
        self.room = room
        self.came = []
        self.delays = []
        self.dropped = self.unauthentic = 0
        self._chance = random.Random(seed)
        self._cipher = new_cipher(KEY)
        self._flying = []
        self._numbers = itertools.count()
        self._acknowledgements = itertools.count(1)
        self._free_at = 0.0
        self._payloads = 0

    def submit(self, payload, order=None, tag=None):
        places = list(range(1 + -(-len(payload) // FRAGMENT)))
        self._payloads += 1
        body = f"head {self._payloads}".encode()
        item = SendQueueItem(body, payload, (0, self._payloads) if order is None else order, None, tag)
        self.sender.submit(item, [34] * len(places), places)
        return body

    def run(self, seconds, *, idle=False):
        """Let time pass, until everything has arrived; `idle`: also after that."""
        until = self.now + seconds
        while self.now < until and (idle or self.sender.has_work()) and not self.sender.broken(self.now):
            self._arrive()
            content = self.receiver.acknowledgement(self.now)
            if content is not None:
                packet = seal_packet(self._cipher, ACK, 1, next(self._acknowledgements), content)
                self._fly(packet, self.now + self.latency)
            for _ in range(64):
                departure = self.sender.next(self.now)
                if departure is None:
                    break
                packet = seal_packet(self._cipher, DATA, 1, departure.number, departure.content)
                self._free_at = max(self._free_at, self.now)
                if self._free_at - self.now > self.buffer_s:
                    self.dropped += 1
                    continue
                self._free_at += (len(packet) + 28) * 8 / self.rate
                self.delays.append(self._free_at - self.now)
                self._fly(packet, self._free_at + self.latency)
            due = min(self.sender.due(self.now), self._flying[0][0] if self._flying else math.inf)
            due = min(due, self.receiver.acknowledge_at)
            self.now = min(until, max(self.now + 1e-4, due))

    def _fly(self, packet, at):
        chance, faults = self._chance, self.faults
        if chance.random() < faults.loss:
            return
        for _ in range(2 if chance.random() < faults.duplicate else 1):
            if chance.random() < faults.corrupt:
                place = chance.randrange(len(packet))
                packet = (
                    packet[:place] + bytes([packet[place] ^ 1 << chance.randrange(8)]) + packet[place + 1 :]
                )
            late = chance.uniform(0, faults.late_s) if faults.late_s else 0.0
            heapq.heappush(self._flying, (at + late, next(self._numbers), packet))

    def _arrive(self):
        while self._flying and self._flying[0][0] <= self.now:
            _, _, packet = heapq.heappop(self._flying)
            try:
                kind, _ = addressee(packet)
                opened = open_packet(self._cipher, packet)
            except FrameError:
                self.unauthentic += 1
                continue
            if kind == DATA:
                whole = self.receiver.receive(opened.number, read_fragment(opened.content), self.now)
                largest = self.room if self.receiver.bytes <= self.room else 0
                assert self.receiver.bytes <= largest or len(self.receiver._open) == 1
                if whole is not None:
                    self.came.append((whole.body, bytes(whole.payload)))
            else:
                self.sender.acknowledged(*ranges_in(opened.content), self.now)


faults = st.builds(
    Faults,
    loss=st.floats(0, 0.5),
    duplicate=st.floats(0, 0.5),
    late_s=st.floats(0, 0.2),
    corrupt=st.floats(0, 0.3),
)


@given(faults, st.lists(st.integers(0, 20_000), min_size=1, max_size=12), st.integers(0, 2**32))
def test_every_message_arrives_once_and_as_it_was_whatever_happens_to_packets(faults, sizes, seed):
    wire = Wire(faults=faults, seed=seed, room=30_000)
    chance = random.Random(seed)
    sent = {}
    for size in sizes:
        payload = chance.randbytes(size)
        sent[wire.submit(payload, order=(chance.randrange(5),))] = payload
    wire.run(120)
    left = {item.body for item in wire.sender.take_all()}  # a path this bad may count as broken
    assert dict(wire.came).items() <= sent.items()
    assert len(wire.came) == len(dict(wire.came))
    assert sent.keys() - dict(wire.came).keys() <= left


@given(st.integers(0, 2**32), st.sets(st.integers(0, 19)), st.floats(0, 0.3))
def test_what_is_taken_back_goes_no_further_and_everything_else_arrives(seed, unwanted, when):
    wire = Wire(faults=Faults(loss=0.05), seed=seed, room=40_000)
    bodies = [wire.submit(bytes(9000), tag=number) for number in range(20)]
    wire.run(when)
    came_before = {body for body, _ in wire.came}
    taken = {item.body for item in wire.sender.take_back(unwanted.__contains__, begun=True)}
    assert taken <= {bodies[number] for number in unwanted}
    wire.run(60)
    came = [body for body, _ in wire.came]
    assert len(came) == len(set(came))
    assert {body for number, body in enumerate(bodies) if number not in unwanted} <= set(came)
    assert wire.receiver.bytes <= len(unwanted) * (9000 + OF_MESSAGE)
    assert came_before <= set(came)


def test_what_was_begun_goes_on_unless_nobody_wants_it():
    wire = Wire()
    first, second = wire.submit(bytes(200_000), tag="a"), wire.submit(bytes(200_000), tag="b")
    wire.run(0.01)
    assert [item.body for item in wire.sender.take_back(lambda _: True, begun=False)] == [second]
    wire.run(10)
    assert [body for body, _ in wire.came] == [first]


def test_what_comes_first_in_order_overtakes_what_is_on_its_way():
    wire = Wire()
    late = wire.submit(bytes(500_000), order=(5,))
    wire.run(0.05)
    early = wire.submit(bytes(5000), order=(1,))
    wire.run(10)
    assert [body for body, _ in wire.came] == [early, late]


def test_a_path_that_carries_nothing_is_given_up_and_nothing_is_lost_by_that():
    wire = Wire(faults=Faults(loss=1.0))
    bodies = [wire.submit(bytes(5000)) for _ in range(3)]
    wire.run(10)
    assert wire.sender.broken(wire.now)
    assert wire.now < 3
    assert [item.body for item in wire.sender.take_all()] == bodies
    assert not wire.sender.has_work()


def test_a_path_whose_probes_are_all_lost_is_given_up_before_anything_else_happens():
    wire = Wire(faults=Faults(loss=1.0))
    assert wire.sender.due(0.0) == math.inf
    wire.sender.probe(0.0)
    due = wire.sender.due(0.0)
    assert not wire.sender.broken(due - 0.1)
    assert wire.sender.broken(due)


def test_a_path_is_not_given_up_for_what_it_lost_before_it_was_idle():
    wire = Wire()
    wire.submit(bytes(5000))
    wire.run(1)
    wire.faults = Faults(loss=1.0)
    wire.submit(bytes(5000), tag="late")
    wire.run(0.05)
    assert len(wire.sender.take_back(lambda _: True, begun=True)) == 1
    wire.run(5, idle=True)
    wire.faults = Faults()
    last = wire.submit(bytes(5000))
    wire.run(1)
    assert not wire.sender.broken(wire.now)
    assert wire.came[-1][0] == last


def test_a_path_that_carries_nothing_is_given_up_though_nobody_waits_for_what_it_lost():
    wire = Wire(faults=Faults(loss=1.0))
    while not wire.sender.broken(wire.now):
        wire.submit(bytes(5000), tag="late")
        wire.run(0.2)
        wire.sender.take_back(lambda _: True, begun=True)
        wire.run(0.3, idle=True)
        assert wire.now < 8


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05])
@pytest.mark.parametrize(("rate", "latency"), [(5e6, 0.05), (20e6, 0.02), (50e6, 0.005)])
def test_the_rate_finds_that_of_the_link_though_packets_are_lost(rate, latency, loss):
    wire = Wire(faults=Faults(loss=loss), rate=rate, latency=latency)
    for _ in range(400):
        wire.submit(bytes(100_000))
    wire.run(2)
    before = len(wire.came)
    wire.run(2)
    assert 0.75 * rate < (len(wire.came) - before) * 100_000 * 8 / 2 <= rate
    assert sum(wire.delays[-500:]) / 500 < 0.05


def test_the_rate_follows_a_link_that_slows_down_and_comes_back():
    wire = Wire(rate=20e6)
    for _ in range(400):
        wire.submit(bytes(100_000))
    wire.run(2)
    wire.rate = 2e6
    wire.run(2)
    assert wire.sender.pace.rate * 8 < 3e6
    assert sum(wire.delays[-50:]) / 50 < 0.06
    wire.rate = 20e6
    wire.run(2)
    assert wire.sender.pace.rate * 8 > 15e6


def test_acknowledging_what_was_never_sent_is_an_error():
    wire = Wire()
    wire.submit(bytes(5000))
    wire.run(0.03)
    with pytest.raises(ProtocolViolation, match="were sent"):
        wire.sender.acknowledged(0.0, [(1, 1000)], wire.now)


def test_a_message_that_changes_its_size_is_an_error_and_so_is_one_from_afar():
    lane = ReceivingLane(room=10_000, counters=Counters())
    lane.receive(1, read_fragment(fragment(1, 1, 0, 2000, bytes(FRAGMENT))), 0.0)
    with pytest.raises(ProtocolViolation, match="2000 bytes, and then 3000"):
        lane.receive(2, read_fragment(fragment(1, 1, 0, 3000, bytes(FRAGMENT))), 0.0)
    with pytest.raises(ProtocolViolation, match="from 1 on"):
        lane.receive(3, read_fragment(fragment(1 << 30, 1, 0, 2000, bytes(FRAGMENT))), 0.0)


def test_memory_is_bounded_whoever_sends_what():
    lane = ReceivingLane(room=50_000, counters=Counters())
    for message in range(1, 1000):
        lane.receive(message, read_fragment(fragment(message, 1, 0, 8000, bytes(FRAGMENT))), 0.0)
    assert lane.bytes <= 50_000
    lane.receive(1000, read_fragment(fragment(999, 999, HEAD, 8000, b"head")), 0.0)
    assert lane.bytes == 8000 + OF_MESSAGE  # the floor has closed all others


@given(st.lists(st.integers(1, 80), max_size=200))
def test_ranges_are_the_numbers_that_came(numbers):
    ranges, came = Ranges(), set()
    for number in numbers:
        assert ranges.add(number) == (number not in came)
        came.add(number)
    assert {one for first, last in ranges.latest() for one in range(first, last + 1)} == came
    assert ranges.latest() == sorted(ranges.latest(), reverse=True)


def test_of_many_ranges_the_latest_are_kept():
    ranges = Ranges()
    for number in range(0, 10_000, 2):
        ranges.add(number + 1)
    assert len(ranges.latest()) == MOST_RANGES
    assert ranges.latest()[0] == (9999, 9999)


def opened(packet, key):
    addressee(packet)
    return open_packet(new_cipher(key), packet)


@given(st.binary(max_size=2000), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.data())
def test_a_packet_opens_as_it_was_sealed_and_not_at_all_if_anything_changed(content, number, lane, data):
    packet = seal_packet(new_cipher(KEY), DATA, lane, number, content)
    assert addressee(packet) == (DATA, lane)
    assert open_packet(new_cipher(KEY), packet) == (number, content)
    place, flip = data.draw(st.integers(0, len(packet) - 1)), data.draw(st.integers(1, 255))
    changed = packet[:place] + bytes([packet[place] ^ flip]) + packet[place + 1 :]
    cut = packet[: data.draw(st.integers(0, len(packet) - 1))]
    for wrong, key in ((changed, KEY), (cut, KEY), (packet, bytes(KEY_BYTES))):
        with pytest.raises(FrameError):
            opened(wrong, key)


@given(st.binary(max_size=2000))
def test_any_content_is_read_or_is_an_error_of_the_peer(content):
    for read in (read_fragment, ranges_in):
        with contextlib.suppress(FrameError):
            read(content)


@given(
    st.floats(0, 100), st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 1000)), max_size=MOST_RANGES)
)
def test_acknowledgements_say_what_was_put_in(delay_s, drawn):
    ranges = [(first, first + more) for first, more in drawn]
    read_s, read = ranges_in(acknowledgement(delay_s, ranges))
    assert read == ranges
    assert abs(read_s - delay_s) < 1e-5
