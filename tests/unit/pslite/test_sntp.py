"""Clocks that are off and drift, over unequal and noisy paths: what is learnt is right within its bound."""

from __future__ import annotations

import itertools
import math
import random
import struct

import ntplib
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netstorm.errors import FrameError
from netstorm.pslite import sntp
from netstorm.pslite.sntp import MAC_BYTES, ClockSource, ClockSync, PacketKey, Unauthenticated


class Pair:
    """A node and the scheduler in true time: the node's clock is off and drifts, the path has two delays."""

    def __init__(self, *, offset=1e9, drift=0.0, there=0.02, back=0.02, jitter=0.0, loss=0.0, seed=0):
        self.offset, self.drift, self.there, self.back = offset, drift, there, back
        self.jitter, self.loss = jitter, loss
        self.random = random.Random(seed)
        self.sync = ClockSync(seed=seed)
        self.now = 1000.0
        """True time, which is the scheduler's."""

    def local(self, time):
        """What the node's clock shows: the cluster clock goes `drift` faster than it."""
        return (time - self.offset) / (1 + self.drift)

    def delay(self, base):
        return base + (self.random.expovariate(1 / self.jitter) if self.jitter else 0.0)

    def exchange(self):
        request = self.sync.poll(self.local(self.now))
        if self.random.random() < self.loss:
            return
        arrived = self.now + self.delay(self.there)
        left = arrived + self.random.random() * 0.001
        data = sntp.answer(request, received=arrived, transmitted=left)
        self.now = left + self.delay(self.back)
        self.sync.receive(data, self.local(self.now))

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            if self.sync.next_poll() <= self.local(self.now):
                self.exchange()
            self.now += 0.05

    def error(self):
        return self.sync.cluster_time(self.local(self.now)) - self.now


def test_one_exchange_over_an_even_path_finds_the_offset_of_which_nothing_was_known_before():
    pair = Pair(offset=1e9, there=0.05, back=0.05)
    assert not pair.sync.synchronised
    assert (pair.sync.offset(5.0), pair.sync.error_bound(5.0)) == (0.0, math.inf)
    pair.exchange()
    assert pair.error() == pytest.approx(0.0, abs=2e-6)


@pytest.mark.parametrize(("there", "back"), [(0.01, 0.09), (0.2, 0.001)])
def test_the_error_is_half_of_what_the_two_directions_differ_by(there, back):
    pair = Pair(there=there, back=back)
    pair.run(60)
    assert pair.error() == pytest.approx((there - back) / 2, abs=2e-6)


pairs = st.builds(
    Pair,
    offset=st.floats(0.7e9, 2.7e9),
    drift=st.floats(-1e-4, 1e-4),
    there=st.floats(1e-4, 0.3),
    back=st.floats(1e-4, 0.3),
    jitter=st.floats(0.0, 0.05),
    seed=st.integers(0, 99),
)


@given(pairs)
@example(Pair(offset=7e8, there=0.0078125, back=0.0001, jitter=0.03125, seed=1))
def test_the_error_stays_within_half_the_asymmetry_plus_what_jitter_and_drift_allow(pair):
    pair.run(40)
    drifted = 2e-4 * 20
    jitter = 8 * pair.jitter  # of the fastest of many exchanges it is less
    assert abs(pair.error()) <= abs(pair.there - pair.back) / 2 + jitter / 2 + drifted + 1e-5
    assert abs(pair.error()) <= pair.sync.error_bound(pair.local(pair.now)) + drifted


def test_of_noisy_exchanges_the_fastest_counts_and_noise_is_not_taken_for_drift():
    pair = Pair(jitter=0.02, seed=5)
    errors = []
    for _ in range(50):
        pair.run(10)
        errors.append(abs(pair.error()))
        assert abs(pair.sync.drift) < 50e-6
    assert max(errors) < 0.02
    assert sum(errors) / len(errors) < 0.004  # a fifth of the jitter


@pytest.mark.parametrize("drift", [80e-6, -40e-6])
def test_a_drift_is_found_and_the_clock_runs_on_with_it(drift):
    pair = Pair(drift=drift, jitter=0.0005, seed=1)
    pair.run(400)
    assert pair.sync.drift == pytest.approx(drift, rel=0.1)
    pair.now += 100  # nobody answers for a while
    assert abs(pair.error()) < 100 * abs(drift) / 5


@given(st.integers(0, 30))
def test_lost_packets_only_take_longer(seed):
    pair = Pair(loss=0.5, seed=seed)
    pair.run(30)
    assert pair.error() == pytest.approx(0.0, abs=1e-5)


def test_a_clock_that_is_set_is_followed_at_once():
    pair = Pair()
    pair.run(100)
    pair.offset -= 3600.0
    pair.run(20)
    assert pair.error() == pytest.approx(0.0, abs=1e-4)


def test_polls_come_fast_until_the_filter_is_full_and_then_rarely():
    pair = Pair()
    times: list[float] = []
    for _ in range(20):
        pair.now = max(pair.now, pair.offset + pair.sync.next_poll() if times else pair.now)
        times.append(pair.now)
        pair.exchange()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps[:7]) < 0.7
    assert 14 < gaps[-1] < 18


def test_nodes_that_start_together_do_not_ask_together():
    due = set()
    for seed in range(20):
        sync = ClockSync(seed=seed)
        sync.poll(0.0)
        due.add(sync.next_poll())
    assert len(due) == 20


@pytest.mark.parametrize(("received", "transmitted"), [(5.0, 4.0), (5.0, 9.0)])
def test_a_server_whose_own_times_make_no_sense_is_not_believed(received, transmitted):
    sync = ClockSync(seed=0)
    data = sntp.answer(sync.poll(1.0), received=received, transmitted=transmitted)
    with pytest.raises(FrameError, match="a round trip of"):
        sync.receive(data, 1.1)
    assert not sync.synchronised


def test_requests_without_an_answer_do_not_pile_up():
    sync = ClockSync(seed=0)
    first = sync.poll(0.0)
    for second in range(1, 20):
        sync.poll(float(second))
    with pytest.raises(FrameError, match="was not made"):
        sync.receive(sntp.answer(first, received=5.0, transmitted=5.0), 1000.0)


# --------------------------------------------------------------------------------------------- sntp packets


NOON = 1_750_000_000.25
"""A time that doubles and SNTP both have exactly."""


@given(st.integers(0, 2**52 - 1))
def test_an_answer_carries_the_times_and_the_nonce_in_as_many_bytes_as_the_request(bits):
    asked = sntp.request(sntp.new_nonce(bits))
    data = sntp.answer(asked, received=NOON, transmitted=NOON + 0.5)
    found = sntp.read_answer(data)
    assert (found.nonce, found.received, found.transmitted) == (sntp.new_nonce(bits), NOON, NOON + 0.5)
    assert len(asked) == len(data) == sntp.PACKET_BYTES, "nobody can be flooded through us"


def test_nonces_use_all_their_bits():
    assert len({sntp.new_nonce(1 << bit) for bit in range(52)}) == 52


def test_a_server_says_by_how_much_it_may_be_off_and_each_hop_from_the_scheduler_is_a_stratum():
    for hops, stratum in [(0, 10), (2, 12), (99, 15)]:
        data = sntp.answer(sntp.request(1.0), received=NOON, transmitted=NOON, hops=hops, error=0.25)
        assert (data[1], sntp.read_answer(data).hops, sntp.read_answer(data).error) == (
            stratum,
            stratum - 10,
            0.25,
        )


def test_the_bytes_are_those_of_rfc_4330():
    data = sntp.answer(sntp.request(3.5), received=NOON, transmitted=NOON + 1)
    assert data[0] == (4 << 3 | 4)  # no leap warning, version 4, server
    stratum, poll, precision = struct.unpack_from("!BBb", data, 1)
    assert (stratum, poll, precision) == (10, 0, -20)
    seconds_1900 = 1_750_000_000 + 2_208_988_800
    quarter = 1 << 30
    assert struct.unpack_from("!8I", data, 16) == (
        *(seconds_1900, quarter),
        *(3, 1 << 31),
        *(seconds_1900, quarter),
        *(seconds_1900 + 1, quarter),
    )


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_clients_of_all_versions_get_an_answer_of_their_version(version):
    asked = ntplib.NTPPacket(version=version, mode=3, tx_timestamp=12.0).to_data()
    assert sntp.answer(asked, received=NOON, transmitted=NOON)[0] >> 3 & 7 == version


@pytest.mark.parametrize("mode", [0, 1, 2, 4, 5, 6, 7])
def test_only_a_clients_request_is_answered(mode):
    asked = ntplib.NTPPacket(version=4, mode=mode, tx_timestamp=12.0).to_data()
    with pytest.raises(FrameError, match="no client's request"):
        sntp.answer(asked, received=NOON, transmitted=NOON)


def test_an_answer_of_a_server_that_does_not_know_the_time_is_refused():
    with pytest.raises(FrameError, match="does not know the time"):
        sntp.read_answer(sntp.answer(sntp.request(1.0), received=NOON, transmitted=NOON, error=math.inf))
    for fields in [
        {"stratum": 0},
        {"stratum": 16},
        {"stratum": 2, "leap": 3},
        {"stratum": 2, "tx_timestamp": 0},
    ]:
        packet = ntplib.NTPPacket(version=4, mode=4, tx_timestamp=5.0)
        for name, value in fields.items():
            setattr(packet, name, value)
        with pytest.raises(FrameError, match="does not know the time"):
            sntp.read_answer(packet.to_data())


def test_a_time_that_sntp_cannot_say_is_an_error_and_no_crash():
    with pytest.raises(FrameError, match="cannot be expressed"):
        sntp.answer(sntp.request(1.0), received=1e11, transmitted=1e11)


@given(st.binary(max_size=100))
@example(b"")
@example(b"\x23" + bytes(47))
@example(bytes(47))
def test_any_bytes_are_answered_or_refused(data):
    for read in (sntp.read_answer, lambda bytes_: sntp.answer(bytes_, received=NOON, transmitted=NOON)):
        try:
            read(data)
        except FrameError as error:
            assert str(error)


# -------------------------------------------- sntp packets that prove that their sender holds the job's key


KEY = PacketKey(b"k" * 32)
SEALED = KEY.seal(sntp.request(sntp.new_nonce(1234567)))


def answered(sealed: bytes, key: PacketKey = KEY) -> bytes:
    return key.seal(sntp.answer(key.open(sealed), received=1000.0, transmitted=1000.0))


@given(st.binary(min_size=48, max_size=48))
def test_what_a_holder_seals_every_holder_opens(packet):
    sealed = KEY.seal(packet)
    assert len(sealed) == len(packet) + MAC_BYTES
    assert PacketKey(b"k" * 32).open(sealed) == packet
    with pytest.raises(FrameError, match="no server's answer"):  # a request that is sent back
        sntp.read_answer(KEY.open(SEALED))


@given(st.integers(0, 8 * len(SEALED) - 1))
def test_a_packet_with_one_wrong_bit_is_refused(bit):
    changed = bytearray(SEALED)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Unauthenticated):
        KEY.open(bytes(changed))


@given(st.binary(max_size=200))
def test_strangers_bytes_are_refused_and_raise_nothing_else(data):
    with pytest.raises(Unauthenticated):
        KEY.open(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sntp.request(1.0), "no_mac"),
        (SEALED + b"\0", "no_mac"),
        (PacketKey(b"other").seal(SEALED[:48]), "other_key"),
        (SEALED[:-1] + bytes([SEALED[-1] ^ 1]), "forged"),
    ],
)
def test_packets_are_refused_by_reason(data, reason):
    with pytest.raises(Unauthenticated) as refused:
        KEY.open(data)
    assert refused.value.reason == reason


def test_an_answer_counts_once_and_for_its_own_request_alone():
    sync = ClockSync(seed=1)
    first = answered(KEY.seal(sync.poll(10.0)))
    other = answered(KEY.seal(ClockSync(seed=2).poll(10.0)))
    sync.receive(KEY.open(first), 10.1)
    for replayed in (first, other):
        with pytest.raises(FrameError, match="not made"):
            sync.receive(KEY.open(replayed), 10.2)


# ---------------------------------------------------------------------------- whom a node asks for the time


SCHEDULER, PARENT, OTHER = ("s", 1), ("p", 2), ("o", 3)


def test_a_parent_that_answers_is_asked_for_ever_and_without_one_the_scheduler():
    source = ClockSource(SCHEDULER)
    assert source.next_server(0.0) == SCHEDULER
    source.set_parent(PARENT)
    for second in range(99):
        assert source.next_server(float(second)) == PARENT
        if second % 3 == 2:  # two of three are lost
            source.answered()


def test_a_parent_that_does_not_answer_is_tried_again_later_and_the_scheduler_asked_meanwhile():
    source = ClockSource(SCHEDULER)
    source.set_parent(PARENT)
    assert [source.next_server(float(second)) for second in range(5)] == [PARENT] * 3 + [SCHEDULER] * 2
    source.answered()  # by the scheduler
    assert source.next_server(122.0) == SCHEDULER
    assert source.next_server(124.0) == PARENT


def test_another_parent_is_asked_at_once():
    source = ClockSource(SCHEDULER)
    source.set_parent(PARENT)
    for second in range(5):
        source.next_server(float(second))
    source.set_parent(PARENT)
    assert source.next_server(5.0) == SCHEDULER
    source.set_parent(OTHER)
    assert source.next_server(5.0) == OTHER
    source.set_parent(None)
    assert source.next_server(6.0) == SCHEDULER
