"""How far a node looks ahead, and what it withholds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.topology.form import form_policy
from netstorm.topology.look_ahead import LookAheadSpan, Withholding
from netstorm.topology.network import FAMILIES, Network, Node, Rank, generate
from netstorm.topology.policy import Forest
from netstorm.topology.prediction import predict
from netstorm.topology.resources import with_look_ahead
from netstorm.topology.tree import Tree

# ------------------------------------------------------------------------------------------------ look ahead
# How far ahead is far enough: the rule on networks whose delays can be worked out by hand.


MB = 1_000_000
RATE = 8e6  # 1 MB takes a second
STARS = Forest(
    trees=(Tree.undirected(Rank(0), (-1, 0, 0)), Tree.undirected(Rank(1), (1, -1, 1))),
    shares=(3.0, 3.0),
    reason="by hand",
)


def test_it_is_two_and_a_half_times_what_is_under_way_in_the_slowest_trees_time():
    network = Network.uniform(3, rate=RATE, latency=9.0)
    forest = with_look_ahead(network, STARS, MB)
    # Rank 0's links to rank 1 carry both trees' halves, up and down: 1 MB/s. A chunk takes 2 x 10 s.
    assert forest.look_ahead == 2.5 * 20 * MB
    assert forest.look_ahead_s == pytest.approx(50)


def test_behind_access_caps_it_is_four_times_that_and_never_less_than_four_chunks_of_each_tree():
    def capped(network):
        return replace(network, nodes=tuple(Node(rank=node.rank, egress=RATE) for node in network.nodes))

    # Rank 0 sends both broadcasts of its tree and a contribution of the other: 1 / 1.5 MB/s, for 2 s.
    near = with_look_ahead(capped(Network.uniform(3, rate=RATE)), STARS, MB)
    assert near.look_ahead == 4 * 2 * MB
    far = with_look_ahead(capped(Network.uniform(3, rate=RATE, latency=9.0)), STARS, MB)
    assert far.look_ahead == pytest.approx(4 * 20 * MB / 1.5)


def test_one_tree_needs_none():
    forest = Forest(trees=STARS.trees[:1], shares=(1.0,), reason="by hand")
    assert with_look_ahead(Network.uniform(3), forest, MB) == forest


def test_shares_count_in_proportion():
    network = generate("cloud", 3, 1)
    tenfold = replace(STARS, shares=(30.0, 30.0))
    assert with_look_ahead(network, tenfold, MB).look_ahead == with_look_ahead(network, STARS, MB).look_ahead


@pytest.mark.parametrize("scheme", ["packing", "auto"])
def test_packings_have_one_where_the_network_is_known_and_only_there(scheme):
    network = generate("cloud", 6, 2)
    known = form_policy(network, scheme)
    made_up = form_policy(network, scheme, known=False)
    assert known.look_ahead > 0
    assert known.look_ahead_s > 0
    assert (made_up.look_ahead, made_up.look_ahead_s) == (0, 0.0)
    assert known.trees == form_policy(network, "packing", known=False).trees


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rounds_take_no_longer_than_without(family):
    network = generate(family, 9, 3)
    tensors = (10 * MB, 60 * MB, 30 * MB)
    options: dict[str, Any] = {"tensors": tensors, "chunk_bytes": MB // 4}
    ahead = form_policy(network, "packing", **options)
    without = form_policy(network, "packing", known=False, **options)
    seconds = [predict(network, one, tensors, chunk_bytes=MB // 4).seconds for one in (ahead, without)]
    assert seconds[0] <= 1.03 * seconds[1]


def test_behind_access_caps_rounds_are_faster():
    tensors = (120 * MB,)
    options: dict[str, Any] = {"tensors": tensors, "chunk_bytes": MB // 4}
    gains = []
    for seed in range(3):
        network = generate("cloud", 9, seed)
        ahead = form_policy(network, "packing", **options)
        without = form_policy(network, "packing", known=False, **options)
        seconds = [predict(network, one, tensors, chunk_bytes=MB // 4).seconds for one in (ahead, without)]
        gains.append(seconds[1] / seconds[0])
    assert sum(gains) / len(gains) > 1.03


# ----------------------------------------------------------------------------------------------- withholding
# What is held back by hand-made results, and that nothing is held for ever, whatever ranks disagree on.


def tensor(name: str, first: int, chunks: int, *, look_ahead: int, priority: int = 0) -> LookAheadSpan[str]:
    """Return a tensor whose chunks have 10 bytes."""
    return LookAheadSpan(
        name, range(first * 10, (first + chunks) * 10, 10), look_ahead=look_ahead, priority=priority
    )


def held(withholding: Withholding[str], span: LookAheadSpan[str]) -> list[int]:
    return [chunk for chunk in range(len(span.offsets)) if withholding.withhold(span, chunk)]


def test_chunks_beyond_the_look_ahead_wait_for_results_in_order():
    withholding, one = Withholding[str](), tensor("one", 0, 6, look_ahead=20)
    withholding.begin(one)
    assert held(withholding, one) == [3, 4, 5]
    assert list(withholding.record_result(one, 1)) == []  # the first chunk still has no result
    assert list(withholding.record_result(one, 0)) == [("one", 3), ("one", 4)]
    assert list(withholding.record_result(one, 2)) == [("one", 5)]


def test_a_tensor_waits_for_those_before_it_that_are_as_urgent():
    withholding = Withholding[str]()
    early = tensor("early", 0, 4, look_ahead=10, priority=1)
    late = tensor("late", 4, 2, look_ahead=10, priority=0)
    urgent = tensor("urgent", 6, 2, look_ahead=10, priority=2)
    for one in (early, late, urgent):
        withholding.begin(one)
    assert held(withholding, early) == [2, 3]
    assert held(withholding, late) == [0, 1]
    assert held(withholding, urgent) == []
    assert list(withholding.record_result(early, 0)) == [("early", 2)]
    assert list(withholding.record_result(early, 1)) == [("early", 3)]
    assert list(withholding.record_result(early, 2)) == [("late", 0)]
    assert list(withholding.record_result(early, 3)) == [("late", 1)]


def test_nothing_waits_for_what_comes_later_in_the_order():
    withholding = Withholding[str]()
    early, late = tensor("early", 0, 2, look_ahead=10), tensor("late", 2, 9, look_ahead=10)
    withholding.begin(late)
    assert held(withholding, late) == list(range(2, 9))
    withholding.begin(early)
    assert held(withholding, early) == []


def test_a_round_that_may_not_have_begun_everywhere_is_waited_for_until_it_is_doubted():
    withholding = Withholding[str]()
    one, other = tensor("one", 0, 3, look_ahead=0), tensor("other", 3, 1, look_ahead=0)
    withholding.begin(one)
    withholding.begin(other)
    assert held(withholding, one) == [1, 2]
    assert held(withholding, other) == [0]
    assert list(withholding.expire(one)) == [("one", 1), ("one", 2), ("other", 0)]
    assert not withholding.withhold(other, 0)


def test_after_a_result_nothing_expires():
    withholding = Withholding[str]()
    one, other = tensor("one", 0, 3, look_ahead=0), tensor("other", 3, 1, look_ahead=0)
    for begun in (one, other):
        withholding.begin(begun)
        assert list(withholding.expire(begun)) == []
    assert list(withholding.record_result(one, 1)) == []
    assert withholding.withhold(other, 0)
    assert list(withholding.expire(one)) == []  # too late: all ranks have begun it
    assert list(withholding.record_result(one, 0)) == []
    assert list(withholding.record_result(one, 2)) == [("other", 0)]


def test_what_is_forgotten_neither_waits_nor_is_waited_for():
    withholding = Withholding[str]()
    one, other = tensor("one", 0, 3, look_ahead=0), tensor("other", 3, 1, look_ahead=0)
    withholding.begin(one)
    withholding.begin(other)
    assert held(withholding, one) == [1, 2]
    assert held(withholding, other) == [0]
    assert list(withholding.forget(one)) == [("other", 0)]
    assert list(withholding.forget(other)) == []
    assert withholding.is_empty()


def test_an_empty_tensor_holds_nothing_up():
    withholding = Withholding[str]()
    empty, other = LookAheadSpan("empty", (), 0), tensor("other", 0, 1, look_ahead=0)
    withholding.begin(empty)
    withholding.begin(other)
    assert held(withholding, other) == []


def finish(ranks: int, chunks: list[int], seed: int) -> None:
    """Let ranks begin tensors, and doubt them, at times that a seed decides; all must come through.

    A rank may begin a tensor only when it has all of another one: its program wants to see it first. These
    wishes don't contradict each other, so that everything would come through if nothing were held. A chunk's
    result is there, at one rank after the other, when all ranks have let it go. Look-aheads and priorities
    differ from rank to rank.

    Raises:
        AssertionError: nothing happens any more, and something still waits.
    """
    chance = random.Random(seed)
    withholdings = [Withholding[int]() for _ in range(ranks)]
    starts = [sum(chunks[:tensor]) for tensor in range(len(chunks))]
    spans = [
        [
            LookAheadSpan(
                tensor, range(start, start + count), chance.choice((0, 1, 3)), priority=chance.randrange(3)
            )
            for tensor, (start, count) in enumerate(zip(starts, chunks, strict=True))
        ]
        for _ in range(ranks)
    ]
    sent = {(tensor, chunk): 0 for tensor, count in enumerate(chunks) for chunk in range(count)}
    left = [list(chunks) for _ in range(ranks)]
    todo: list[tuple[str, int, int, int]] = []
    """What, at which rank, of which tensor and chunk."""
    after: dict[tuple[int, int], list[int]] = {}
    """What a rank begins when it has all of a tensor."""
    wishes = chance.sample(range(len(chunks)), len(chunks))
    for rank in range(ranks):
        for place, tensor in enumerate(wishes):
            wanted = chance.choice(wishes[:place]) if place and chance.random() < 0.5 else tensor
            if wanted == tensor or chunks[wanted] == 0:
                todo.append(("begin", rank, tensor, 0))
            else:
                after.setdefault((rank, wanted), []).append(tensor)

    def let_go(released):
        for tensor, chunk in released:
            sent[tensor, chunk] += 1
            if sent[tensor, chunk] == ranks:
                todo.extend(("result", other, tensor, chunk) for other in range(ranks))

    while todo:
        what, rank, tensor, chunk = todo.pop(chance.randrange(len(todo)))
        withholding, span = withholdings[rank], spans[rank][tensor]
        if what == "begin":
            withholding.begin(span)
            todo.append(("doubt", rank, tensor, 0))
            let_go((tensor, one) for one in range(chunks[tensor]) if not withholding.withhold(span, one))
        elif what == "doubt":
            let_go(withholding.expire(span))
        else:
            let_go(withholding.record_result(span, chunk))
            left[rank][tensor] -= 1
            if left[rank][tensor] == 0:
                todo.extend(("begin", rank, next_one, 0) for next_one in after.pop((rank, tensor), ()))
    assert not any(map(any, left))
    assert all(withholding.is_empty() for withholding in withholdings)


@given(st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**32))
def test_everything_comes_through_whatever_ranks_disagree_on(ranks, chunks, seed):
    finish(ranks, chunks, seed)


def test_nothing_waits_in_a_circle():
    # Ranks that disagree on the order would end in one, in 1 of 100 of these.
    for seed in range(600):
        chance = random.Random(seed)
        finish(chance.randint(2, 4), [chance.randrange(7) for _ in range(chance.randint(2, 5))], seed)


@pytest.mark.parametrize("seed", range(5))
def test_many_tensors_come_through(seed):
    finish(9, [random.Random(seed).randrange(8) for _ in range(30)], seed)
