"""SNTP packets: what ntplib builds, we read, and the other way round; everything else is refused."""

from __future__ import annotations

import math
import struct

import ntplib
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netstorm.errors import FrameError
from netstorm.pslite import sntp

NOON = 1_750_000_000.25
"""A time that doubles and SNTP both have exactly."""


def test_an_answer_carries_the_times_and_the_nonce():
    nonce = sntp.new_nonce(0xABCDE_FFFFF_123)
    data = sntp.answer(sntp.request(nonce), received=NOON, transmitted=NOON + 0.5)
    found = sntp.read_answer(data)
    assert (found.nonce, found.received, found.transmitted) == (nonce, NOON, NOON + 0.5)


def test_a_packet_is_48_bytes_in_both_directions_so_nobody_can_be_flooded_through_us():
    asked = sntp.request(sntp.new_nonce(1))
    assert len(asked) == len(sntp.answer(asked, received=NOON, transmitted=NOON)) == sntp.PACKET_BYTES


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


def test_a_server_says_by_how_much_it_may_be_off_or_that_it_does_not_know_the_time():
    asked = sntp.request(1.0)
    data = sntp.answer(asked, received=NOON, transmitted=NOON, hops=1, error=0.25)
    assert sntp.read_answer(data).error == 0.25
    with pytest.raises(FrameError, match="does not know the time"):
        sntp.read_answer(sntp.answer(asked, received=NOON, transmitted=NOON, error=math.inf))


def test_each_hop_from_the_scheduler_is_a_stratum():
    asked = sntp.request(1.0)
    for hops, stratum in [(0, 10), (2, 12), (99, 15)]:
        data = sntp.answer(asked, received=NOON, transmitted=NOON, hops=hops)
        assert data[1] == stratum
        assert sntp.read_answer(data).hops == stratum - 10


@pytest.mark.parametrize("mode", [0, 1, 2, 4, 5, 6, 7])
def test_only_a_clients_request_is_answered(mode):
    asked = ntplib.NTPPacket(version=4, mode=mode, tx_timestamp=12.0).to_data()
    with pytest.raises(FrameError, match="no client's request"):
        sntp.answer(asked, received=NOON, transmitted=NOON)


def test_an_answer_of_a_server_that_does_not_know_the_time_is_refused():
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


@given(st.integers(0, 2**52 - 1))
def test_every_nonce_survives_the_trip(bits):
    nonce = sntp.new_nonce(bits)
    assert sntp.read_answer(sntp.answer(sntp.request(nonce), received=NOON, transmitted=NOON)).nonce == nonce


def test_nonces_use_all_their_bits():
    assert len({sntp.new_nonce(1 << bit) for bit in range(52)}) == 52
