"""What an owner's rule has of a block, as bytes that another owner takes, or refuses."""

from __future__ import annotations

import struct
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)
from netstorm.frontends.torch.owned_blocks import decoded_states, encoded_states, problem_of_states


def test_a_count_and_a_momentum_come_back():
    momentum = np.arange(3, dtype=np.float32)
    data = encoded_states(7, momentum)
    assert problem_of_states(data, momentum.nbytes) == ""
    updates, found = decoded_states(data, momentum.dtype)
    assert updates == 7
    assert found is not None
    np.testing.assert_array_equal(found, momentum)
    assert decoded_states(encoded_states(2**40, None), momentum.dtype) == (2**40, None)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes: expected a count of 8 bytes and a momentum of 12"),
        (encoded_states(1, None), "8 bytes: expected"),
        (bytes(21), "21 bytes: expected"),
        (struct.pack("<q", -1) + bytes(12), "counted as -1 updates: expected 0 or more"),
    ],
)
def test_other_bytes_are_said_to_be_wrong_with_what_was_expected(data, problem):
    assert problem_of_states(data, 12).startswith(problem)
