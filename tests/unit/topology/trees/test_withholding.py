"""What is held back by hand-made results, and that nothing is held for ever, whatever ranks disagree on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.topology.trees.withholding import LookAheadSpan, Withholding


def tensor(name: str, first: int, chunks: int, *, look_ahead: int, priority: int = 0) -> LookAheadSpan[str]:
    """Return a tensor whose chunks have 10 bytes."""
    return LookAheadSpan(
        name, range(first * 10, (first + chunks) * 10, 10), look_ahead=look_ahead, priority=priority
    )


def held(holding: Withholding[str], stretch: LookAheadSpan[str]) -> list[int]:
    return [chunk for chunk in range(len(stretch.offsets)) if holding.hold(stretch, chunk)]


def test_chunks_beyond_the_look_ahead_wait_for_results_in_order():
    holding, one = Withholding[str](), tensor("one", 0, 6, look_ahead=20)
    holding.begin(one)
    assert held(holding, one) == [3, 4, 5]
    assert list(holding.result(one, 1)) == []  # the first chunk still has no result
    assert list(holding.result(one, 0)) == [("one", 3), ("one", 4)]
    assert list(holding.result(one, 2)) == [("one", 5)]


def test_a_tensor_waits_for_those_before_it_that_are_as_urgent():
    holding = Withholding[str]()
    early = tensor("early", 0, 4, look_ahead=10, priority=1)
    late = tensor("late", 4, 2, look_ahead=10, priority=0)
    urgent = tensor("urgent", 6, 2, look_ahead=10, priority=2)
    for one in (early, late, urgent):
        holding.begin(one)
    assert held(holding, early) == [2, 3]
    assert held(holding, late) == [0, 1]
    assert held(holding, urgent) == []
    assert list(holding.result(early, 0)) == [("early", 2)]
    assert list(holding.result(early, 1)) == [("early", 3)]
    assert list(holding.result(early, 2)) == [("late", 0)]
    assert list(holding.result(early, 3)) == [("late", 1)]


def test_nothing_waits_for_what_comes_later_in_the_order():
    holding = Withholding[str]()
    early, late = tensor("early", 0, 2, look_ahead=10), tensor("late", 2, 9, look_ahead=10)
    holding.begin(late)
    assert held(holding, late) == list(range(2, 9))
    holding.begin(early)
    assert held(holding, early) == []


def test_a_round_that_may_not_have_begun_everywhere_is_waited_for_until_it_is_doubted():
    holding = Withholding[str]()
    one, other = tensor("one", 0, 3, look_ahead=0), tensor("other", 3, 1, look_ahead=0)
    holding.begin(one)
    holding.begin(other)
    assert held(holding, one) == [1, 2]
    assert held(holding, other) == [0]
    assert list(holding.doubt(one)) == [("one", 1), ("one", 2), ("other", 0)]
    assert not holding.hold(other, 0)


def test_a_result_ends_the_doubt():
    holding = Withholding[str]()
    one, other = tensor("one", 0, 3, look_ahead=0), tensor("other", 3, 1, look_ahead=0)
    for begun in (one, other):
        holding.begin(begun)
        assert list(holding.doubt(begun)) == []
    assert list(holding.result(one, 1)) == []
    assert holding.hold(other, 0)
    assert list(holding.doubt(one)) == []  # too late: all ranks have begun it
    assert list(holding.result(one, 0)) == []
    assert list(holding.result(one, 2)) == [("other", 0)]


def test_what_is_forgotten_neither_waits_nor_is_waited_for():
    holding = Withholding[str]()
    one, other = tensor("one", 0, 3, look_ahead=0), tensor("other", 3, 1, look_ahead=0)
    holding.begin(one)
    holding.begin(other)
    assert held(holding, one) == [1, 2]
    assert held(holding, other) == [0]
    assert list(holding.forget(one)) == [("other", 0)]
    assert list(holding.forget(other)) == []
    assert holding.idle()


def test_an_empty_tensor_holds_nothing_up():
    holding = Withholding[str]()
    empty, other = LookAheadSpan("empty", (), 0), tensor("other", 0, 1, look_ahead=0)
    holding.begin(empty)
    holding.begin(other)
    assert held(holding, other) == []


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
    holdings = [Withholding[int]() for _ in range(ranks)]
    starts = [sum(chunks[:tensor]) for tensor in range(len(chunks))]
    stretches = [
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
        holding, stretch = holdings[rank], stretches[rank][tensor]
        if what == "begin":
            holding.begin(stretch)
            todo.append(("doubt", rank, tensor, 0))
            let_go((tensor, one) for one in range(chunks[tensor]) if not holding.hold(stretch, one))
        elif what == "doubt":
            let_go(holding.doubt(stretch))
        else:
            let_go(holding.result(stretch, chunk))
            left[rank][tensor] -= 1
            if left[rank][tensor] == 0:
                todo.extend(("begin", rank, next_one, 0) for next_one in after.pop((rank, tensor), ()))
    assert not any(map(any, left))
    assert all(holding.idle() for holding in holdings)


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
