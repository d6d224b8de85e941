from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.lab.testing.recorder import part
from netstorm.pslite.session import ReceivingHalf

deliveries = st.integers(1, 12).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.integers(1, count), max_size=40))
)


def arrival(number):
    return part(number), None, 0


def deliver(half, sequence):
    return (
        []
        if half.has(sequence)
        else [message.chunk for message, _, _ in half.receive(sequence, arrival(sequence))]
    )


@given(deliveries)
def test_an_unordered_session_delivers_each_message_once_and_at_once(case):
    _, sequences = case
    half = ReceivingHalf(ordered=False)
    seen = set()
    for sequence in sequences:
        assert deliver(half, sequence) == ([] if sequence in seen else [sequence])
        seen.add(sequence)


@given(deliveries)
def test_an_ordered_session_delivers_exactly_the_prefix_that_is_here(case):
    _, sequences = case
    half = ReceivingHalf(ordered=True)
    delivered = []
    seen = set()
    for sequence in sequences:
        delivered += deliver(half, sequence)
        seen.add(sequence)
        prefix = next(number for number in range(1, 99) if number not in seen) - 1
        assert delivered == list(range(1, prefix + 1))


@given(deliveries, st.booleans())
def test_what_is_reported_is_what_is_here(case, ordered):
    count, sequences = case
    half = ReceivingHalf(ordered=ordered)
    for sequence in sequences:
        deliver(half, sequence)
    received, beyond = half.received_numbers()
    assert set(range(1, received + 1)) | set(beyond) == set(sequences)
    assert received + 1 not in sequences
    assert list(beyond) == sorted(set(beyond))
    assert all(half.has(sequence) == (sequence in sequences) for sequence in range(1, count + 1))


def test_a_sender_that_leaves_out_a_message_for_ever_cannot_fill_the_memory():
    half = ReceivingHalf(ordered=True)
    for sequence in range(2, 16_386):
        assert half.receive(sequence, arrival(sequence)) == []
    with pytest.raises(ProtocolViolation, match="1 is missing"):
        half.receive(16_386, arrival(16_386))
    assert len(half.receive(1, arrival(1))) == 16_385
