"""The packed form of sums under gradient compression, and what a node does with parts that cannot be one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.quantised import quantised, two_bit_planes_of
from netstorm.errors import ProtocolViolation
from netstorm.kvstore.forms import Quantised
from netstorm.kvstore.operations import Operation
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import Phase
from tests.unit.kvstore.rounds.test_aggregation import CHAIN, Ranks, legal_part

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
            assert len(payload) == 2 * two_bit_planes_of(child.contributors.bit_count())
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
def test_whatever_bytes_come_they_are_a_problem_or_can_be_added_and_written(data, elements, ranks):
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
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
    with pytest.raises(ProtocolViolation, match=message):
        ranks.nodes[1].receive(Peer(2), legal_part(**{**LEGAL, **changed}), payload, 0)
    values = [1, -1, 0, 0, 1, 1, -1, 0, 0, -1]
    results = [push(ranks, rank, keys[rank], values) for rank in range(3)]
    ranks.deliver_all()
    assert all((result / 3).tolist() == values for result in results)


def test_a_malformed_compressed_result_is_refused():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
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
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
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
    assert (to, part.codec, len(payload)) == (0, 1, two_bit_planes_of(2))


def test_results_are_written_in_units_of_the_threshold():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
    results = [push(ranks, rank, keys[rank], [1, -1, 0, 1], threshold=0.25) for rank in range(3)]
    ranks.deliver_all()
    assert all(result.tolist() == [0.75, -0.75, 0, 0.75] for result in results)
