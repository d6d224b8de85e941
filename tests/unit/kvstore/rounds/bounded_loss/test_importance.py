"""DGT's ranking of chunks by their results."""

from __future__ import annotations

import math

from netstorm.kvstore.rounds.bounded_loss import Importance


def importance(*means, key=0):
    found = Importance()
    for chunk, mean in enumerate(means):
        found.record(key, chunk, len(means), mean)
    return found


def test_chunks_with_large_values_go_first_and_equal_ones_in_their_order():
    assert importance(1.0, 5.0, 1.0, 9.0).order(0, 4) == [2, 1, 3, 0]


def test_there_is_no_order_before_all_chunks_are_known():
    found = Importance()
    found.record(0, 1, 3, 1.0)
    assert found.order(0, 3) is None
    assert found.order(1, 3) is None


def test_a_mean_follows_new_values_slowly():
    found = importance(1.0, 2.0)
    found.record(0, 0, 2, 3.0)  # .7 of 1 and .3 of 3
    assert found.order(0, 2) == [1, 0]
    found.record(0, 0, 2, 5.0)
    assert found.order(0, 2) == [0, 1]


def test_the_most_important_fraction_is_that_of_all_keys():
    found = importance(1.0, 5.0)
    for chunk, mean in enumerate((2.0, 9.0)):
        found.record(7, chunk, 2, mean)
    assert found.chosen([0, 7], 0.5) == {(0, 1), (7, 1)}
    assert found.chosen([0, 7], 0.51) == {(0, 1), (7, 1), (7, 0)}


def test_of_equal_chunks_no_more_are_important_than_asked_for():
    assert importance(0.0, 0.0, 7.0, 0.0, 0.0).chosen([0], 0.4) == {(0, 2), (0, 0)}


def test_everything_is_important_while_nothing_is_known_and_nothing_is_without_dgt():
    assert Importance().chosen([0], 0.1) is None
    assert importance(1.0, 2.0).chosen([0, 1], 0.1) is None
    assert importance(math.nan, 1.0).chosen([0], 0.1) is None
    assert Importance().chosen([0], 0.0) == set()
