"""Rounds that end without late contributions: what is missing, what is important, which parts are taken."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.forms import Collective, Dense, Quantised
from netstorm.kvstore.rounds.bounded_loss import (
    MOST_MISSED,
    EndedChunks,
    Importance,
    MissedRounds,
    OpenChunk,
    all_ended,
    mass_of,
    mass_of_payload,
)
from netstorm.protocol.codecs import Element, Reduction, Signature
from netstorm.protocol.frames import bits_to_wire
from netstorm.protocol.messages import LossTerms, Phase
from tests.unit.kvstore.rounds.ranks import CHAIN, Ranks

FLOATS = Dense(np.dtype(np.float32))
BFLOATS = Collective(Signature(Reduction.SUM, Element.BFLOAT16, 1, 8))


def test_the_mass_of_floats_is_the_sum_of_absolute_values():
    values = np.array([1.5, -2.0, 0.0], np.float32)
    assert mass_of(values, FLOATS, 3) == 3.5
    assert mass_of_payload(memoryview(values.tobytes()), FLOATS, 3) == 3.5
    assert mass_of(np.full(4, 60_000, np.float16), Dense(np.dtype(np.float16)), 4) == 240_000
    assert math.isnan(mass_of(np.array([np.nan], np.float32), FLOATS, 1))


def test_bfloat16_is_read_as_what_it_is():
    bits = (np.array([1.0, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert mass_of(bits, BFLOATS, 4) == 3.0
    assert mass_of_payload(bits.tobytes(), BFLOATS, 4) == 3.0


def test_zeros_have_none_and_other_forms_count_elements():
    assert mass_of(None, FLOATS, 7) == 0
    assert mass_of_payload(None, FLOATS, 7) == 0
    assert mass_of(np.ones(7, np.int32), Dense(np.dtype(np.int32)), 7) == 7
    assert mass_of(object(), Quantised(), 7) == 7
    assert mass_of_payload(b"\0\0", Quantised(), 7) == 7


# ----------------------------------------------------------------- what is missing from chunks that could end


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


# ------------------------------------------------------------------- DGT's ranking of chunks by their results


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


# ---------------------------------------------------------------------- how often in a row ranks were missing


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


# ----------------------------------------------------------------------------------- parts without some ranks

TERMS = LossTerms(bound=0.5, deadline_s=1.0, mass=4.0)

CHILD, NODE, ROOT = 2, 1, 0
"""Of the chain."""


@pytest.fixture
def ranks():
    found = Ranks(CHAIN)
    keys = found.add_keys(4)
    for rank in range(3):
        found.push(rank, keys[rank], np.ones(4))
    return found


def sent(ranks, sender, **changes):
    """Return the part that a rank has sent first, with changes."""
    place = next(n for n, parcel in enumerate(ranks.in_flight) if parcel[0] == sender)
    sender, receiver, part, data = ranks.in_flight.pop(place)
    return sender, receiver, msgspec.structs.replace(part, **changes), data


def sum_of_two(ranks, **changes):
    """Return the part of the node in the middle for the root, with changes."""
    ranks.deliver(sent(ranks, CHILD))
    return sent(ranks, NODE, **changes)


def test_a_sum_without_a_rank_of_the_subtree_is_taken_only_if_the_round_may_end_so(ranks):
    some = bits_to_wire(1 << CHILD)
    parcel = sum_of_two(ranks, contributors=some)
    with pytest.raises(ProtocolViolation, match="not the sender's subtree"):
        ranks.deliver(parcel)
    sender, receiver, part, data = parcel
    ranks.deliver((sender, receiver, msgspec.structs.replace(part, loss=TERMS), data))


def test_other_ranks_than_those_of_the_subtree_are_never_in_a_sum(ranks):
    parcel = sum_of_two(ranks, contributors=bits_to_wire(0b101), loss=TERMS)
    with pytest.raises(ProtocolViolation, match="not the sender's subtree"):
        ranks.deliver(parcel)


@pytest.mark.parametrize(
    "terms",
    [
        LossTerms(0.0, 1.0),
        LossTerms(1.0, 1.0),
        LossTerms(float("nan"), 1.0),
        LossTerms(0.5, 0.0),
        LossTerms(0.5, float("inf")),
    ],
)
def test_terms_that_no_node_has_are_refused(ranks, terms):
    parcel = sum_of_two(ranks, loss=terms)
    with pytest.raises(ProtocolViolation, match="expected a bound between 0 and 1"):
        ranks.deliver(parcel)


def test_what_comes_twice_counts_once(ranks):
    some = bits_to_wire(1 << CHILD)
    sender, receiver, part, data = sum_of_two(ranks, contributors=some, loss=TERMS)
    ranks.deliver((sender, receiver, part, data))
    ranks.deliver((sender, receiver, part, data))
    assert ranks.counters[ROOT].snapshot()["contributions_counted_before"] == 1


def test_a_result_of_nobody_says_that_the_round_has_begun_if_it_may_end_without_some(ranks):
    ranks.deliver(sum_of_two(ranks))
    sender, receiver, part, data = sent(ranks, ROOT, contributors=b"")
    assert part.phase is Phase.BROADCAST
    with pytest.raises(ProtocolViolation, match="not all ranks of the policy"):
        ranks.deliver((sender, receiver, part, data))
    ranks.deliver((sender, receiver, msgspec.structs.replace(part, loss=TERMS), None))
    [round] = ranks.nodes[receiver].rounds.values()
    assert round.loss is not None
    assert not any(round.results)
    passed_on = sent(ranks, receiver)
    assert (passed_on[1], passed_on[2].phase, passed_on[2].contributors) == (CHILD, Phase.BROADCAST, b"")


def test_the_share_that_always_counts_falls_with_the_results_and_not_below_the_least() -> None:
    importance = Importance()
    terms = LossTerms(bound=0.5, deadline_s=1.0, important=0.8, least=0.2)
    assert importance.share([7], terms) == 0.8  # nothing is known yet
    shares = []
    for mean in (4.0, 2.0, 0.0):
        for chunk in range(2):
            importance.record(7, chunk, 2, mean, 1.0)
        shares.append(round(importance.share([7], terms), 6))
    assert shares == [0.8, 0.4, 0.2]
    assert importance.share([7], LossTerms(bound=0.5, deadline_s=1.0, important=0.8)) == 0.8


def test_the_weight_of_the_newest_result_is_that_of_the_job() -> None:
    quick, slow = Importance(), Importance()
    for one, newest in ((quick, 0.9), (slow, 0.1)):
        for mean in ((5.0, 1.0), (1.0, 3.0)):
            for chunk in range(2):
                one.record(7, chunk, 2, mean[chunk], newest)
    assert quick.order(7, 2) == [1, 0]
    assert slow.order(7, 2) == [0, 1]
