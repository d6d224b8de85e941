"""Votes on the job's state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from netstorm.training.votes import Vote, count_votes


def test_the_state_of_most_ranks_is_right_and_the_others_are_named() -> None:
    assert count_votes({0: 8, 1: 9, 4: 9, 5: 7}) == Vote(digest=9, source=1, differing=(0, 5))


def test_of_equally_many_the_lowest_rank_is_right() -> None:
    assert count_votes({3: 8, 1: 9}) == Vote(digest=9, source=1, differing=(3,))


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 3), min_size=1))
def test_no_digest_has_more_votes_and_the_source_has_it(digests: dict[int, int]) -> None:
    vote = count_votes(digests)
    votes = list(digests.values())
    assert votes.count(vote.digest) == max(votes.count(one) for one in votes)
    assert digests[vote.source] == vote.digest
    assert vote.differing == tuple(sorted(rank for rank in digests if digests[rank] != vote.digest))
