"""What codecs keep, and its form in a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.compression.registry import rules_of
from netstorm.errors import UsageError
from netstorm.training.codec_states import CodecStates, Parameter, units_of

A, B, C = (Parameter(name, (size,)) for name, size in (("a", 2), ("b", 3), ("c", 1)))


def unit(*parameters):
    [found] = units_of(parameters, rules_of("int8"))
    return found


def test_residuals_go_along_with_parameters_into_other_units():
    kept = CodecStates()
    kept.of(unit(A, B))["residual"] = np.arange(5, dtype=np.float32)
    kept.of(unit(C))["residual"] = np.full(1, 9, np.float32)

    state = kept.of(unit(B, C))

    assert state["residual"].tolist() == [2, 3, 4, 9]
    assert kept.of(unit(A))["residual"].tolist() == [0, 1]


def test_a_unit_has_the_same_state_again_and_again():
    kept = CodecStates()
    assert kept.of(unit(A, B)) is kept.of(unit(B, A))


def test_what_is_no_elements_stays_with_the_unit():
    kept = CodecStates()
    state = kept.of(unit(A, B))
    state["right"], state["residual"] = np.ones((5, 1), np.float32), np.ones(5, np.float32)

    again = CodecStates()
    again.load(kept.saved())

    assert again.of(unit(A, B))["right"].shape == (5, 1)
    assert set(again.of(unit(A))) == {"residual"}


def test_gradients_are_counted_by_parameter_and_go_on_from_a_checkpoint():
    kept, again = CodecStates(), CodecStates()
    numbers = [kept.next_number(unit(A, B)) for _ in range(2)]

    again.load(kept.saved())

    assert numbers == [0, 1]
    assert again.next_number(unit(B, C)) == 2
    assert again.next_number(unit(A)) == 2
    assert again.next_number(unit(C)) == 3


def test_a_checkpoint_does_not_change_with_what_comes_later():
    kept = CodecStates()
    state = kept.of(unit(A, B))
    state["residual"] = np.ones(5, np.float32)

    saved = kept.saved()
    state["residual"] += 1

    assert saved["parameters"]["b"]["residual"].tolist() == [1, 1, 1]


def test_the_residual_of_a_vector_is_loaded_by_parameter():
    kept = CodecStates()
    kept.load_residual({"a": np.array([1, 2], np.float32), "b": np.array([3, 4, 5], np.float32)})
    assert kept.of(unit(A, B))["residual"].tolist() == [1, 2, 3, 4, 5]


def test_another_state_is_refused():
    with pytest.raises(UsageError, match="a state with 'x' is none of codecs"):
        CodecStates().load({"x": {}})
