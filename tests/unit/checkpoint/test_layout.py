"""Where tensors' bytes are, and which rank writes which."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from netstorm.checkpoint.layout import ALIGNMENT, Layout

sizes = st.lists(st.integers(0, 1000) | st.integers(0, 100_000), max_size=12)


@st.composite
def cases(draw):
    found = draw(sizes)
    of_rank_0 = draw(st.sets(st.integers(0, len(found) - 1))) if found else set()
    return found, draw(st.integers(1, 9)), of_rank_0


@given(cases())
def test_the_shares_together_hold_every_byte_of_every_tensor_once(case):
    found, ranks, of_rank_0 = case
    layout = Layout.of(found, ranks, rank_0=of_rank_0)
    seen: dict[int, list[tuple[int, int]]] = {tensor: [] for tensor in range(len(found))}
    for rank in range(ranks):
        for tensor, begin, end, at in layout.pieces(rank):
            assert 0 <= at <= at + end - begin <= layout.cuts[rank + 1] - layout.cuts[rank]
            assert layout.cuts[rank] + at == layout.offsets[tensor] + begin
            seen[tensor].append((begin, end))
    for tensor, pieces in seen.items():
        assert sum(end - begin for begin, end in pieces) == found[tensor]
        assert sorted(pieces) == pieces
        assert all(first[1] == second[0] for first, second in itertools.pairwise(pieces))


@given(cases())
def test_tensors_are_aligned_and_do_not_overlap(case):
    found, ranks, of_rank_0 = case
    layout = Layout.of(found, ranks, rank_0=of_rank_0)
    spans = sorted(
        (offset, offset + size) for offset, size in zip(layout.offsets, found, strict=True) if size
    )
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert layout.total >= max((end for _, end in spans), default=0)


@given(cases())
def test_what_is_rank_0s_is_in_its_share_alone(case):
    found, ranks, of_rank_0 = case
    layout = Layout.of(found, ranks, rank_0=of_rank_0)
    others = {piece.tensor for rank in range(1, ranks) for piece in layout.pieces(rank)}
    assert not others & of_rank_0


@given(sizes, st.integers(1, 9))
def test_shares_are_equal_but_for_the_alignment(found, ranks):
    layout = Layout.of(found, ranks)
    shares = [layout.cuts[rank + 1] - layout.cuts[rank] for rank in range(ranks)]
    assert max(shares) - min(shares) <= ranks * ALIGNMENT
