"""Aggregations of several ranks joined by hand-carried messages: no endpoint, no scheduler, no clock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from netstorm.errors import Closed, NoRoom, NotAuthorised, ProtocolViolation
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.rounds.aggregation import TopologyRequests
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.look_ahead import LookAhead
from netstorm.kvstore.rounds.node_rounds import AuxiliaryPaths, NodeRounds
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.observe.log import Counters
from netstorm.protocol.codecs import COLLECTIVE, UNDETERMINED_FORM
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import Binding, KeyGrant, LossTerms, Phase, RoundBegun
from netstorm.pslite.machine import WaitingBytes
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Plan, Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.rounds.ranks import CHAIN, THREE_STARS, Ranks, legal_part


@pytest.mark.parametrize("policy", [CHAIN, THREE_STARS], ids=["chain", "three stars"])
@pytest.mark.parametrize("seed", range(8))
def test_every_rank_gets_the_sum_in_whatever_order_messages_come(policy, seed):
    ranks = Ranks(policy, seed=seed)
    keys = ranks.add_keys(10)
    order = [0, 1, 2]
    ranks.random.shuffle(order)
    results = {}
    for rank in order:
        results[rank] = ranks.push(rank, keys[rank], np.arange(10) + 10**rank, in_place=seed % 2 == 0)
        if ranks.random.random() < 0.5:
            ranks.deliver_all()
    ranks.deliver_all()
    for result, outcome in results.values():
        assert outcome == [None]
        assert result.tolist() == (3 * np.arange(10) + 111).tolist()


def test_a_rank_contributes_at_most_two_rounds_beyond_what_is_complete():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
    for _ in range(5):
        ranks.push(2, keys[2], [1] * 4)
    assert {part.round for _, _, part, _ in ranks.in_flight} == {0, 1}


def test_operations_may_be_submitted_in_any_order_of_their_rounds():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4, granted=0)
    outcomes = []
    for rank, order in enumerate(([1, 0], [0, 1], [1, 0])):
        for round in order:
            values = np.full(4, 10.0**round, np.float32)
            outcome: list[Exception | None] = []
            outcomes.append((values, 3 * 10**round, outcome))
            operation = Operation(
                key=keys[rank], round=round, source=values, destination=values, done=outcome.append
            )
            ranks.nodes[rank].submit(operation, now=0.0)
            ranks.collect(rank)
    for rank in range(3):  # round 1 is granted once round 0 has begun
        ranks.bindings[rank].bind(Binding(key=0, from_round=0, version=1, granted=1))
        ranks.nodes[rank].advance()
        ranks.collect(rank)
    ranks.deliver_all()
    for values, expected, outcome in outcomes:
        assert outcome == [None]
        assert set(values.tolist()) == {expected}


def test_zeros_travel_without_a_payload_and_one_contribution_arrives_bit_for_bit():
    ranks = Ranks(THREE_STARS)
    keys = ranks.add_keys(10)
    value = np.array([-0.0, np.nan, 1e-45, np.inf, 1, 2, 3, 4, 5, 6], np.float32)
    results = [ranks.push(rank, keys[rank], value if rank == 0 else None) for rank in range(3)]
    assert all(data is None for sender, _, _, data in ranks.in_flight if sender != 0)
    ranks.deliver_all()
    for result, _ in results:
        assert result.tobytes() == value.tobytes()


def test_parts_of_a_key_that_is_not_known_yet_are_kept():
    ranks = Ranks(CHAIN)
    leaf = ranks.add_key(2, 10)
    ranks.push(2, leaf, [1] * 10)
    ranks.deliver_all()
    assert ranks.counters[1].get("parts_kept_early") == 3
    keys = [ranks.add_key(rank, 10) for rank in (0, 1)]
    results = [ranks.push(rank, keys[rank], [1] * 10) for rank in (0, 1)]
    ranks.deliver_all()
    assert all(set(result.tolist()) == {3} for result, _ in results)


def test_parts_of_a_policy_that_is_not_here_yet_are_kept():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(10, granted=0)
    star = Policy(version=2, trees=(Tree.undirected(Rank(2), (2, 2, -1)),), weights=(1,))
    for rank in (0, 1, 2):
        ranks.push(rank, keys[rank], [1] * 10)
    ranks.deliver_all()
    second = Binding(key=0, from_round=1, version=2, granted=1)
    results = {}
    for rank in (0, 1):  # rank 2, the new root, hears of the policy last
        ranks.bindings[rank].install(star)
        ranks.bindings[rank].bind(second)
        results[rank] = ranks.push(rank, keys[rank], [rank] * 10)
    ranks.deliver_all()
    assert ranks.counters[2].get("parts_kept_early") == 6
    ranks.bindings[2].install(star)
    ranks.bindings[2].bind(second)
    ranks.nodes[2].advance()
    ranks.collect(2)
    results[2] = ranks.push(2, keys[2], [2] * 10)
    ranks.deliver_all()
    assert all(set(result.tolist()) == {3} for result, _ in results.values())


def test_an_empty_key_completes_at_once():
    ranks = Ranks(CHAIN)
    key = ranks.add_key(0, 0)
    assert ranks.push(0, key, [])[1] == [None]


def test_a_contribution_that_comes_twice_is_counted_once():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
    ranks.push(2, keys[2], [5] * 4)
    [(sender, receiver, part, data)] = ranks.in_flight
    ranks.in_flight = [(sender, receiver, part, data), (sender, receiver, part, bytearray(data))]
    results = [ranks.push(rank, keys[rank], [1] * 4) for rank in (0, 1)]
    ranks.deliver_all()
    assert all(set(result.tolist()) == {7} for result, _ in results)


@pytest.mark.parametrize(
    ("sender", "changed", "size", "message"),
    [
        (2, {"chunk": 3}, 16, "the key has chunks 0 to 2"),
        (2, {"chunk": -1}, 16, "the key has chunks 0 to 2"),
        (2, {"round": 7}, 16, "more than 4 rounds ahead"),
        (2, {"dtype": "float64"}, 16, "is float64; the key is float32"),
        (2, {}, 15, "has 15 bytes, not 16"),
        (2, {"codec": 9}, 16, "has codec 9, which this key never has"),
        (2, {"codec": UNDETERMINED_FORM}, 16, "has values, and no form"),
        (2, {"tree": 5}, 16, "names tree 5"),
        (0, {}, 16, "comes from rank 0, no child of this node"),
        (2, {"phase": Phase.BROADCAST}, 16, "not this node's parent"),
        (2, {"contributors": bits_to_wire(0b110)}, 16, "counts ranks \\(1, 2\\), not the sender's subtree"),
        (2, {"contributors": b""}, 16, "not the sender's subtree"),
    ],
)
def test_what_no_correct_node_sends_is_refused_and_changes_nothing(sender, changed, size, message):
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(10)
    with pytest.raises(ProtocolViolation, match=message):
        ranks.nodes[1].receive(Peer(sender), legal_part(**changed), bytearray(size), 0)
    results = ranks.push_all(keys, [1] * 10)
    ranks.deliver_all()
    assert all(set(result.tolist()) == {3} for result, _ in results)


def test_failing_ends_every_operation_with_the_error():
    ranks = Ranks(CHAIN)
    key = ranks.add_key(0, 10)
    outcomes = [ranks.push(0, key, [1] * 10)[1] for _ in range(4)]
    error = RuntimeError("gone")
    ranks.nodes[0].fail_all(error)
    ranks.collect(0)
    assert outcomes == [[error]] * 4


AHEAD = Policy(
    version=1, trees=THREE_STARS.trees, weights=THREE_STARS.weights, look_ahead=16, look_ahead_s=2.0
)
"""One chunk of four float32 beyond the first without a result."""


def sent_up(ranks, sender):
    """Return the chunks on their way up from a rank."""
    return sorted(
        part.chunk for rank, _, part, _ in ranks.in_flight if rank == sender and part.phase is Phase.REDUCE
    )


def test_what_is_beyond_the_look_ahead_is_sent_as_results_come():
    ranks = Ranks(AHEAD)
    keys = ranks.add_keys(24)
    results = ranks.push_all(keys, [1] * 24)
    assert sent_up(ranks, 1) == [0]  # chunk 1 is its own to sum up
    assert sent_up(ranks, 2) == [0, 1]
    most = 0
    while ranks.in_flight:
        ranks.deliver(ranks.in_flight.pop(0))
        most = max(most, len(sent_up(ranks, 2)))
    assert most <= 2
    for result, outcome in results:
        assert outcome == [None]
        assert result.tolist() == [3.0] * 24


def test_a_round_without_results_is_sent_whole_after_a_while():
    ranks = Ranks(AHEAD)
    key = ranks.add_key(2, 24)
    node = ranks.nodes[2]
    ranks.push(2, key, [1] * 24)
    assert node.next_tick() == 0.0  # to learn when it began
    node.tick(10.0)
    assert node.next_tick() == 12.0
    node.tick(11.9)
    ranks.collect(2)
    assert sent_up(ranks, 2) == [0, 1]
    node.tick(12.0)
    ranks.collect(2)
    assert sent_up(ranks, 2) == [0, 1, 3, 4]  # 2 and 5 are its own to sum up
    assert node.next_tick() == float("inf")


def test_what_is_held_is_dropped_with_everything_else():
    ranks = Ranks(AHEAD)
    key = ranks.add_key(2, 24)
    _, outcome = ranks.push(2, key, [1] * 24)
    error = RuntimeError("over")
    ranks.nodes[2].fail_all(error)
    ranks.nodes[2].tick(0.0)
    ranks.nodes[2].tick(99.0)
    before = len(ranks.in_flight)
    ranks.collect(2)
    assert outcome == [error]
    assert len(ranks.in_flight) == before


def test_nothing_is_left_of_rounds_that_were_held():
    ranks = Ranks(AHEAD, seed=1)
    keys = [[ranks.add_key(rank, 24, identity=one) for one in range(3)] for rank in range(3)]
    for rank in range(3):
        for one in range(3):
            ranks.push(rank, keys[rank][(one + rank) % 3], [1] * 24)
    ranks.deliver_all()
    for node in ranks.nodes:
        node.tick(1.0)  # rounds that many others may follow have been reported by then
        assert node.next_tick() == float("inf")


def test_a_plain_job_plugs_nothing_in():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(10)
    for rank in range(3):
        ranks.push(rank, keys[rank], [1] * 10)
        assert all(round.extensions == () for round in ranks.nodes[rank].rounds.values())
    ranks.deliver_all()
    assert all(node.extensions == () for node in ranks.nodes)
    assert not any(kept for node in ranks.nodes for kept in node.views.kept)


@pytest.mark.parametrize(
    ("asks", "technique"),
    [
        ({"look_ahead": 8}, LookAhead),
        ({"takes_over": True}, Takeover),
        ({"detours": (Detour(path=(1, 2, 0), links=((1e9, 0.0), (1e9, 0.0))),)}, AuxiliaryPaths),
    ],
)
def test_a_policy_plugs_in_what_it_asks_for_and_nothing_else(asks, technique):
    ranks = Ranks(CHAIN)
    policy = Policy(version=2, trees=CHAIN.trees, weights=(1,), **asks)
    for rank, node in enumerate(ranks.nodes):
        node.new_policy(ranks.bindings[rank].install(policy))
        assert [type(extension) for extension in node.extensions] == [technique]


def test_terms_of_loss_plug_in_what_ends_rounds_early_at_whoever_hears_of_them():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
    ranks.push(2, keys[2], [1] * 4, loss=LossTerms(0.5, 1.0))
    ranks.deliver_all()
    assert [len(node.extensions) for node in ranks.nodes] == [0, 1, 1]
    assert isinstance(ranks.nodes[1].extensions[0], BoundedLoss)


# ---------------------------------------------------------------------------- parts that a neighbour makes up

STAR = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))


def test_a_result_counts_only_once_the_own_sum_is_in_it():
    ranks = Ranks(CHAIN)
    keys = ranks.add_keys(4)
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
    keys = ranks.add_keys(4)
    ranks.push(0, keys[0], [1] * 4)
    ranks.push(1, keys[1], [1] * 4)
    ranks.push(2, keys[2], [1] * 4)
    texts = [ranks.nodes[rank].waiting_text_of(next(ranks.nodes[rank].outstanding())) for rank in range(3)]
    assert texts[0] == "round 0 of key 'k0': 1 of 1 chunks wait for contributions of ranks [1, 2]"
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


# ------------------------------------------------------------------ when rounds are reported to the scheduler

CHUNKS = 10
KEY = Key(0, "w", (CHUNKS,), "float32")
PLAN = Plan(Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0)),), weights=(1,)), 0)


def begun(number, key=0):
    return RoundBegun(key=key, round=number, rule="")


def open_round():
    key = Key(0, "w", (CHUNKS,), "float32")
    key.set_grant(KeyGrant(namespace=0, name="w", key=0, first_slot=0, offset=0, chunk_size=1))
    return Round(key, 0, PLAN, key.form)


def test_a_first_round_is_reported_at_its_end_since_nobody_knows_how_long_it_takes():
    asking, round = TopologyRequests(), open_round()
    asking.record_begin(KEY, begun(0), 0.0, 1)
    for chunk in range(CHUNKS):
        round.store(chunk, np.zeros(1, np.float32), 1)
        asking.record_result(round)
        assert not asking.pending
    asking.request_now(0)
    assert asking.take() == (begun(0),)


def test_a_first_collective_call_is_reported_at_once_since_others_may_call_something_else():
    big = Key(0, "g/65536", (65_536,), "float32", form=COLLECTIVE)
    asking = TopologyRequests()
    asking.record_begin(big, begun(0), 0.0, 1)
    assert asking.take() == (begun(0),)


def test_short_rounds_are_reported_at_once_and_only_once():
    asking = TopologyRequests()
    asking.round_s = 0.1
    asking.record_begin(KEY, begun(0), 0.0, 1)
    assert asking.pending
    assert asking.take() == (begun(0),)
    assert not asking.pending
    assert asking.take() == ()


def test_a_long_round_is_reported_when_half_a_second_of_it_is_left():
    asking, round = TopologyRequests(), open_round()
    asking.round_s = 2.0
    asking.record_begin(KEY, begun(0), 0.0, 1)
    for chunk in range(CHUNKS):
        assert bool(asking.pending) == (round.missing * 2.0 / CHUNKS <= 0.5)
        round.store(chunk, np.zeros(1, np.float32), 1)
        asking.record_result(round)
    assert asking.take() == (begun(0),)


def test_who_needs_the_answer_before_that_gets_it_asked_for():
    asking = TopologyRequests()
    asking.round_s = 60.0
    asking.record_begin(KEY, begun(0), 0.0, 1)
    asking.record_begin(KEY, begun(0, key=1), 0.0, 1)
    asking.request_now(0)
    assert asking.take() == (begun(0),)
    # A round cannot begin without the answer that the one before asked for.
    asking.record_begin(KEY, begun(1, key=1), 0.0, 2)
    assert asking.take() == (begun(0, key=1),)


def test_a_restarted_scheduler_gets_the_last_rounds_of_each_key():
    asking = TopologyRequests()
    asking.round_s = 0.1
    for number in range(5):
        asking.record_begin(KEY, begun(number), 0.0, number + 1)
    asking.record_begin(KEY, begun(0, key=1), 0.0, 1)
    assert asking.recent() == (begun(2), begun(3), begun(4), begun(0, key=1))
    assert not asking.pending


def test_of_a_key_with_many_rounds_under_way_one_request_reports_several():
    small = Key(0, "g/65536", (65_536,), "float32", form=COLLECTIVE)
    asking = TopologyRequests()
    asking.record_begin(small, begun(0), 5.0, 30)
    assert not asking.pending
    assert 5.0 < asking.due < 6.0
    asking.tick(asking.due)
    assert asking.take() == (begun(0),)
    rounds = [begun(number) for number in range(1, 9)]
    for round in rounds:
        assert not asking.pending
        asking.record_begin(small, round, 6.0, 31)
    assert asking.take() == tuple(rounds)
    assert asking.due == math.inf


def test_one_request_reports_what_has_gathered_of_all_keys():
    asking = TopologyRequests()
    asking.round_s = 0.1
    asking.record_begin(KEY, begun(0), 0.0, 20)
    asking.record_begin(KEY, begun(0, key=1), 0.0, 20)
    asking.record_begin(KEY, begun(5), 0.0, 11)
    assert asking.take() == (begun(0), begun(5), begun(0, key=1))
    assert asking.due == math.inf


def test_a_round_that_waits_has_everything_of_its_key_reported():
    small = Key(0, "g/65536", (65_536,), "float32", form=COLLECTIVE)
    asking = TopologyRequests()
    asking.record_begin(small, begun(0), 0.0, 30)
    asking.record_begin(small, begun(0, key=1), 0.0, 30)
    asking.request_all(0)
    assert asking.take() == (begun(0),)
    assert asking.recent() == (begun(0), begun(0, key=1))
    assert not asking.pending
