"""How often in a row ranks were missing, and which must not be missing again."""

from __future__ import annotations

from netstorm.kvstore.rounds.bounded_loss import MOST_MISSED, MissedRounds


def test_each_missed_result_adds_a_gradient_to_the_next_contribution():
    missed = MissedRounds()
    assert missed.gradients(1, 0, 0b110) == 2
    missed.record(1, 0, 0b100)
    assert missed.gradients(1, 0, 0b110) == 3
    assert missed.gradients(1, 1, 0b110) == 2
    assert missed.gradients(2, 0, 0b110) == 2


def test_a_result_with_a_rank_begins_anew():
    missed = MissedRounds()
    missed.record(1, 0, 0b101)
    missed.record(1, 0, 0b001)
    assert missed.gradients(1, 0, 0b100) == 1
    assert missed.gradients(1, 0, 0b001) == 3
    missed.record(1, 0, 0)
    assert missed.gradients(1, 0, 0b001) == 1


def test_a_rank_that_was_missing_too_often_must_be_there():
    missed = MissedRounds()
    for _ in range(MOST_MISSED):
        assert missed.may_miss(1, 0, 0b10)
        missed.record(1, 0, 0b10)
    assert not missed.may_miss(1, 0, 0b10)
    assert not missed.may_miss(1, 0, 0b110)
    assert missed.may_miss(1, 0, 0b100)
    assert missed.may_miss(1, 0, 0)
    assert missed.may_miss(1, 1, 0b10)
