"""A state as one buffer."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.mxnet.elastic import decode, encode

STATE = {
    "step": 7,
    "keys": {0: np.arange(12, dtype=np.float32).reshape(3, 4), 1: np.zeros((0, 2), np.int64)},
    "scalar": np.array(2.5),
    "states": {0: (np.ones(3, np.float16), None, [np.array([True, False])])},
    "text": "äöü",
}


def test_what_is_encoded_is_decoded() -> None:
    found = cast("dict[str, Any]", decode(bytearray(encode(STATE))))
    assert (found["step"], found["text"]) == (7, "äöü")
    assert set(found["keys"]) == {0, 1}
    np.testing.assert_array_equal(found["keys"][0], np.arange(12, dtype=np.float32).reshape(3, 4))
    assert (found["keys"][1].shape, found["keys"][1].dtype) == ((0, 2), np.int64)
    assert found["scalar"].shape == ()
    assert found["scalar"] == 2.5
    halves, nothing, flags = found["states"][0]
    assert (halves.dtype, nothing, flags[0].tolist()) == (np.float16, None, [True, False])


def test_equal_states_are_equal_bytes() -> None:
    assert bytes(encode(STATE)) == bytes(encode({**STATE}))


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(UsageError, match=r"script\.loader is a .*object"):
        encode({"script": {"loader": object()}})


@pytest.mark.parametrize("cut", [0, 5, 40, 100])
def test_bytes_that_are_no_state_are_an_error(cut: int) -> None:
    whole = bytes(encode(STATE))
    with pytest.raises(CheckpointError):
        decode(whole[:cut])
