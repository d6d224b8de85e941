"""Signatures of collective rounds, and the sizes of the keys that carry them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.codecs import (
    COLLECTIVE,
    ELEMENT_BYTES,
    MOST_BYTES,
    MOST_SEGMENTS,
    ROW_SPARSE,
    Element,
    Reduction,
    Signature,
    can_reduce,
    capacity_of,
    granted_at_first,
    granted_by,
    rounds_under_way,
)

signatures = st.builds(
    Signature,
    st.sampled_from(list(Reduction)),
    st.sampled_from(list(Element)),
    st.integers(1, MOST_SEGMENTS),
    st.integers(0, MOST_BYTES),
).filter(lambda found: can_reduce(found.reduction, found.element))


@given(signatures)
def test_a_signature_travels_as_a_number_of_63_bits(signature: Signature) -> None:
    codec = signature.codec()
    assert 0 <= codec < 2**63
    assert Signature.of_codec(codec) == signature


@given(st.integers(-(2**63), 2**64))
def test_any_other_number_is_no_signature(codec: int) -> None:
    found = Signature.of_codec(codec)
    assert found is None or (found.codec() == codec and can_reduce(found.reduction, found.element))


def test_signatures_are_no_other_keys_codecs() -> None:
    first = Signature(Reduction.SUM, Element.FLOAT32, 1, 0).codec()
    assert first not in range(-1, COLLECTIVE)


@given(st.integers(0, 2**34))
def test_a_round_has_most_of_its_keys_bytes(size: int) -> None:
    capacity = capacity_of(size) * ELEMENT_BYTES
    assert size <= capacity
    assert capacity <= 2**18 or capacity <= 1.25 * size + ELEMENT_BYTES


def test_a_group_needs_few_keys_whatever_it_sums() -> None:
    assert len({capacity_of(size) for size in range(0, 2**30, 65_536)}) < 60


@given(st.integers(1, 2**34))
def test_many_small_rounds_are_under_way_and_few_large_ones(elements: int) -> None:
    found = rounds_under_way(elements, COLLECTIVE)
    assert 2 <= found <= 32
    assert found == 2 or found * elements * ELEMENT_BYTES <= 2**24
    assert rounds_under_way(elements, ROW_SPARSE) == 2


@given(st.integers(2, 32), st.integers(0, 100))
def test_no_rank_waits_for_a_grant_before_it_must_wait_for_a_round(under_way: int, round: int) -> None:
    # With all rounds before `first` complete, a node may begin those up to first + under_way - 1.
    first = granted_at_first(under_way)
    assert first >= 0
    assert granted_by(round, under_way) >= round + 1
    assert granted_by(0, under_way) == under_way - 1
