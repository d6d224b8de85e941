"""Collective calls: of groups and tensors, where they are for newcomers, and sums of sites."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np
import pytest

from netstorm.compression.codec import AGREED, Codec, GradientPlace, State
from netstorm.compression.registry import codec_of
from netstorm.errors import UsageError
from netstorm.kvstore.calls import (
    CallPositions,
    EncodedSum,
    GroupCalls,
    Position,
    Sites,
    TensorCalls,
    TensorExchange,
    encoded_keys,
)
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.codecs import Element, Reduction
from netstorm.protocol.messages import KeyGrant, Member


def calls_of(members: tuple[int, ...], size: int) -> tuple[GroupCalls, list[Key]]:
    keys: list[Key] = []

    def register(*description: Any, **options: Any) -> Key:
        keys.append(Key(0, *description, **options))
        return keys[-1]

    return GroupCalls("g", members, size=size, register=register), keys


def exchange(count: int, **changes: Any) -> TensorExchange:
    values = np.zeros(count, np.float32)
    wanted: dict[str, Any] = {
        "text": f"all_reduce of {count}",
        "reduction": Reduction.SUM,
        "element": Element.FLOAT32,
        "segment_bytes": values.nbytes,
        "source": (values,),
        "destination": (values,),
    }
    return TensorExchange(**{**wanted, **changes})


def test_calls_of_about_the_same_size_share_a_key_and_take_its_rounds() -> None:
    calls, keys = calls_of((0, 1), 2)
    operations = [calls.operation(exchange(count), print) for count in (3, 1000, 2_000_000, 5)]
    assert [operation.round for operation in operations] == [0, 1, 0, 2]
    assert [operation.call.number for operation in operations if operation.call] == [0, 1, 2, 3]
    assert len(keys) == 2


def test_a_group_of_all_ranks_names_no_members_and_others_name_them_in_order() -> None:
    everybody, keys = calls_of((1, 0), 2)
    everybody.operation(exchange(1), print)
    assert keys[0].spec.members == ()
    some, keys = calls_of((4, 1), 6)
    some.operation(exchange(1), print)
    assert keys[0].spec.members == (1, 4)


def test_receivers_are_counted_within_the_group() -> None:
    calls, _ = calls_of((4, 1), 6)
    operation = calls.operation(exchange(1, receivers=(0b01, 0b11, 0)), print)
    assert operation.receivers == (1 << 4, 1 << 4 | 1 << 1, 0)


def test_error_messages_show_the_call() -> None:
    calls, _ = calls_of((0, 1), 2)
    assert str(calls.operation(exchange(7), print)) == "call 0 of group 'g', all_reduce of 7"


def test_what_cannot_be_reduced_is_refused_and_takes_no_number() -> None:
    calls, _ = calls_of((0, 1), 2)
    with pytest.raises(UsageError, match="all_reduce of 1: float32 has no xor"):
        calls.operation(exchange(1, reduction=Reduction.XOR), print)
    with pytest.raises(UsageError, match="more than one call can have"):
        calls.operation(exchange(1, segment_bytes=2**40), print)
    assert calls.called == 0


def test_a_call_of_empty_tensors_takes_a_round_in_which_it_meets_the_others() -> None:
    calls, _ = calls_of((0, 1), 2)
    operation: Any = calls.operation(exchange(0), print)
    assert operation.form.codec == calls.operation(exchange(1), print).form.codec
    assert operation.source is not operation.destination
    assert [values.tolist() for values in (*operation.source, *operation.destination)] == [[0.0], [0.0]]
    only_given = calls.operation(exchange(0, destination=(None,)), print)
    assert only_given.destination == (None,)


# --------------------------------------------------- where the calls of groups are, for ranks that join later

SMALL, LARGE = 10, 1_000_000


def ignore(_: object) -> None: ...


def group(positions: CallPositions, members: tuple[int, ...] = (0, 1, 2)) -> GroupCalls:
    name = "".join(map(str, members))
    calls = GroupCalls(name, members, size=3, register=functools.partial(Key, 0))
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


# ------------------------------------------------------------------------------ the sums of tensors by codecs


class Registered:
    """Keys as a group has made them known."""

    def __init__(self, positions: CallPositions, members: tuple[int, ...] = (0, 1, 2)) -> None:
        self.keys: dict[str, Key] = {}
        self.calls = TensorCalls("group/codecs 0", members, size=3, register=self._register)
        positions.add(self.calls)

    def _register(self, name: str, *description: Any, **options: Any) -> Key:
        assert name not in self.keys
        self.keys[name] = Key(0, name, *description, **options)
        return self.keys[name]

    def sum(self, tensor: str, codec: str = "int8") -> list[int]:
        """Take the rounds of a tensor's next sum."""
        keys = self.calls.keys_of(tensor, (40, 50), codec_of(codec))
        return [key.take_round() for key in keys.keys if key is not None]


def test_each_tensor_counts_its_own_sums() -> None:
    group = Registered(CallPositions(later=False))
    assert [group.sum("a"), group.sum("b"), group.sum("a")] == [[0, 0], [0, 0], [1, 1]]
    assert list(group.keys) == [f"group/codecs 0/{name}" for name in ("a", "a/scales", "b", "b/scales")]
    assert group.calls.called == 3


def test_a_tensor_whose_own_key_has_no_rounds_registers_its_further_ones_alone() -> None:
    group = Registered(CallPositions(later=False))
    assert group.sum("a", "powersgd") == [0, 0]
    assert list(group.keys) == ["group/codecs 0/a/left", "group/codecs 0/a/right"]


def test_keys_of_some_ranks_have_these_as_members() -> None:
    group = Registered(CallPositions(later=False), (2, 0))
    group.sum("a")
    assert {key.spec.members for key in group.keys.values()} == {(0, 2)}
    assert not group.calls.of_all_ranks


def test_a_newcomer_goes_on_with_the_next_round_of_each_key_those_that_it_has_and_those_that_come() -> None:
    theirs, mine = CallPositions(later=False), CallPositions(later=True)
    there, here = Registered(theirs), Registered(mine)
    for tensor in ("a", "a", "b"):
        there.sum(tensor)
    here.sum("a")
    mine.go_on_at(theirs.now())
    for tensor in ("b", "a", "c", "b"):
        assert here.sum(tensor) == there.sum(tensor)
    assert mine.now() == theirs.now()


def test_a_newcomer_gets_what_codecs_have_agreed_on_before_its_first_sum_of_a_tensor() -> None:
    theirs, mine = CallPositions(later=False), CallPositions(later=True)
    there, here = Registered(theirs), Registered(mine)
    states: dict[str, State] = {"a": {}, "b": {AGREED: np.array([3.0, 17.5])}}
    for tensor, state in states.items():
        there.calls.keys_of(tensor, (40, 50), codec_of("auto"), state)
    positions = msgspec.convert(msgspec.to_builtins(theirs.now()), dict[str, Position])
    mine.go_on_at(positions)
    assert mine.now() == theirs.now()
    found: dict[str, State] = {"a": {}, "b": {}}
    for tensor, state in found.items():
        here.calls.keys_of(tensor, (40, 50), codec_of("auto"), state)
    assert found["a"] == {}
    assert found["b"][AGREED].tolist() == [3.0, 17.5]
    found["b"][AGREED][0] = 2.0
    here.calls.keys_of("b", (40, 50), codec_of("auto"), found["b"])
    assert found["b"][AGREED][0] == 2.0
    assert mine.now() != theirs.now()


# --------------------------------------------------------- whose values are in which part of a sum by a codec

SHAPE = (10, 20)

ALL, TWO = 0b111, 0b011


def register(name: str, shape: tuple[int, ...], form: int) -> Key:
    key = Key(0, name, shape, "float32", form=form)
    key.set_grant(KeyGrant(namespace=0, name=name, key=0, first_slot=0, offset=0, chunk_size=80))
    return key


def ended(codec: Codec, results: list[dict[int, int]]) -> EncodedSum:
    """Return a sum whose rounds have ended with these contributors."""
    operations: list[Operation] = []
    errors_of_encoding: list[str] = []
    own = register("w", SHAPE, codec.form(SHAPE) or 0)
    total = EncodedSum(
        encoded_keys(codec, own, register),
        submit=operations.append,
        later=lambda function: function(),
        fail=errors_of_encoding.append,
    )
    errors: list[Exception | None] = []
    total.begin(codec.rounds(np.ones(200, np.float32), {}, GradientPlace(SHAPE, 3, 0, 0)), errors.append)
    for result in results:
        operation = operations.pop()
        operation.contributors.update(result)
        operation.done(None)
    assert (errors, errors_of_encoding) == ([None], [])
    return total


def test_usually_all_of_it_has_the_same_ranks() -> None:
    assert ended(codec_of("fp16"), [{ALL: 0b111}]).counted(200) == [(slice(0, 200), ALL)]


def test_when_a_rank_leaves_each_chunk_has_its_own() -> None:
    total = ended(codec_of("fp16"), [{ALL: 0b101, TWO: 0b010}])
    found = sorted(total.counted(200), key=lambda part: part[0].start)
    assert found == [(slice(0, 80), ALL), (slice(80, 160), TWO), (slice(160, 200), ALL)]
    assert total.contributors == TWO


def test_a_sum_of_factors_has_those_who_are_in_all_of_the_last_ones() -> None:
    codec = codec_of({"type": "powersgd", "rank": 2})
    assert ended(codec, [{ALL: 0b1}, {ALL: 0b1, TWO: 0b10}]).counted(200) == [(slice(0, 200), TWO)]


# ------------------------------------------------------------------------------------------------------ sites


def members(*sites: str) -> list[Member]:
    return [Member(rank, f"host{rank // 2}", 4000 + rank, site, rank) for rank, site in enumerate(sites)]


def test_ranks_are_grouped_by_site_in_the_order_of_the_lowest():
    sites = Sites.of(members("west", "east", "west", "east", "north"), 3)
    assert sites.names == ("west", "east", "north")
    assert sites.ranks == ((0, 2), (1, 3), (4,))
    assert (sites.name, sites.local, sites.leaders, sites.size) == ("east", (1, 3), (0, 1, 4), 5)
    assert not sites.is_leader
    assert Sites.of(members("west", "east", "west"), 1).is_leader


def test_the_host_stands_for_a_site_without_a_name():
    assert Sites.of(members("", "", "", "x"), 0).ranks == ((0, 1), (2,), (3,))


def test_a_rank_that_is_no_member_is_refused():
    with pytest.raises(UsageError, match="rank 5"):
        Sites.of(members("a", "b"), 5)
