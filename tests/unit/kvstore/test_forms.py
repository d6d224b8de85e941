"""What a chunk's bytes mean: keys, dense, collective and row-sparse values."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.sparse import Rows, decode_rows, encode_rows
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.kvstore.forms import (
    STORED,
    ChunkLayout,
    ChunkSum,
    Collective,
    Dense,
    Key,
    RowParts,
    RowSparse,
    narrowed,
    widened,
)
from netstorm.kvstore.rounds.aggregation import check_part
from netstorm.protocol.codecs import ROW_SPARSE, Element, Reduction, Signature, can_reduce
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import KeyGrant
from netstorm.topology.network import Rank
from netstorm.topology.policy import Plan, Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.rounds.ranks import legal_part


def granted(first_slot=0, offset=0):
    return KeyGrant(namespace=0, name="w", key=0, first_slot=first_slot, offset=offset, chunk_size=4)


def test_chunks_cover_the_key_once_and_lie_behind_one_another_in_the_job():
    layout = ChunkLayout.of_key(elements=10, itemsize=2, grant=granted(offset=6))
    assert layout.bounds == [(0, 4), (4, 8), (8, 10)]
    assert layout.offsets == [6, 14, 22]


def test_chunks_have_successive_slots():
    assert list(ChunkLayout.of_key(elements=9, itemsize=8, grant=granted(first_slot=3)).slots) == [3, 4, 5]


def test_an_empty_key_has_no_chunks():
    assert ChunkLayout.of_key(elements=0, itemsize=4, grant=granted(offset=8)).chunks == 0


def test_rounds_count_pushes_from_zero():
    key = Key(0, "w", (2, 3), "float32")
    assert [key.take_round(), key.take_round()] == [0, 1]
    assert key.last_taken == 1
    assert key.elements == 6


def test_a_type_that_cannot_be_summed_is_refused_by_name():
    with pytest.raises(UsageError, match="key 'w' has type complex64; NetStorm can sum float16"):
        Key(0, "w", (1,), "complex64")


def test_an_unknown_dimension_is_refused():
    with pytest.raises(UsageError, match="dimensions must be known"):
        Key(0, "w", (-1, 3), "float32")


# ----------------------------------------------------------------------------------------------- dense values


def empty_sum(dtype="float32"):
    return Dense(np.dtype(dtype)).new_sum()


def received(values, dtype="float32"):
    return bytearray(np.asarray(values, dtype).tobytes())


def values_of(payload, dtype="float32"):
    return np.frombuffer(payload, dtype).tolist()


def test_a_leaf_sends_the_users_own_memory_without_a_copy():
    own = np.array([1, 2], np.float32)
    total = empty_sum()
    total.add_own(own, 0b1)
    assert total.to_send() is own


def test_a_root_keeps_no_view_of_the_users_memory():
    own = np.array([1, 2], np.float32)
    total = empty_sum()
    total.add_own(own, 0b1)
    kept = total.to_keep()
    own[:] = 9
    assert values_of(kept) == [1, 2]


@pytest.mark.parametrize("own_first", [True, False])
def test_contributions_add_up_in_any_order_and_the_source_is_not_written(own_first):
    own = np.array([1, 2], np.float32)
    total = empty_sum()
    if own_first:
        total.add_own(own, 0b1)
    total.add_received(received([10, 20]), 0b10)
    total.add_received(received([100, 200]), 0b1100)
    if not own_first:
        total.add_own(own, 0b1)
    assert values_of(total.to_send()) == [111, 222]
    assert own.tolist() == [1, 2]
    assert total.contributors == 0b1111


def test_a_received_payload_is_added_to_in_place_and_forwarded_as_it_came():
    payload = received([10, 20])
    total = empty_sum()
    total.add_received(payload, 0b10)
    total.add_own(np.array([1, 2], np.float32), 0b1)
    assert total.to_send() is payload


def test_zeros_need_no_memory():
    total = empty_sum()
    total.add_own(None, 0b1)
    total.add_received(None, 0b10)
    assert total.to_send() is None
    assert total.to_keep() is None
    assert total.contributors == 0b11


def test_float16_is_rounded_once_a_hop_not_once_an_addend():
    # 2048 + 1 is not a float16: adding in float16 would lose each 1
    total = empty_sum("float16")
    total.add_own(np.array([2048], np.float16), 0b1)
    for rank in range(1, 5):
        total.add_received(received([1], "float16"), 1 << rank)
    assert values_of(total.to_send(), "float16") == [2052]


def test_overflow_is_the_users_to_see_and_no_warning():
    total = empty_sum("float16")
    total.add_own(np.array([60000], np.float16), 0b1)
    total.add_received(received([60000], "float16"), 0b10)
    assert values_of(total.to_send(), "float16") == [np.inf]


def test_integers_wrap_around():
    total = empty_sum("uint8")
    total.add_own(np.array([250], np.uint8), 0b1)
    total.add_received(received([10], "uint8"), 0b10)
    assert values_of(total.to_send(), "uint8") == [4]


def test_a_payload_of_another_length_is_a_problem():
    dense = Dense(np.dtype("float32"))
    assert dense.problem(bytes(8), 2, 0b1) is None
    assert dense.problem(bytes(9), 2, 0b1) == "has 9 bytes, not 8"


# ------------------------------------------------------------------------------------------ collective values

WHOLE = [Element.INT8, Element.INT16, Element.INT32, Element.INT64, Element.UINT8, Element.UINT64]


def summed(element: Element, reduction: Reduction, rows: list[Any], own: int) -> Any:
    """Return what one node makes of its own row and those that it receives, as the payload it sends."""
    total = ChunkSum(element, reduction)
    for rank, row in enumerate(rows):
        if rank == own:
            total.add_own(row, 1 << rank)
        else:
            total.add_received(bytearray(row.tobytes()), 1 << rank)
    assert total.contributors == (1 << len(rows)) - 1
    payload = total.to_keep()
    assert payload is not None
    return np.frombuffer(payload, STORED[element])


@given(st.sampled_from(WHOLE), st.sampled_from(list(Reduction)[:8]), st.integers(1, 5), st.data())
def test_reductions_of_whole_numbers_are_numpys(element: Any, reduction: Any, ranks: int, data: Any) -> None:
    dtype = STORED[element]
    rows = [
        np.array(data.draw(st.lists(st.integers(0, 5), min_size=4, max_size=4)), dtype) for _ in range(ranks)
    ]
    found = summed(element, reduction, [row.copy() for row in rows], data.draw(st.integers(0, ranks - 1)))
    expected: dict[Reduction, Any] = {
        Reduction.SUM: lambda: reduce(np.add, rows),
        Reduction.AVERAGE: lambda: reduce(np.add, rows),  # divided where it is written
        Reduction.PRODUCT: lambda: reduce(np.multiply, rows),
        Reduction.MINIMUM: lambda: np.min(rows, axis=0),
        Reduction.MAXIMUM: lambda: np.max(rows, axis=0),
        Reduction.AND: lambda: reduce(np.bitwise_and, rows),
        Reduction.OR: lambda: reduce(np.bitwise_or, rows),
        Reduction.XOR: lambda: reduce(np.bitwise_xor, rows),
    }
    assert np.array_equal(found, expected[reduction]())


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction.SUM, [0, 1, 1, 1]),
        (Reduction.MAXIMUM, [0, 1, 1, 1]),
        (Reduction.PRODUCT, [0, 0, 0, 1]),
        (Reduction.MINIMUM, [0, 0, 0, 1]),
        (Reduction.XOR, [0, 1, 1, 0]),
    ],
)
def test_truth_values_stay_truth_values(reduction: Reduction, expected: list[int]) -> None:
    rows = [np.array([0, 0, 1, 1], np.uint8), np.array([0, 1, 0, 1], np.uint8)]
    assert list(summed(Element.BOOL, reduction, rows, 0)) == expected


@given(st.lists(st.floats(width=32), min_size=1))
def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    found = widened(narrowed(exact, Element.BFLOAT16), Element.BFLOAT16)
    for value, near in zip(exact, found, strict=True):
        if np.isnan(value):
            assert np.isnan(near)
            continue
        below = np.float32(np.uint32(value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
        with np.errstate(over="ignore"):
            above = np.uint32((int(value.view(np.uint32)) & 0xFFFF0000) + 0x10000).view(np.float32)
        if value == below:
            assert near == below
        elif np.isfinite(above):
            closest = min((below, above), key=lambda one: abs(float(one) - float(value)))
            assert abs(float(near) - float(value)) == abs(float(closest) - float(value))
        else:
            assert near in (below, above)


def test_sums_of_bfloat16_are_kept_in_float32_within_a_node() -> None:
    small = narrowed(np.full(3, 2.0**-9, np.float32), Element.BFLOAT16)
    one = narrowed(np.ones(3, np.float32), Element.BFLOAT16)
    # Rounded after each addition, 1 + 2^-9 would stay 1.
    total = summed(Element.BFLOAT16, Reduction.SUM, [one, small, small, small, small], 0)
    assert (widened(total, Element.BFLOAT16) == 1 + 2.0**-7).all()


@pytest.mark.parametrize(
    ("element", "total", "ranks", "expected"),
    [
        (Element.INT32, [7, -7, 6, 0], 3, [2, -2, 2, 0]),
        (Element.UINT8, [7, 255, 6, 0], 3, [2, 85, 2, 0]),
        (Element.FLOAT32, [7, -7, 6, 0], 2, [3.5, -3.5, 3, 0]),
        (Element.FLOAT16, [7, -7, 6, 0], 2, [3.5, -3.5, 3, 0]),
    ],
)
def test_an_average_of_whole_numbers_is_rounded_towards_zero(
    element: Element, total: list[int], ranks: int, expected: list[float]
) -> None:
    values = np.array(total, STORED[element])
    form = Collective(Signature(Reduction.AVERAGE, element, 1, values.nbytes))
    target = np.empty_like(values)
    form.write((target,), 0, values.nbytes, values, (1 << ranks) - 1)
    assert list(target) == expected


@given(st.integers(1, 5), st.integers(0, 70), st.integers(1, 4))
def test_the_chunks_of_a_round_cover_each_segment_once(segments: int, size: int, chunk: int) -> None:
    signature = Signature(Reduction.COPY, Element.BYTES, segments, size)
    grant = KeyGrant(namespace=0, name="k", key=0, first_slot=3, offset=64, chunk_size=4 * chunk)
    layout = ChunkLayout.of_round(signature, 65_536, grant)
    assert layout.chunks == signature.chunks(16 * chunk)
    covered = [byte for start, end in layout.bounds for byte in range(start, end)]
    assert covered == list(range(segments * size))
    assert all(start // size == (end - 1) // size for start, end in layout.bounds)
    assert layout.offsets == sorted(layout.offsets)


def test_a_rank_gives_and_takes_only_its_segments() -> None:
    form = Collective(Signature(Reduction.COPY, Element.BYTES, 3, 8))
    mine = np.arange(8, dtype=np.uint8)
    source = (None, mine, None)
    assert form.own(source, 0, 8) is None
    assert list(form.own(source, 8, 12)) == [0, 1, 2, 3]  # type: ignore[arg-type]
    form.write((None, mine, None), 0, 8, b"x" * 8, 1)
    assert list(mine) == list(range(8))
    form.write((None, mine, None), 12, 16, bytes([9] * 4), 1)
    assert list(mine) == [0, 1, 2, 3, 9, 9, 9, 9]


def test_a_payload_of_another_size_is_refused() -> None:
    form = Collective(Signature(Reduction.SUM, Element.FLOAT32, 1, 8))
    assert form.problem(b"12345678", 8, 1) is None
    assert form.problem(b"1234567", 8, 1) == "has 7 bytes, not 8"


def test_bits_are_reduced_of_whole_numbers_alone_and_bytes_not_at_all() -> None:
    assert not can_reduce(Reduction.AND, Element.FLOAT32)
    assert not can_reduce(Reduction.SUM, Element.BYTES)
    assert not can_reduce(Reduction.AVERAGE, Element.BOOL)
    assert can_reduce(Reduction.COPY, Element.BYTES)


def test_the_place_of_a_rank_that_has_given_nothing_is_zero() -> None:
    form = Collective(Signature(Reduction.COPY, Element.BYTES, 2, 8))
    target = np.full(8, 7, np.uint8)
    form.write((None, target), 8, 12, None, 0b1)
    assert target.tolist() == [0, 0, 0, 0, 7, 7, 7, 7]


# ------------------------------------------------------------------------------------------------------- rows

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
    part = legal_part(contributors=bits_to_wire(0b10), codec=codec)

    def check():
        return check_part(Peer(1), part, payload, key=key, plan=plan, complete=-1, bound=1)

    if message is None:
        assert check() == (key.form, 0b10)
    else:
        with pytest.raises(ProtocolViolation, match=f"chunk 0, round 0 of key 'embedding' .*{message}"):
            check()
