"""Where the calls of groups are, for ranks that join later."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.kvstore.calls import CallPositions, GroupCalls
from netstorm.kvstore.forms import Key
from netstorm.protocol.codecs import COLLECTIVE
from tests.unit.kvstore.operations.test_group_calls import exchange

SMALL, LARGE = 10, 1_000_000


def ignore(_: object) -> None: ...


def group(positions: CallPositions, members: tuple[int, ...] = (0, 1, 2)) -> GroupCalls:
    name = "".join(map(str, members))

    def register(key: str, elements: int, ranks: tuple[int, ...]) -> Key:
        return Key(0, key, (elements,), "float32", form=COLLECTIVE, members=ranks)

    calls = GroupCalls(name, members, size=3, register=register)
    positions.add(calls)
    return calls


def test_a_newcomer_makes_the_call_that_the_others_make_next() -> None:
    theirs, mine = CallPositions(later=False), CallPositions(later=True)
    there, here = group(theirs), group(mine)
    for count in (SMALL, SMALL, LARGE):
        there.operation(exchange(count), ignore)
    mine.go_on_at(theirs.now())
    for count in (LARGE, SMALL, 30 * LARGE, SMALL):
        next_there, next_here = (calls.operation(exchange(count), ignore) for calls in (there, here))
        assert next_here.call == next_there.call
        assert (next_here.key.name, next_here.round) == (next_there.key.name, next_there.round)


def test_a_group_that_a_newcomer_makes_later_goes_on_where_it_is() -> None:
    theirs, mine = CallPositions(later=False), CallPositions(later=True)
    group(theirs).operation(exchange(SMALL), ignore)
    mine.go_on_at(theirs.now())
    operation = group(mine).operation(exchange(SMALL), ignore)
    assert (operation.round, operation.call and operation.call.number) == (1, 1)


def test_a_newcomer_hands_its_position_on_to_the_next() -> None:
    first, second = CallPositions(later=False), CallPositions(later=True)
    group(first).operation(exchange(LARGE), ignore)
    group(second)
    second.go_on_at(first.now())
    assert second.now() == first.now()


def test_rounds_are_those_of_granted_keys_of_all_ranks() -> None:
    positions = CallPositions(later=False)
    for number, members in enumerate([(0, 1, 2), (0, 1)]):
        operation = group(positions, members).operation(exchange(SMALL), ignore)
        operation.key.identity = number
    assert positions.rounds() == {0: 1}
    assert len(positions.now()) == 1


def test_a_newcomer_makes_no_call_before_it_has_the_state_and_none_of_other_groups() -> None:
    positions = CallPositions(later=True)
    whole, part = group(positions), group(positions, (0, 1))
    with pytest.raises(UsageError, match="does not have its state yet"):
        positions.check(whole)
    positions.go_on_at({})
    positions.check(whole)
    with pytest.raises(UsageError, match=r"ranks \[0, 1\] has made"):
        positions.check(part)


def test_a_rank_that_has_been_there_from_the_begin_makes_any_call() -> None:
    positions = CallPositions(later=False)
    positions.check(group(positions, (0, 1)))
