"""What is missing from chunks that could end: estimates, shares, and what is within no bound."""

from __future__ import annotations

import math

import pytest

from netstorm.kvstore.rounds.bounded_loss import EndedChunks, OpenChunk, all_ended


def chunk(*, elements=10, arrived=3, gradients=3, missing=0, mass=6.0):
    return OpenChunk(elements, arrived, gradients, missing, mass)


def test_nothing_is_lost_of_complete_chunks():
    assert all_ended([chunk()]) == [EndedChunks(6.0, 0.0)]


def test_a_missing_gradient_counts_as_the_mean_of_those_that_are_there():
    assert all_ended([chunk(missing=1)]) == [EndedChunks(8.0, 2.0)]
    assert all_ended([chunk(missing=3)]) == [EndedChunks(12.0, 6.0)]


def test_gradients_of_earlier_steps_do_not_count_again():
    """Three ranks, one of which was missing three times: six gradients of 1 each."""
    assert all_ended([chunk(gradients=6, missing=1)]) == [EndedChunks(4.0, 1.0)]
    assert all_ended([chunk(gradients=6)]) == [EndedChunks(3.0, 0.0)]


def test_where_all_are_zeros_it_counts_as_in_the_other_chunks():
    zeros, other = all_ended([chunk(mass=0.0, missing=2, elements=5), chunk(mass=6.0, elements=15)])
    assert zeros.lost == pytest.approx(2 * 5 * 6.0 / 60)
    assert other.lost == 0


def test_shares_add_up():
    ended = sum(all_ended([chunk(missing=1), chunk(mass=12.0)]), EndedChunks(20.0, 1.0))
    assert ended.share == pytest.approx(3.0 / 40.0)


@pytest.mark.parametrize("mass", [math.nan, math.inf, 0.0])
def test_what_cannot_be_compared_is_within_no_bound(mass):
    total = sum(all_ended([chunk(mass=mass, missing=1)]), EndedChunks())
    assert not total.share <= 1.0
