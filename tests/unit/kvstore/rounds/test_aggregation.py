"""Aggregations of several ranks joined by hand-carried messages: no endpoint, no scheduler, no clock."""

import random

import numpy as np
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.look_ahead import LookAhead
from netstorm.kvstore.rounds.node_rounds import AuxiliaryPaths, NodeRounds
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.observe.log import Counters
from netstorm.protocol.codecs import UNDETERMINED_FORM
from netstorm.protocol.frames import Peer, bits_to_wire, checksum
from netstorm.protocol.messages import Binding, KeyGrant, LossTerms, Part, Phase
from netstorm.pslite.machine import Call, Send
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree

CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1)),), weights=(1,))
"""2 -> 1 -> 0: rank 1 aggregates and forwards, rank 0 is the root."""

THREE_STARS = Policy(
    version=1,
    trees=(
        Tree.undirected(Rank(0), (-1, 0, 0)),
        Tree(root=Rank(1), reduce_parent=(1, -1, 1), broadcast_parent=(2, -1, 1)),
        Tree.undirected(Rank(2), (2, 0, -1)),
    ),
    weights=(1, 1, 1),
)


class Ranks:
    """Carries instructions between ranks, in an order that a seed decides."""

    def __init__(self, policy, *, chunk_size=4, seed=0):
        self.random = random.Random(seed)
        self.chunk_size = chunk_size
        self.size = policy.size
        self.bindings = [Bindings(rank) for rank in range(self.size)]
        for bindings in self.bindings:
            bindings.install(policy)
        self.counters = [Counters() for _ in range(self.size)]
        self.outboxes = [Outbox() for _ in range(self.size)]
        self.nodes = [
            NodeRounds(r, self.bindings[r], self.outboxes[r], self.counters[r]) for r in range(self.size)
        ]
        self.in_flight = []

    def add_key(self, rank, elements, identity=0, dtype="float32", granted=9):
        key = Key(0, f"k{identity}", (elements,), dtype)
        key.set_grant(
            KeyGrant(
                namespace=0,
                name=key.name,
                key=identity,
                first_slot=0,
                offset=0,
                chunk_size=self.chunk_size,
            )
        )
        self.bindings[rank].bind(Binding(key=identity, from_round=0, version=1, granted=granted))
        self.nodes[rank].add_key(key)
        self.collect(rank)
        return key

    def push(self, rank, key, values, *, in_place=False, loss=None):
        source = None if values is None else np.array(values, key.dtype)
        result = source if in_place else np.full(key.elements, -1, key.dtype)
        outcome: list[Exception | None] = []
        operation = Operation(
            key=key, round=key.take_round(), source=source, destination=result, done=outcome.append, loss=loss
        )
        self.nodes[rank].submit(operation, now=0.0)
        self.collect(rank)
        return result, outcome

    def collect(self, rank):
        for instruction in self.outboxes[rank].take():
            if isinstance(instruction, Call):
                instruction.function()
            else:
                assert isinstance(instruction, Send)
                data = None if instruction.payload is None else bytearray(bytes(instruction.payload))
                self.in_flight.append((rank, int(instruction.peer), instruction.message, data))

    def deliver_all(self):
        while self.in_flight:
            self.deliver(self.in_flight.pop(self.random.randrange(len(self.in_flight))))

    def deliver(self, parcel):
        sender, receiver, part, data = parcel
        self.nodes[receiver].receive(Peer(sender), part, data, 0 if data is None else checksum(data))
        self.collect(receiver)


@pytest.mark.parametrize("policy", [CHAIN, THREE_STARS], ids=["chain", "three stars"])
@pytest.mark.parametrize("seed", range(20))
def test_every_rank_gets_the_sum_in_whatever_order_messages_come(policy, seed):
    ranks = Ranks(policy, seed=seed)
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
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


def test_rounds_in_flight_together_do_not_mix():
    ranks = Ranks(CHAIN, seed=3)
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
    results = [[ranks.push(rank, keys[rank], [round] * 10) for rank in range(3)] for round in range(6)]
    ranks.deliver_all()
    for round, by_rank in enumerate(results):
        for result, outcome in by_rank:
            assert outcome == [None]
            assert set(result.tolist()) == {3 * round}


def test_a_rank_contributes_at_most_two_rounds_beyond_what_is_complete():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
    for _ in range(5):
        ranks.push(2, keys[2], [1] * 4)
    assert {part.round for _, _, part, _ in ranks.in_flight} == {0, 1}


def test_operations_may_be_submitted_in_any_order_of_their_rounds():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 4, granted=0) for rank in range(3)]
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
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
    value = np.array([-0.0, np.nan, 1e-45, np.inf, 1, 2, 3, 4, 5, 6], np.float32)
    results = [ranks.push(rank, keys[rank], value if rank == 0 else None) for rank in range(3)]
    assert all(data is None for sender, _, _, data in ranks.in_flight if sender != 0)
    ranks.deliver_all()
    for result, _ in results:
        assert result.tobytes() == value.tobytes()


def test_all_zeros_are_zeros():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
    results = [ranks.push(rank, keys[rank], None) for rank in range(3)]
    ranks.deliver_all()
    assert all(set(result.tolist()) == {0} for result, _ in results)


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
    keys = [ranks.add_key(rank, 10, granted=0) for rank in range(3)]
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
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
    ranks.push(2, keys[2], [5] * 4)
    [(sender, receiver, part, data)] = ranks.in_flight
    ranks.in_flight = [(sender, receiver, part, data), (sender, receiver, part, bytearray(data))]
    results = [ranks.push(rank, keys[rank], [1] * 4) for rank in (0, 1)]
    ranks.deliver_all()
    assert all(set(result.tolist()) == {7} for result, _ in results)


def legal_part(**changed):
    values = {
        "key": 0, "round": 0, "chunk": 0, "phase": Phase.REDUCE, "version": 1, "tree": 0,
        "contributors": bits_to_wire(0b100), "dtype": "float32",
    }  # fmt: skip
    return Part(**{**values, **changed})


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
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
    with pytest.raises(ProtocolViolation, match=message):
        ranks.nodes[1].receive(Peer(sender), legal_part(**changed), bytearray(size), 0)
    results = [ranks.push(rank, keys[rank], [1] * 10) for rank in range(3)]
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


def test_what_an_operation_waits_for_names_the_ranks():
    ranks = Ranks(CHAIN)
    key = ranks.add_key(0, 10)
    ranks.push(0, key, [1] * 10)
    [operation] = ranks.nodes[0].outstanding()
    assert ranks.nodes[0].waiting_text_of(operation) == (
        "round 0 of key 'k0': 3 of 3 chunks wait for contributions of ranks [1, 2]"
    )


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
    keys = [ranks.add_key(rank, 24) for rank in range(3)]
    results = [ranks.push(rank, keys[rank], [1] * 24) for rank in range(3)]
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


def test_rounds_with_and_without_look_ahead_are_open_together():
    ranks = Ranks(AHEAD, seed=4)
    for bindings in ranks.bindings:
        bindings.install(Policy(version=2, trees=CHAIN.trees, weights=(1,)))
    keys = [ranks.add_key(rank, 24) for rank in range(3)]
    for bindings in ranks.bindings:
        bindings.bind(Binding(key=0, from_round=1, version=2, granted=9))
        bindings.bind(Binding(key=0, from_round=2, version=1, granted=9))
    results = [ranks.push(rank, keys[rank], [round] * 24) for round in range(3) for rank in (2, 0, 1)]
    ranks.deliver_all()
    for (result, outcome), round in zip(results, (0, 0, 0, 1, 1, 1, 2, 2, 2), strict=True):
        assert outcome == [None]
        assert set(result.tolist()) == {3.0 * round}


def test_nothing_is_left_of_rounds_that_were_held():
    ranks = Ranks(AHEAD, seed=1)
    keys = [[ranks.add_key(rank, 24, identity=one) for one in range(3)] for rank in range(3)]
    for rank in range(3):
        for one in range(3):
            ranks.push(rank, keys[rank][(one + rank) % 3], [1] * 24)
    ranks.deliver_all()
    for node in ranks.nodes:
        node.tick(0.0)
        assert node.next_tick() == float("inf")
        assert not node.look_ahead._by_number


def test_a_plain_job_plugs_nothing_in():
    ranks = Ranks(CHAIN)
    keys = [ranks.add_key(rank, 10) for rank in range(3)]
    for rank in range(3):
        ranks.push(rank, keys[rank], [1] * 10)
        assert all(round.extensions == () for round in ranks.nodes[rank].rounds.values())
    ranks.deliver_all()
    assert all(node.extensions == () for node in ranks.nodes)


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
    keys = [ranks.add_key(rank, 4) for rank in range(3)]
    ranks.push(2, keys[2], [1] * 4, loss=LossTerms(0.5, 1.0))
    ranks.deliver_all()
    assert [len(node.extensions) for node in ranks.nodes] == [0, 1, 1]
    assert isinstance(ranks.nodes[1].extensions[0], BoundedLoss)
