"""An owner's blocks under DCASGD: begin, update, and states as bytes that another owner takes, or refuses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.training.dcasgd import DCASGD, OwnedDCASGD, VectorState, decoded_momentum
from netstorm.training.rule_states import ArrayState, OptimizerState, encoded_state
from tests.unit.training.blocks import granted_key

FLOAT32 = np.dtype(np.float32)
GRADIENT = np.array([1, 2, 3, 4], np.float32)


def owned(*, momentum=0.5, saved=None):
    return OwnedDCASGD(granted_key(), DCASGD(momentum=momentum), saved)


def test_what_one_owner_has_another_one_takes():
    one, other = owned(), owned()
    value = one.begin(1, np.zeros(4, np.float32), b"")
    one.update(1, value, GRADIENT, (0.5,), None)
    sent = one.encoded_state(1, value)
    assert other.problem_of(1, value, sent) == ""
    taken = other.begin(1, value, sent)
    assert other.encoded_state(1, taken) == sent
    for rule, values in ((one, value), (other, taken)):
        rule.update(1, values, GRADIENT, (0.5,), None)
        np.testing.assert_allclose(values, -0.5 * GRADIENT - 0.75 * GRADIENT)


def test_a_count_and_a_momentum_come_back():
    rule = owned()
    value = rule.begin(0, np.zeros(4, np.float32), b"")
    for _ in range(7):
        rule.update(0, value, GRADIENT, (0.5,), None)
    updates, momentum = decoded_momentum(rule.encoded_state(0, value), 4, FLOAT32)
    assert updates == 7
    assert momentum is not None
    np.testing.assert_allclose(momentum, -GRADIENT * (1 - 0.5**7))


def test_a_rule_without_a_momentum_sends_its_count_alone():
    rule = owned(momentum=0.0)
    value = rule.begin(0, np.zeros(4, np.float32), b"")
    assert decoded_momentum(rule.encoded_state(0, value), 4, FLOAT32) == (0, None)


def test_blocks_begin_with_what_a_checkpoint_has_of_them():
    saved = VectorState(np.arange(10, dtype=np.float32), 3)
    rule = owned(saved=saved)
    assert rule.begins_with_states
    value = rule.begin(1, np.zeros(4, np.float32), b"")
    updates, momentum = decoded_momentum(rule.encoded_state(1, value), 4, FLOAT32)
    assert updates == 3
    assert momentum is not None
    assert saved.momentum is not None
    np.testing.assert_array_equal(momentum, [4, 5, 6, 7])
    rule.update(1, value, GRADIENT, (0.5,), None)
    np.testing.assert_array_equal(saved.momentum, np.arange(10))


def test_an_unknown_base_corrects_nothing():
    rule = OwnedDCASGD(granted_key(), DCASGD(lamda=1000.0))
    value = rule.begin(0, np.ones(4, np.float32), b"")
    rule.update(0, value, GRADIENT, (0.1,), None)
    np.testing.assert_allclose(value, 1 - 0.1 * GRADIENT, rtol=1e-6)


def test_a_push_without_a_learning_rate_is_named():
    rule = owned()
    value = rule.begin(0, np.zeros(4, np.float32), b"")
    with pytest.raises(UsageError, match=r"key 'k' with \(\): expected an array and a learning rate"):
        rule.update(0, value, GRADIENT, (), None)


ARRAY = ["array", (4,), "float32", bytes(16), None]
STATE = {"begun": True, "updates": 1, "all_updates": 1}


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        (b"", "0 bytes that are no optimizer's state"),
        ({**STATE, "state": None}, "None: expected an array of float32, of shape (4,), for DCASGD"),
        ({**STATE, "state": [*ARRAY[:3], bytes(15), None]}, "15 bytes of values: expected an array"),
        ({**STATE, "state": ARRAY, "updates": -1}, "counted as -1 and 1 updates: expected 0 to"),
    ],
)
def test_other_bytes_are_said_to_be_wrong_with_what_was_expected(states, problem):
    data = states if isinstance(states, bytes) else msgspec.msgpack.encode(states)
    assert owned().problem_of(0, np.zeros(4, np.float32), data).startswith(problem)


def test_a_momentum_of_another_size_is_not_saved():
    data = encoded_state(OptimizerState(ArrayState((3,), "float32", bytes(12)), True, 1, 1))
    with pytest.raises(
        ProtocolViolation, match=r"a momentum of a block: an array of 'float32', of shape \(3,\)"
    ):
        decoded_momentum(data, 4, FLOAT32)
