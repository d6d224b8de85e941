"""NumPy's arrays as bytes, and a rank's own values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from netstorm.checkpoint.own_values import decode_own, encode_own
from netstorm.checkpoint.tensors import Description, NumpyTensors
from netstorm.errors import CheckpointError, UsageError

numbers = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int8, np.uint64, np.bool_, np.complex64]),
    arrays.array_shapes(min_dims=0, min_side=0, max_side=5),
)


@given(numbers, st.data())
def test_an_array_comes_back_bit_for_bit_from_any_pieces(array, data):
    tensors = NumpyTensors()
    described = tensors.describe(array, "a")
    memory = bytearray(described.bytes)
    cut = data.draw(st.integers(0, described.bytes))
    tensors.copy(array, 0, cut, memoryview(memory)[:cut])
    tensors.copy(array, cut, described.bytes, memoryview(memory)[cut:])
    found = tensors.restore(described, memoryview(memory))
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(numbers)
def test_own_values_come_back(array):
    own = decode_own(encode_own({"rng": array, "epoch": 3}, NumpyTensors()), NumpyTensors())
    assert isinstance(own, dict)
    assert own["epoch"] == 3
    assert own["rng"].tobytes() == array.tobytes()


def test_an_array_that_is_not_contiguous_is_copied_in_its_order():
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    out = bytearray(array.nbytes)
    NumpyTensors().copy(array, 0, len(out), memoryview(out))
    assert np.array_equal(np.frombuffer(out, np.int32).reshape(4, 3), array)


def test_an_array_of_objects_is_refused():
    with pytest.raises(UsageError, match="loader is an array of object"):
        NumpyTensors().describe(np.array([None]), "loader")


def test_own_values_that_make_no_sense_are_an_error_of_ours():
    with pytest.raises(CheckpointError, match="own values"):
        decode_own(b"\x93\x01", NumpyTensors())


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("object", (1,), 8), ("float32", (-1, -1), 4), ("float32", (2,), 4), ("U4", (1,), 16), ("(", (1,), 1)],
)
def test_what_is_no_array_of_numbers_is_an_error(dtype, shape, size):
    with pytest.raises(CheckpointError, match="the checkpoint has an array"):
        NumpyTensors().restore(Description("numpy", dtype, shape, size), memoryview(bytearray(size)))


def test_own_values_whose_texts_are_none_are_an_error():
    own = encode_own({"rng": np.ones(1, np.float32)}, NumpyTensors())
    with pytest.raises(CheckpointError, match="make no sense"):
        decode_own(own.replace(b"float32", b"\xfffloat3"), NumpyTensors())
