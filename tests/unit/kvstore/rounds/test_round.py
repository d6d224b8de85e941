"""Rounds become complete in any order, and are remembered as a number and the few beyond it."""

from __future__ import annotations

import itertools

import pytest

from netstorm.kvstore.rounds.round import CompleteRounds


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_what_is_complete_is_known_in_whatever_order_it_has_become_so(order):
    rounds = CompleteRounds()
    rounds.add_key(7)
    done = set()
    for round in order:
        rounds.add(7, round)
        done.add(round)
        assert {one for one in range(-1, 6) if one >= 0 and (7, one) in rounds} == done
        assert rounds.up_to[7] == next(one for one in range(6) if one not in done) - 1


def test_nothing_is_complete_of_a_key_that_is_not_known():
    assert (7, 0) not in CompleteRounds()


def test_to_hear_of_a_key_again_changes_nothing():
    rounds = CompleteRounds()
    rounds.add_key(7)
    rounds.add(7, 0)
    rounds.add_key(7)
    assert rounds.up_to[7] == 0
