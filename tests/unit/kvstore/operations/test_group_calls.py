"""The calls of a group: numbered in the order of the program, on keys that their sizes choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.kvstore.calls import GroupCalls, TensorExchange
from netstorm.kvstore.forms import Key
from netstorm.protocol.codecs import COLLECTIVE, Element, Reduction


def calls_of(members: tuple[int, ...], size: int) -> tuple[GroupCalls, list[Key]]:
    keys: list[Key] = []

    def register(name: str, elements: int, ranks: tuple[int, ...]) -> Key:
        keys.append(Key(0, name, (elements,), "float32", form=COLLECTIVE, members=ranks))
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
    operation = calls.operation(exchange(1, receivers=(0,)), print)
    assert operation.receivers == (1 << 4,)


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
