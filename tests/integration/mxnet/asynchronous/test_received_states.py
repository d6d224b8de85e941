"""States of an optimiser that another rank sends with a block: what the block's new owner takes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.frontends.mxnet.asynchronous import CollectedStates
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.owner import BlockPlace, OwnedRule
from netstorm.frontends.mxnet.updates import CalledUpdater

PLACE = BlockPlace("w", 0, (6, 2), 0)
ADAM = {"updates": 1, "all_updates": 1, "begun": True}
ARRAY = ["array", (6, 2), "float32", bytes(48), None]
ROWS = np.array([1, 4]).tobytes()


def rule_of(optimizer: Any) -> OwnedRule:
    return OwnedRule(CalledUpdater.of_optimizer(optimizer))


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
@pytest.mark.parametrize(
    ("kind", "dtype", "arguments"),
    [
        ("SGD", "float32", {}),
        ("SGD", "float16", {"momentum": 0.9, "multi_precision": True}),
        ("Adam", "float32", {}),
        ("Ftrl", "float32", {}),
        ("LAMB", "float32", {}),
        ("DCASGD", "float32", {"momentum": 0.5}),
    ],
)
def test_what_one_owner_has_another_one_takes(kind: str, dtype: str, arguments: Any, stype: str) -> None:
    rules = [rule_of(getattr(mx.optimizer, kind)(learning_rate=0.5, **arguments)) for _ in range(2)]
    if stype != "default" and kind not in ("SGD", "Adam", "Ftrl"):
        pytest.skip("it has no sparse update")
    value = mx.nd.ones((6, 2), dtype=dtype).tostype(stype)
    for updates in range(2):
        encoded = rules[0].encoded_state(PLACE, value)
        assert rules[1].problem_of(PLACE, value, encoded) == ""
        rules[1].take_state(PLACE, value, encoded)
        assert rules[1].encoded_state(PLACE, value) == encoded
        if not updates:
            change = rules[0].update_compensated if kind == "DCASGD" else rules[0].update
            more = {"base": value.copy()} if kind == "DCASGD" else {}
            change(PLACE, value.copy(), value, (0.5, 1.0), **more)


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        (b"", "0 bytes that are no optimizer's state"),
        (b"\xc1", "1 bytes that are no optimizer's state"),
        ({**ADAM, "updates": -1, "state": None}, "counted as -1 and 1 updates: expected 0 to "),
        ({**ADAM, "state": None}, "None: expected 2 states"),
        ({**ADAM, "state": ["several", [ARRAY]]}, "1 states: expected 2 states"),
        ({**ADAM, "state": ["several", [ARRAY, 3]]}, "3: expected an array of float32, of shape (6, 2)"),
        (
            {**ADAM, "state": ["several", [ARRAY, ["array", (6, 2), "O", bytes(48)]]]},
            "an array of 'O', of shape (6, 2): expected an array of float32",
        ),
        (
            {**ADAM, "state": ["several", [["array", (2, 6), *ARRAY[2:]], ARRAY]]},
            "an array of 'float32', of shape (2, 6): expected",
        ),
        (
            {**ADAM, "state": ["several", [["array", (6, 2), "float32", bytes(40)], ARRAY]]},
            "40 bytes of values: expected",
        ),
        (
            {**ADAM, "state": ["several", [["array", (6, 2), "float32", bytes(16), ROWS[:9]], ARRAY]]},
            "rows with 9 bytes of numbers",
        ),
        (
            {
                **ADAM,
                "state": ["several", [["array", (6, 2), "float32", bytes(16), ROWS[8:] + ROWS[:8]], ARRAY]],
            },
            "2 rows whose numbers do not rise from 0 to 5",
        ),
        (
            {**ADAM, "state": ["several", [["array", (6, 2), "float32", bytes(8), ROWS], ARRAY]]},
            "8 bytes of values",
        ),
    ],
)
def test_anything_else_is_said_to_be_wrong_with_what_was_expected(states: Any, problem: str) -> None:
    rule = rule_of(mx.optimizer.Adam())
    encoded = states if isinstance(states, bytes) else msgspec.msgpack.encode(states)
    assert rule.problem_of(PLACE, mx.nd.ones((6, 2)), encoded).startswith(problem)


def test_a_function_has_no_states() -> None:
    rule = OwnedRule(CalledUpdater.of_function(lambda *_: None))
    assert rule.problem_of(PLACE, mx.nd.ones((6, 2)), b"") == ""
    assert rule.problem_of(PLACE, mx.nd.ones((6, 2)), b"x").startswith("1 bytes: expected none of ")


@pytest.mark.parametrize(
    "states", [b"x", msgspec.msgpack.encode({**ADAM, "state": ["array", (6, 2), "O", b"1"]})]
)
def test_what_an_owner_sends_to_be_saved_is_named_with_its_key(states: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="key 'w': an owner has sent as a block's state"):
        CollectedStates().add("w", (6, 2), {0: states})
