"""A state in one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.checkpoint.packing import digest, pack, unpack
from netstorm.checkpoint.tensors import NumpyTensors
from netstorm.errors import CheckpointError, UsageError

WEIGHTS = {"w": np.arange(6.0).reshape(2, 3), "empty": np.zeros(0, np.int8)}
STATE: dict[str, Any] = {"step": 7, "model": WEIGHTS}
TENSORS = NumpyTensors()

arrays = st.builds(
    lambda shape, seed: np.random.default_rng(seed).random(tuple(shape)).astype(np.float32),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 99),
)
states = st.recursive(
    st.none() | st.integers(0, 9) | st.text(max_size=3) | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(states)
def test_a_state_comes_back_as_it_was(state: object) -> None:
    np.testing.assert_equal(unpack(pack(state, TENSORS), TENSORS), state)


@given(states, states)
def test_digests_are_equal_if_and_only_if_states_are(one: object, other: object) -> None:
    equal = pack(one, TENSORS) == pack(other, TENSORS)
    assert (digest(one, TENSORS) == digest(other, TENSORS)) == equal
    assert 0 <= digest(one, TENSORS) < 2**63


def test_a_single_bit_changes_the_digest() -> None:
    changed = {**STATE, "model": {**WEIGHTS, "w": WEIGHTS["w"] + np.eye(2, 3) * 1e-15}}
    assert digest(changed, TENSORS) != digest(STATE, TENSORS)


def test_bytes_that_are_cut_off_are_an_error() -> None:
    whole = pack(STATE, TENSORS)
    for end in (0, 8, len(whole) - 1):
        with pytest.raises(CheckpointError, match="state"):
            unpack(whole[:end], TENSORS)


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(UsageError, match=r"model\.hook is a .*object"):
        pack({"model": {"hook": object()}}, TENSORS)
