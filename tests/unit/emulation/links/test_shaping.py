from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.lab.emulation.shaping import LEAST_BUFFER, Shaper, buffer_bytes, measure
from tests.unit.emulation.packet_makers import MSS, tcp, udp

RATE = 8e6  # a byte a microsecond
WIRE = 1000
PACKET = udp(WIRE - 28 - 14)


def shaper(*, rate: float = RATE, latency: float = 0.0, loss: float = 0.0, seed: int = 1) -> Shaper:
    return Shaper(rate=rate, latency=latency, loss=loss, random=Random(seed))


def dues(one: Shaper) -> list[float]:
    return [due for due, _, _ in one.queue]


def test_a_packet_arrives_after_its_time_on_the_wire_and_the_latency():
    link = shaper(latency=0.030)
    link.offer(PACKET, 5.0)
    assert dues(link) == pytest.approx([5.0 + 0.001 + 0.030])


def test_packets_that_come_together_leave_one_after_the_other():
    link = shaper()
    for _ in range(3):
        link.offer(PACKET, 5.0)
    assert dues(link) == pytest.approx([5.001, 5.002, 5.003])


def test_a_link_that_was_idle_owes_nothing():
    link = shaper()
    link.offer(PACKET, 5.0)
    link.offer(PACKET, 7.0)
    assert dues(link) == pytest.approx([5.001, 7.001])


def test_the_queue_holds_100_ms_of_the_rate_but_at_least_one_super_packet():
    assert buffer_bytes(100e6) == 1_250_000
    assert buffer_bytes(1e6) == LEAST_BUFFER == 70_000


def test_what_finds_the_queue_full_is_dropped_and_counted():
    link = shaper()  # 100 ms are 100 kB: a hundred packets
    for _ in range(130):
        link.offer(PACKET, 1.0)
    assert (link.carried, link.dropped, link.lost) == (100, 30, 0)
    assert max(dues(link)) == pytest.approx(1.1)


def test_a_super_packet_that_fits_in_part_is_taken_in_part():
    link = shaper()
    big = tcp(bytes(40 * MSS))
    link.offer(big, 1.0)
    link.offer(big, 1.0)
    _, size = measure(big)
    fit = (100_000 - size) // (size // 40)
    assert (link.carried, link.dropped) == (40 + fit, 40 - fit)
    assert link.wire_bytes == size + fit * (size // 40)


@given(st.floats(0.001, 0.3), st.integers(0, 2**32))
def test_losses_are_as_frequent_as_asked_for_whether_segments_come_alone_or_together(loss, seed):
    single, many = shaper(loss=loss, rate=1e12, seed=seed), shaper(loss=loss, rate=1e12, seed=seed + 1)
    segment, big = tcp(bytes(100)), tcp(bytes(20 * MSS))
    for step in range(2000):
        single.offer(segment, step)
    for step in range(100):
        many.offer(big, step)
    for link in (single, many):
        assert link.lost + link.carried == 2000
        expected = 2000 * loss
        assert abs(link.lost - expected) <= 6 * (2000 * loss * (1 - loss)) ** 0.5 + 1


def test_without_loss_nothing_is_lost():
    link = shaper(rate=1e12)
    for step in range(1000):
        link.offer(PACKET, step)
    assert (link.lost, link.carried) == (0, 1000)


def test_a_new_rate_holds_for_what_waits_too():
    link = shaper(latency=0.010)
    for _ in range(4):
        link.offer(PACKET, 1.0)
    link.change(1.002, rate=RATE / 2)  # two have left, and are under way
    assert dues(link) == pytest.approx([1.011, 1.012, 1.014, 1.016])
    link.offer(PACKET, 1.002)
    assert dues(link)[-1] == pytest.approx(1.018)


def test_a_shorter_latency_lets_no_packet_overtake_another():
    link = shaper(latency=0.100)
    link.offer(PACKET, 1.0)
    link.change(1.0, latency=0.0)
    link.offer(PACKET, 1.0)
    assert dues(link) == sorted(dues(link))


def test_a_new_loss_holds_from_the_next_segment_on():
    link = shaper(rate=1e12)
    link.offer(PACKET, 1.0)
    link.change(1.0, loss=0.999999)
    for step in range(50):
        link.offer(PACKET, 2.0 + step)
    assert link.carried == 1
    assert link.lost == 50
    link.change(100.0, loss=0.0)
    link.offer(PACKET, 100.0)
    assert link.carried == 2
