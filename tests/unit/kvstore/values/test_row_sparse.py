"""The sum of a chunk of rows, as `Aggregation` uses it, and what a peer may not send for one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.sparse import Rows, decode_rows, encode_rows
from netstorm.errors import ProtocolViolation
from netstorm.kvstore.forms import Key, RowParts, RowSparse
from netstorm.kvstore.rounds.aggregation import check_part
from netstorm.protocol.codecs import ROW_SPARSE
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import KeyGrant, Part, Phase
from netstorm.topology.network import Rank
from netstorm.topology.policy import Plan, Policy
from netstorm.topology.tree import Tree

FLOAT32 = np.dtype(np.float32)
FORM = RowSparse(FLOAT32, 2)


def rows(numbers, value, dtype=FLOAT32):
    return Rows(np.array(numbers, np.int64), np.full((len(numbers), 2), value, dtype))


def said(payload, dtype=FLOAT32):
    found = decode_rows(payload, 2, dtype)
    return dict(zip(found.numbers.tolist(), found.values[:, 0].tolist(), strict=True))


def test_no_rows_are_no_payload():
    total = FORM.new_sum()
    total.add_own(None, 0b1)
    total.add_received(None, 0b10)
    assert total.contributors == 0b11
    assert total.to_send() is total.to_keep() is None


def test_a_leafs_payload_is_a_copy_of_the_users_rows():
    own = rows([1, 3], 5)
    total = FORM.new_sum()
    total.add_own(own, 0b1)
    payload = total.to_keep()
    own.values[:] = 9
    assert said(payload) == {1: 5, 3: 5}


@pytest.mark.parametrize("own_first", [True, False])
def test_the_sum_has_the_rows_of_all_and_the_source_is_not_written(own_first):
    own = rows([1, 4], 1)
    total = FORM.new_sum()
    if own_first:
        total.add_own(own, 0b1)
    total.add_received(encode_rows(rows([0, 4], 10)), 0b10)
    total.add_received(encode_rows(rows([4, 5], 100)), 0b1100)
    if not own_first:
        total.add_own(own, 0b1)
    assert said(total.to_send()) == {0: 10, 1: 1, 4: 111, 5: 100}
    assert own.values.tolist() == [[1, 1]] * 2
    assert total.contributors == 0b1111


def test_a_payload_that_has_all_rows_is_added_to_in_place_and_forwarded_as_it_came():
    payload = encode_rows(rows([0, 1, 2], 10))
    total = FORM.new_sum()
    total.add_received(payload, 0b10)
    total.add_own(rows([1], 1), 0b1)
    assert total.to_send() is payload
    assert said(payload) == {0: 10, 1: 11, 2: 10}


def test_float16_is_summed_in_float32_and_rounded_once():
    half = np.dtype(np.float16)
    form = RowSparse(half, 2)
    total = form.new_sum()
    total.add_own(rows([1], 2048, half), 0b1)
    total.add_received(encode_rows(rows([1], 1, half)), 0b10)
    total.add_received(encode_rows(rows([1, 2], 1, half)), 0b100)
    assert said(total.to_send(), half) == {1: 2050, 2: 1}


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=5), st.randoms())
def test_the_order_of_contributions_is_of_no_consequence_to_whole_numbers(addends, chance):
    expected = {number: 0 for addend in addends for number in addend}
    contributions = []
    for place, addend in enumerate(addends):
        for number in addend:
            expected[number] += place + 1
        contributions.append((place, rows(sorted(addend), place + 1) if addend else None))
    chance.shuffle(contributions)
    total = FORM.new_sum()
    for place, one in contributions:
        if place == 0:
            total.add_own(one, 1)
        else:
            total.add_received(None if one is None else encode_rows(one), 1 << place)
    payload = total.to_send()
    assert (said(payload) if payload is not None else {}) == expected


def test_a_chunk_has_the_rows_of_its_elements_and_results_come_with_the_number_of_their_first_row():
    source = rows([0, 3, 4, 9], 7)
    first, second = FORM.own(source, 0, 6), FORM.own(source, 6, 12)
    assert first is not None
    assert second is not None
    assert (first.numbers.tolist(), second.numbers.tolist()) == ([0], [0, 1])
    assert FORM.own(source, 12, 18) is None
    taken: RowParts = []
    FORM.write(taken, 6, 12, encode_rows(second), 1)
    FORM.write(taken, 12, 18, None, 1)
    ((begin, found),) = taken
    assert (begin, found.numbers.tolist()) == (3, [0, 1])


def test_a_payload_must_fit_its_chunk():
    assert FORM.problem(encode_rows(rows([0, 2], 1)), 6, 0b1) is None
    assert FORM.problem(encode_rows(rows([0, 3], 1)), 6, 0b1) == "has row number 3, of 3 rows"
    assert FORM.problem(bytes(7), 6, 0b1) == "has 7 bytes, not 12 for each row"


@pytest.mark.parametrize(
    ("payload", "codec", "message"),
    [
        (encode_rows(rows([0, 1], 1)), ROW_SPARSE, None),
        (None, ROW_SPARSE, None),
        (encode_rows(rows([0, 3], 1)), ROW_SPARSE, "has row number 3, of 3 rows"),
        (encode_rows(rows([2, 1], 1)), ROW_SPARSE, "not in order"),
        (encode_rows(rows([1, 1], 1)), ROW_SPARSE, "not in order, or one twice"),
        (encode_rows(rows([1], 1))[:-1], ROW_SPARSE, "has 11 bytes, not 12 for each row"),
        (b"", ROW_SPARSE, "has 0 bytes"),
        (bytes(24), 0, "codec 0, which this key never has"),
    ],
)
def test_malformed_rows_from_a_peer_are_a_protocol_violation(payload, codec, message):
    key = Key(0, "embedding", (5, 2), "float32", form=ROW_SPARSE)
    key.set_grant(KeyGrant(namespace=0, name="embedding", key=0, first_slot=0, offset=0, chunk_size=6))
    plan = Plan(Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0)),), weights=(1,)), 0)
    part = Part(
        key=0,
        chunk=0,
        round=0,
        version=1,
        tree=0,
        phase=Phase.REDUCE,
        contributors=bits_to_wire(0b10),
        dtype="float32",
        priority=0,
        codec=codec,
    )

    def check():
        return check_part(Peer(1), part, payload, key=key, plan=plan, complete=-1, bound=1)

    if message is None:
        assert check() == (key.form, 0b10)
    else:
        with pytest.raises(ProtocolViolation, match=f"chunk 0, round 0 of key 'embedding' .*{message}"):
            check()
