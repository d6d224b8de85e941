"""SNTP packets that prove that their sender holds the job's key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import FrameError
from netstorm.pslite import sntp
from netstorm.pslite.sntp import MAC_BYTES, ClockSync, PacketKey, Unauthenticated

KEY = PacketKey(b"k" * 32)
SEALED = KEY.seal(sntp.request(sntp.new_nonce(1234567)))


def answered(sealed: bytes, key: PacketKey = KEY) -> bytes:
    return key.seal(sntp.answer(key.open(sealed), received=1000.0, transmitted=1000.0))


@given(st.binary(min_size=48, max_size=48))
def test_what_a_holder_seals_every_holder_opens(packet):
    sealed = KEY.seal(packet)
    assert len(sealed) == len(packet) + MAC_BYTES
    assert PacketKey(b"k" * 32).open(sealed) == packet


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


def test_an_answer_is_no_longer_than_its_request():
    assert len(answered(SEALED)) == len(SEALED)


def test_a_request_sent_back_is_no_answer():
    with pytest.raises(FrameError, match="no server's answer"):
        sntp.read_answer(KEY.open(SEALED))


def test_an_answer_counts_once_and_for_its_own_request_alone():
    sync = ClockSync(seed=1)
    first = answered(KEY.seal(sync.poll(10.0)))
    other = answered(KEY.seal(ClockSync(seed=2).poll(10.0)))
    sync.receive(KEY.open(first), 10.1)
    for replayed in (first, other):
        with pytest.raises(FrameError, match="not made"):
            sync.receive(KEY.open(replayed), 10.2)
