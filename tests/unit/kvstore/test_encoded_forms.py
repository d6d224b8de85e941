"""The forms of codecs: 16 bits, packed whole numbers, some elements of many, maxima. What they refuse."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.compression.quantised import TWO_BIT_MOST, as_planes, packed_planes_of, quantised, sums_into
from netstorm.compression.sparse import Entries, decode_entries, encode_entries
from netstorm.errors import ProtocolViolation
from netstorm.kvstore.forms import Key, Maxima, Narrow, PackedForm, Quantised, Sparse
from netstorm.kvstore.operations import Operation
from netstorm.protocol.codecs import BFLOAT16, FLOAT16, MAXIMA, Element, narrow, packed, sparse
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import Phase
from tests.unit.kvstore.rounds.ranks import CHAIN, Ranks, legal_part

KEY = Key(0, "w", (40,), "float32")
CODECS = [narrow(FLOAT16), narrow(BFLOAT16), packed(1), packed(56), packed(254), packed(255)]

CODECS += [sparse(0), sparse(1), sparse(2.5), MAXIMA]


def entries(*pairs):
    numbers, values = zip(*pairs, strict=True)
    return Entries(np.array(numbers, np.int64), np.array(values, np.float32))


def number_planes(numbers, most):
    return as_planes(np.array(numbers, np.uint8), most)


def packed_sums(total, count, most):
    found = np.empty(count, np.float32)
    sums_into(found, total.to_send(), total.contributors.bit_count(), most)
    return found.tolist()


@pytest.mark.parametrize("codec", CODECS)
def test_the_form_of_a_codec_carries_its_number(codec):
    form = KEY.form_of(codec)
    assert form is not None
    assert form.codec == codec


@given(st.integers(-(1 << 70), 1 << 70) | st.integers(-(1 << 12), 1 << 13))
def test_any_number_is_a_form_with_that_number_or_none(codec):
    form = KEY.form_of(codec)
    assert form is None or form.codec == codec


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_only_float32_keys_have_encoded_rounds(dtype):
    assert all(Key(0, "w", (40,), dtype).form_of(codec) is None for codec in CODECS)


@given(st.sampled_from(CODECS), st.binary(max_size=48), st.integers(1, 40), st.integers(1, 300))
@settings(max_examples=75)
def test_whatever_bytes_come_they_are_a_problem_or_can_be_added_and_written(codec, data, elements, ranks):
    form, everybody = KEY.form_of(codec), (1 << ranks) - 1
    assert form is not None
    if form.problem(data, elements, everybody) is None:
        total = form.new_sum()
        total.add_received(bytearray(data), everybody)
        total.add_own(None, 1 << ranks)
        for payload in (total.to_send(), total.to_keep()):
            if (ranks + 1) * 255 < 1 << 16:
                assert payload is not None
                assert form.problem(bytes(payload), elements, total.contributors) is None
        destination: Any = [] if codec & 15 in (5, 6) else np.empty(elements, np.float32)
        form.write(destination, 0, elements, data, everybody)


@pytest.mark.parametrize(
    ("codec", "payload", "elements", "ranks", "problem"),
    [
        (narrow(FLOAT16), b"123", 2, 1, "has 3 bytes, not 4"),
        (narrow(BFLOAT16), b"", 2, 1, "has 0 bytes, not 4"),
        (MAXIMA, b"1234567", 2, 1, "has 7 bytes, not 8"),
        (packed(56), b"", 8, 1, "has 0 bytes, not 6: 8 sums over 1 ranks of 6 bits"),
        (packed(56), b"\xff" * 6, 8, 1, "has values that no sum over 1 ranks has"),
        (packed(56), b"\0" * 6, 8, 0, "has sums of 0 bits: expected 1 to 16"),
        (packed(255), b"\0" * 17, 8, 300, "has sums of 17 bits: expected 1 to 16"),
        (packed(1), b"\0", 8, 1, "has 1 bytes, not 2"),
        (packed(1), b"\0\x02", 8, 1, "has 2 halves: expected 0 or 1"),
        (packed(1), b"\xff\x01", 8, 1, "has values that no sum over 1 ranks has"),
        (sparse(0), b"1234567", 8, 1, "has 7 bytes: entries begin with 8"),
        (sparse(0), struct.pack("<II", 9, 9), 8, 3, "has 9 entries of 9, with 8 elements and 3 ranks"),
        (sparse(0), struct.pack("<II", 2, 1), 8, 3, "has 2 entries of 1, with 8"),
        (sparse(0), struct.pack("<II", 2, 25), 8, 3, "has 2 entries of 25, with 8"),
        (sparse(0), struct.pack("<IIf", 1, 1, 1), 8, 1, "has 12 bytes, which is too few for 1 entries"),
        (sparse(0), struct.pack("<II", 0, 0) + b"\0", 8, 1, "has 9 bytes and no entries"),
        (sparse(0), struct.pack("<IIfBB", 1, 1, 1, 0, 0), 8, 1, "has gaps for other than its 1 entries"),
        (sparse(0), struct.pack("<IIfBB", 1, 1, 1, 0, 255), 8, 1, "has gaps for other than its 1 entries"),
        (sparse(0), struct.pack("<IIfB", 1, 1, 1, 8), 8, 1, "has an entry 8 of 8 elements"),
    ],
)
def test_a_payload_that_no_correct_node_sends_is_named(codec, payload, elements, ranks, problem):
    form = KEY.form_of(codec)
    assert form is not None
    found = form.problem(payload, elements, (1 << ranks) - 1)
    assert found is not None
    assert found.startswith(problem)


def test_16_bits_are_summed_in_float32_and_rounded_once():
    total = Narrow(Element.FLOAT16).new_sum()
    for rank in range(3):
        values = np.array([1.0 if rank else 2048.0], np.float16)
        total.add_received(bytearray(values.tobytes()), 1 << rank)
    payload = total.to_send()
    assert payload is not None
    assert np.frombuffer(payload, np.float16).tolist() == [2050]  # 2048 + 1 is 2048 in float16


def test_a_missing_payload_is_written_as_zeros():
    found = np.ones(4, np.float32)
    Narrow(Element.BFLOAT16).write(found, 1, 3, None, 1)
    assert found.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("most", [1, 2, 5, 56, 255])
@given(st.data())
@settings(max_examples=15)
def test_packed_sums_are_exact_in_any_tree_with_ranks_that_contribute_nothing(most, data):
    form, everything = PackedForm(most), [0.0] * 11
    sums = []
    for rank in range(data.draw(st.integers(1, 9))):
        total = form.new_sum()
        numbers = data.draw(st.none() | st.lists(st.integers(0, most), min_size=11, max_size=11))
        planes = None if numbers is None else form.own(number_planes(numbers, most), 0, 11)
        total.add_own(planes, 1 << rank)
        if numbers is not None:
            everything = [old + number - most / 2 for old, number in zip(everything, numbers, strict=True)]
        sums.append(total)
    while len(sums) > 1:
        child = sums.pop(data.draw(st.integers(0, len(sums) - 1)))
        payload = child.to_send()
        assert payload is None or form.problem(payload, 11, child.contributors) is None
        parent = data.draw(st.sampled_from(sums))
        parent.add_received(None if payload is None else bytearray(payload), child.contributors)
    assert packed_sums(sums[0], 11, most) == everything


def test_a_sum_of_signs_that_is_sent_twice_counts_each_half_once():
    total = PackedForm(1).new_sum()
    total.add_own(number_planes([1, 0, 1], 1), 1)
    total.add_own(None, 2)
    assert packed_sums(total, 3, 1) == [0.5, -0.5, 0.5]
    assert packed_sums(total, 3, 1) == [0.5, -0.5, 0.5]
    total.add_received(None, 4)
    assert packed_sums(total, 3, 1) == [0.5, -0.5, 0.5]


def test_a_packed_sum_does_not_change_what_it_received():
    total = PackedForm(4).new_sum()
    payloads = [bytearray(number_planes([4, 1, 2], 4).tobytes()) for _ in range(2)]
    before = [bytes(payload) for payload in payloads]
    for rank, payload in enumerate(payloads):
        total.add_received(payload, 1 << rank)
    assert packed_sums(total, 3, 4) == [4, -2, 0]
    assert [bytes(payload) for payload in payloads] == before


@pytest.mark.parametrize(("start", "end"), [(0, 20), (0, 8), (8, 20), (3, 11), (5, 6), (17, 20)])
def test_own_numbers_are_those_of_the_chunk(start, end):
    numbers = np.arange(20) * 7 % 60
    total = PackedForm(60).new_sum()
    total.add_own(PackedForm(60).own(number_planes(numbers, 60), start, end), 1)
    assert packed_sums(total, end - start, 60) == (numbers[start:end] - 30).tolist()


def test_a_sparse_chunk_without_own_entries_contributes_nothing():
    form = Sparse(sparse(0))
    assert form.own(entries((3, 1.0), (9, 2.0)), 4, 9) is None
    found = form.own(entries((3, 1.0), (9, 2.0)), 3, 9)
    assert found is not None
    assert found.numbers.tolist() == [0]


def test_a_sparse_result_keeps_as_many_as_a_rank_sent_on_the_average_and_sums_keep_all():
    total = Sparse(sparse(1)).new_sum()
    total.add_own(entries((0, 1.0), (3, 5.0)), 1)
    total.add_received(encode_entries(entries((0, 3.0), (5, -9.0)), 2), 2)
    total.add_received(None, 4)
    form = Sparse(sparse(1))
    written: list[Any] = []
    for payload in (total.to_send(), total.to_keep()):
        form.write(written, 0, 8, payload, total.contributors)
    assert form.problem(written[0].content, 8, 7) is None
    assert [decode_entries(one.content)[0].numbers.tolist() for one in written] == [[0, 3, 5], [3, 5]]
    assert decode_entries(written[1].content)[1] == 4
    assert written[0][:2] == (0, 8)
    assert written[0].contributors == 7


def test_maxima_are_of_each_element_and_nan_is_the_largest():
    total = Maxima(np.dtype(np.float32)).new_sum()
    total.add_own(np.array([1, 5, 0], np.float32), 1)
    total.add_received(bytearray(np.array([2, np.nan, 0], np.float32).tobytes()), 2)
    total.add_received(None, 4)
    kept = total.to_keep()
    assert kept is not None
    np.testing.assert_array_equal(np.frombuffer(kept, np.float32), [2, np.nan, 0])
    assert total.contributors == 7


# ------------------------------------------------------------------------------------------- MXNet's two bits

RANKS = 9


def signs_of(values):
    values = np.array(values, np.float32)
    return quantised(values, np.zeros_like(values), np.float32(1))


def payload_of(values):
    """Return what a leaf sends for values of -1, 0 and 1; None: nothing."""
    total = Quantised().new_sum()
    total.add_own(signs_of(values).planes(0, len(values)), 1)
    sent = total.to_send()
    return None if sent is None else bytearray(sent)


def result_of(total, elements):
    found = np.full(elements, 7, np.float32)
    Quantised(0.5).write(found, 0, elements, total.to_send(), total.contributors)
    return (found * 2).tolist()


contributions = st.lists(st.lists(st.integers(-1, 1), min_size=11, max_size=11), min_size=1, max_size=RANKS)


@given(contributions, st.randoms(use_true_random=False))
def test_sums_are_exact_in_any_order_and_any_tree(values, chance):
    form = Quantised()
    sums = []
    for rank, value in enumerate(values):
        total = form.new_sum()
        total.add_own(form.own(signs_of(value), 0, 11), 1 << rank)
        sums.append(total)
    while len(sums) > 1:  # any two neighbours in a tree
        child = sums.pop(chance.randrange(len(sums)))
        parent = chance.choice(sums)
        payload = child.to_send()
        if payload is not None:
            assert form.problem(payload, 11, child.contributors) is None
            assert len(payload) == 2 * packed_planes_of(child.contributors.bit_count(), TWO_BIT_MOST)
        parent.add_received(None if payload is None else bytearray(payload), child.contributors)
    assert result_of(sums[0], 11) == np.sum(values, axis=0).tolist()
    assert sums[0].contributors == (1 << len(values)) - 1


def test_ranks_without_a_payload_count_as_zeros():
    total = Quantised().new_sum()
    total.add_own(None, 0b1)
    total.add_received(None, 0b110)
    assert total.to_send() is None
    total.add_received(payload_of([1, -1, 0]), 0b1000)
    assert result_of(total, 3) == [1, -1, 0]
    assert total.contributors == 0b1111


def test_a_received_payload_is_not_written_to():
    total = Quantised().new_sum()
    payloads = [payload_of([1, -1, 0]), payload_of([1, 1, 1])]
    before = [bytes(payload) for payload in payloads]
    for rank, payload in enumerate(payloads):
        total.add_received(payload, 1 << rank)
    total.to_send()
    assert [bytes(payload) for payload in payloads] == before


@given(st.binary(max_size=12), st.integers(1, 20), st.integers(1, 300))
def test_whatever_bytes_come_they_are_a_problem_or_a_sum_within_its_bounds(data, elements, ranks):
    everybody = (1 << ranks) - 1
    form = Quantised(0.5)
    if form.problem(data, elements, everybody) is None:
        total = form.new_sum()
        total.add_received(bytearray(data), everybody)
        total.add_own(signs_of([1] * elements).planes(0, elements), 1 << ranks)
        written = np.empty(elements, np.float32)
        form.write(written, 0, elements, data, everybody)
        assert (abs(written) <= 0.5 * ranks).all()
        assert [2 * value + 1 for value in written] == result_of(total, elements)


# --------------------------------------------------------------------------------------------- between ranks
def push(ranks, rank, key, values, threshold=1.0):
    """Push under compression; return the destination."""
    destination = np.full(key.elements, 9, np.float32)
    form = Quantised(threshold)
    operation = Operation(
        key=key, round=key.take_round(), source=signs_of(values), destination=destination,
        done=lambda _: None, form=form,
    )  # fmt: skip
    ranks.nodes[rank].submit(operation, now=0.0)
    ranks.collect(rank)
    return destination


LEAF = payload_of([1, 0, -1, 1])
TOO_LARGE = bytearray(b"\x0f\x0f")  # four times 3, where 2 is the most
LEGAL = {"codec": 1, "chunk": 0, "contributors": bits_to_wire(0b100)}


@pytest.mark.parametrize(
    ("changed", "payload", "message"),
    [
        ({}, LEAF + b"\0", "has 3 bytes, not 2: 4 sums over 1 ranks of 2 bits"),
        ({}, LEAF[:1], "has 1 bytes, not 2"),
        ({}, bytearray(16), "has 16 bytes, not 2"),
        ({}, bytearray(), "has 0 bytes, not 2"),
        ({}, TOO_LARGE, "has values that no sum over 1 ranks has"),
        ({"chunk": 2}, TOO_LARGE, "has values that no sum"),
        ({"codec": 0}, LEAF, "has 2 bytes, not 16"),
        ({"codec": 3}, LEAF, "has codec 3, which this key never has"),
    ],
)
def test_a_malformed_compressed_part_is_refused_and_changes_nothing(changed, payload, message):
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(10)
    with pytest.raises(ProtocolViolation, match=message):
        ranks.nodes[1].receive(Peer(2), legal_part(**{**LEGAL, **changed}), payload, 0)
    values = [1, -1, 0, 0, 1, 1, -1, 0, 0, -1]
    results = [push(ranks, rank, keys[rank], values) for rank in range(3)]
    ranks.deliver_all()
    assert all((result / 3).tolist() == values for result in results)


def test_a_malformed_compressed_result_is_refused():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
    push(ranks, 2, keys[2], [1, 1, 1, 1])
    lie = legal_part(codec=1, phase=Phase.BROADCAST, contributors=bits_to_wire(0b111))
    with pytest.raises(ProtocolViolation, match="has values that no sum over 3 ranks has"):
        ranks.nodes[2].receive(Peer(1), lie, bytearray(b"\x0f\x0f\x0f"), 0)  # 7, where 6 is the most


def test_early_parts_that_are_malformed_are_dropped_and_counted():
    ranks = Ranks(CHAIN)
    ranks.nodes[1].receive(Peer(2), legal_part(**LEGAL), TOO_LARGE, 0)
    ranks.add_key(1, 4)
    assert ranks.counters[1].get("protocol_violations") == 1


def test_plain_and_compressed_parts_of_one_round_are_not_mixed():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
    push(ranks, 1, keys[1], [1, 1, 1, 1])
    with pytest.raises(ProtocolViolation, match="round 0 of key 'k0' has codec 1 here and 0 elsewhere"):
        ranks.nodes[1].receive(Peer(2), legal_part(), bytearray(16), 0)


def test_a_round_that_others_began_in_another_codec_is_forgotten_with_a_word():
    ranks = Ranks(CHAIN)
    key = ranks.add_key(1, 4)
    ranks.nodes[1].receive(Peer(2), legal_part(), bytearray(16), 0)
    push(ranks, 1, key, [1, 1, 1, 1])
    assert ranks.counters[1].get("protocol_violations") == 1
    ranks.nodes[1].receive(Peer(2), legal_part(**LEGAL), LEAF, 0)
    ranks.collect(1)
    [(_, to, part, payload)] = ranks.in_flight
    assert (to, part.codec, len(payload)) == (0, 1, packed_planes_of(2, TWO_BIT_MOST))


def test_results_are_written_in_units_of_the_threshold():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
    results = [push(ranks, rank, keys[rank], [1, -1, 0, 1], threshold=0.25) for rank in range(3)]
    ranks.deliver_all()
    assert all(result.tolist() == [0.75, -0.75, 0, 0.75] for result in results)
