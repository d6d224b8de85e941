"""Collective rounds on one node: chunks of segments, every reduction in every type, rounding as PyTorch's."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.kvstore.forms import STORED, ChunkLayout, ChunkSum, Collective, narrowed, widened
from netstorm.protocol.codecs import Element, Reduction, Signature, can_reduce
from netstorm.protocol.messages import KeyGrant

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
