"""The sums of tensors by codecs, numbered."""

from __future__ import annotations

import msgspec
import numpy as np

from netstorm.compression.codec import AGREED, State
from netstorm.compression.registry import codec_of
from netstorm.kvstore.calls import CallPositions, Position, TensorCalls
from netstorm.kvstore.forms import Key


class Registered:
    """Keys as a group has made them known."""

    def __init__(self, positions: CallPositions, members: tuple[int, ...] = (0, 1, 2)) -> None:
        self.keys: dict[str, Key] = {}
        self.calls = TensorCalls("group/codecs 0", members, size=3, register=self._register)
        positions.add(self.calls)

    def _register(self, name: str, shape: tuple[int, ...], form: int, members: tuple[int, ...]) -> Key:
        assert name not in self.keys
        self.keys[name] = Key(0, name, shape, "float32", form=form, members=members)
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
