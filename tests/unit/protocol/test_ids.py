from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import bits_from_wire, bits_of, bits_to_wire, ranks_in

rank_sets = st.sets(st.integers(0, 500))


@given(rank_sets)
def test_a_bit_set_holds_the_ranks_that_were_put_in(ranks):
    assert ranks_in(bits_of(ranks)) == tuple(sorted(ranks))


@given(rank_sets)
def test_a_bit_set_survives_the_wire_whatever_its_size(ranks):
    assert bits_from_wire(bits_to_wire(bits_of(ranks))) == bits_of(ranks)


@given(rank_sets, rank_sets)
def test_sets_overlap_exactly_if_their_bits_do(one, other):
    assert bool(bits_of(one) & bits_of(other)) == bool(one & other)


def test_no_ranks_take_no_bytes():
    assert bits_to_wire(0) == b""


def test_a_set_of_ranks_that_no_job_can_have_is_refused_at_once():
    with pytest.raises(ProtocolViolation, match="has 1000000 bytes: expected at most 1024"):
        bits_from_wire(b"\xff" * 1_000_000)
