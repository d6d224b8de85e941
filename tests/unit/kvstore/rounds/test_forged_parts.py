"""Parts that a neighbour makes up: none costs another rank's contribution, and no result comes too early."""

from __future__ import annotations

import math

import pytest

from netstorm.errors import Closed, NoRoom, NotAuthorised, ProtocolViolation
from netstorm.kvstore.operations import Outbox
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.node_rounds import NodeRounds
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import Phase
from netstorm.pslite.machine import WaitingBytes
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.rounds.test_aggregation import CHAIN, Ranks, legal_part

STAR = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))


def test_a_result_counts_only_once_the_own_sum_is_in_it():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
    forged = legal_part(phase=Phase.BROADCAST, contributors=bits_to_wire(0b111))
    with pytest.raises(NotAuthorised, match=r"before rank 1 has sent its sum of ranks \(1, 2\)"):
        ranks.nodes[1].receive(Peer(0), forged, bytearray(16), 0)
    results = {rank: ranks.push(rank, keys[rank], [1] * 4) for rank in (0, 1)}
    with pytest.raises(NotAuthorised, match="nobody can have it"):  # rank 2's contribution is missing
        ranks.nodes[1].receive(Peer(0), forged, bytearray(16), 0)
    results[2] = ranks.push(2, keys[2], [1] * 4)
    ranks.deliver_all()
    assert all(set(result.tolist()) == {3} for result, _ in results.values())


@pytest.mark.parametrize("changed", [{"call": 5}, {"version": 0}], ids=str)
def test_a_part_of_another_call_or_policy_does_not_cost_the_parts_of_others(changed):
    ranks = Ranks(STAR)
    former = Policy(version=0, trees=STAR.trees, weights=(1,))
    ranks.bindings[0].install(former)
    keys = [ranks.add_key(rank, 4, granted=9 if rank else -1) for rank in range(3)]
    forged = legal_part(contributors=bits_to_wire(0b010), **changed)
    ranks.nodes[0].receive(Peer(1), forged, bytearray(16), 0)
    results = {2: ranks.push(2, keys[2], [10] * 4)}
    ranks.deliver_all()
    assert ranks.counters[0].get("parts_kept_early") == 1, "which of the two is right is not known yet"
    ranks.add_key(0, 4)
    results[0] = ranks.push(0, keys[0], [100] * 4)
    results[1] = ranks.push(1, keys[1], [1000] * 4)
    ranks.deliver_all()
    assert all(set(result.tolist()) == {1110} for result, _ in results.values())


@pytest.mark.parametrize("settled", [0, 7, -2])
def test_no_part_says_that_its_own_round_or_a_later_one_is_complete(settled):
    ranks = Ranks(CHAIN)
    ranks.add_key(1, 4)
    with pytest.raises(ProtocolViolation, match=f"says that round {settled} is complete"):
        ranks.nodes[1].receive(Peer(2), legal_part(settled=settled), bytearray(16), 0)


def test_who_waits_names_whose_contribution_or_result_is_missing():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
    ranks.push(0, keys[0], [1] * 4)
    ranks.push(1, keys[1], [1] * 4)
    ranks.push(2, keys[2], [1] * 4)
    texts = [ranks.nodes[rank].waiting_text_of(next(ranks.nodes[rank].outstanding())) for rank in range(3)]
    assert "wait for contributions of ranks [1, 2]" in texts[0]
    assert "wait for contributions of ranks [2]" in texts[1]
    assert texts[2].endswith("wait for results of ranks [0], which come through ranks [1]")


def test_what_waits_of_one_sender_is_bounded_in_bytes():
    waiting = WaitingBytes(of_one=4000)
    node = NodeRounds(0, Bindings(0), Outbox(), Counters(), waiting=waiting)
    for round in range(2):
        waiting.begin(Peer(1))
        node.receive(Peer(1), legal_part(round=round), bytes(500), None)
    waiting.begin(Peer(1))
    with pytest.raises(NoRoom, match="3048 bytes from it wait here for keys that are new here"):
        node.receive(Peer(1), legal_part(round=2), bytes(500), None)
    waiting.begin(Peer(2))
    node.receive(Peer(2), legal_part(round=2), bytes(5000), None)
    node.receive_early(legal_part().key)
    assert waiting.take_ready() == {legal_part().key}, "what had no room is wanted now"
    node.fail_all(Closed("the end"))
    assert waiting.room(Peer(1)) == waiting.room(Peer(2)) == math.inf
