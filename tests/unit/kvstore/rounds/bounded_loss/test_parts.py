"""Which parts without some ranks a node takes: those of rounds that say that they may end so."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import bits_to_wire
from netstorm.protocol.messages import LossTerms, Phase
from tests.unit.kvstore.rounds.test_aggregation import CHAIN, Ranks

TERMS = LossTerms(bound=0.5, deadline_s=1.0, mass=4.0)
CHILD, NODE, ROOT = 2, 1, 0
"""Of the chain."""


@pytest.fixture
def ranks():
    found = Ranks(CHAIN)
    keys = [found.add_key(rank, 4) for rank in range(3)]
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


def test_a_result_names_somebody(ranks):
    ranks.deliver(sum_of_two(ranks))
    result = sent(ranks, ROOT, contributors=b"", loss=TERMS)
    assert result[2].phase is Phase.BROADCAST
    with pytest.raises(ProtocolViolation, match="not all ranks of the policy"):
        ranks.deliver(result)
