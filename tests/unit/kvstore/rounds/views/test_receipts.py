"""Results are kept for ranks that do not contribute, as far as these have not said that they have them."""

from __future__ import annotations

import math

from netstorm.kvstore.rounds.views import Receipts


def test_without_newcomers_nothing_limits_what_is_dropped():
    receipts = Receipts()
    receipts.set_members((0, 1, 2), ())
    assert receipts.limit(0, 0b111) == math.inf


def test_a_silent_rank_has_nothing_until_it_says_so():
    receipts = Receipts()
    receipts.set_members((0, 1, 2), (1, 2))
    assert receipts.limit(0, 0b001) == -1
    receipts.record(1, {0: 5})
    receipts.record(2, {0: 3, 1: 9})
    assert receipts.limit(0, 0b001) == 3
    assert receipts.limit(1, 0b001) == -1


def test_what_a_rank_that_was_silent_has_said_counts_until_results_have_its_contribution():
    receipts = Receipts()
    receipts.set_members((0, 1), (1,))
    receipts.record(1, {0: 5})
    receipts.set_members((0, 1), ())
    assert receipts.limit(0, 0b01) == 5
    assert receipts.limit(0, 0b11) == math.inf


def test_nobody_waits_for_a_rank_that_has_left_nor_counts_what_its_place_had_before():
    receipts = Receipts()
    receipts.set_members((0, 1), (1,))
    receipts.record(1, {0: 5})
    receipts.forget(1)
    assert receipts.limit(0, 0b01) == -1
    receipts.set_members((0,), ())
    assert receipts.limit(0, 0b01) == math.inf


def test_ranks_that_were_never_silent_need_not_say_anything():
    receipts = Receipts()
    receipts.record(1, {0: 5})
    receipts.forget(1)
    assert receipts.limit(0, 0) == math.inf
