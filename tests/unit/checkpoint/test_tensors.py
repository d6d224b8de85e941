"""Arrays as bytes, in files that safetensors itself reads and writes, and whole states in one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from netstorm.checkpoint.format import (
    Description,
    NumpyTensors,
    decode_tensors,
    digest,
    encode_tensors,
    pack,
    restore,
    take_apart,
    unpack,
)
from netstorm.errors import CheckpointError, UsageError

WEIGHTS = {"w": np.arange(6.0).reshape(2, 3), "empty": np.zeros(0, np.int8)}
STATE: dict[str, Any] = {"step": 7, "model": WEIGHTS}
TENSORS = NumpyTensors()

numbers = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int8, np.uint64, np.bool_, np.complex64]),
    arrays.array_shapes(min_dims=0, min_side=0, max_side=5),
)
odd: st.SearchStrategy[Any] = st.sampled_from(["complex128", "longdouble", ">f4"]).flatmap(
    lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0))
)
small = st.builds(
    lambda shape, seed: np.random.default_rng(seed).random(tuple(shape)).astype(np.float32),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 99),
)
states = st.recursive(
    st.none() | st.integers(0, 9) | st.text(max_size=3) | small,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


def encode(tensors: dict[str, Any]) -> bytes:
    described = {name: TENSORS.describe(array, name) for name, array in tensors.items()}
    return bytes(encode_tensors(described, lambda name: TENSORS.data(tensors[name]), {"by": "us"}))


def same(one: object, other: object) -> bool:
    assert isinstance(one, np.ndarray)
    assert isinstance(other, np.ndarray)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: name != "__metadata__"), numbers, max_size=6))
def test_safetensors_reads_what_is_written_here(tensors):
    found = safetensors.numpy.load(encode(tensors))
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in found)


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: name != "__metadata__"), numbers, max_size=6))
def test_what_safetensors_writes_is_read_here(tensors):
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    slots, texts = decode_tensors(safetensors.numpy.save(contiguous, {"by": "them"}))
    assert texts == {"by": "them"}
    assert {name: (slot.shape, bytes(slot.data)) for name, slot in slots.items()} == {
        name: (array.shape, array.tobytes()) for name, array in tensors.items()
    }


@given(st.dictionaries(st.text(max_size=2), numbers | odd, max_size=6))
def test_arrays_of_any_type_come_back_bit_for_bit_and_aligned(state):
    found = unpack(pack(state, TENSORS), TENSORS)
    assert isinstance(found, dict)
    assert all(
        same(found[name], array.astype(array.dtype.newbyteorder("="))) for name, array in state.items()
    )
    assert all(array.flags.writeable or not array.size for array in found.values())
    slots, _ = decode_tensors(pack(state, TENSORS))
    begin = min(
        (np.frombuffer(slot.data, np.uint8).ctypes.data for slot in slots.values() if slot.data), default=0
    )
    for name, array in found.items():
        if array.size:
            at = np.frombuffer(slots[name or "the state"].data, np.uint8).ctypes.data - begin
            assert at % array.dtype.itemsize == 0


def test_types_that_safetensors_lacks_have_one_side_more():
    tensors = {"c": np.array([1 + 2j]), "l": np.ones((2, 1), np.longdouble)}
    found = safetensors.numpy.load(encode(tensors))
    assert found["c"].tolist() == [[1.0, 2.0]]
    assert (found["l"].dtype, found["l"].shape) == (np.uint8, (2, 1, np.longdouble().itemsize))


def test_an_array_that_is_not_contiguous_is_copied_in_its_order():
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert same(safetensors.numpy.load(encode({"a": array}))["a"], array)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:7],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"[0,48]", b"[8,48]"),
        lambda data: data.replace(b"[0,48]", b"[0,-8]"),
        lambda data: data.replace(b"[48,52]", b"[44,52]"),
        lambda data: data.replace(b'"shape":[6]', b'"shape":"6"'),
        lambda data: data.replace(b'{"__', b'["__'),
    ],
)
def test_files_that_safetensors_refuses_are_refused_here(damage):
    whole = encode({"a": np.arange(6.0), "i": np.ones(1, np.int32)})
    decode_tensors(whole)
    damaged = damage(whole)
    assert damaged != whole
    with pytest.raises(CheckpointError, match="state"):
        decode_tensors(damaged)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(damaged)


def test_an_array_of_objects_is_refused():
    with pytest.raises(UsageError, match="loader is an array of object"):
        TENSORS.describe(np.array([None]), "loader")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("object", (1,), 8), ("float32", (-1, -1), 4), ("float32", (2,), 4), ("U4", (1,), 16), ("(", (1,), 1)],
)
def test_what_is_no_array_of_numbers_is_an_error(dtype, shape, size):
    with pytest.raises(CheckpointError, match="the checkpoint has an array"):
        TENSORS.restore(Description("numpy", dtype, shape, size), memoryview(bytearray(size)))


def test_a_tensor_that_is_in_no_file_is_named():
    tree, _, _ = take_apart(STATE, TENSORS)
    with pytest.raises(CheckpointError, match=r"names a tensor 'model\.w', which is in none"):
        restore(tree, {}, TENSORS)


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
    for end in (0, 8, 100, len(whole) - 1):
        with pytest.raises(CheckpointError, match="state"):
            unpack(whole[:end], TENSORS)
    without_tree = encode({})
    with pytest.raises(CheckpointError, match="state make no sense"):
        unpack(without_tree, TENSORS)


def test_texts_that_are_none_are_an_error() -> None:
    packed = pack({"rng": np.ones(1, np.float32)}, TENSORS)
    with pytest.raises(CheckpointError, match="no tensors of safetensors"):
        unpack(packed.replace(b"float32", b"\xfffloat3"), TENSORS)


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(UsageError, match=r"model\.hook is a .*object"):
        pack({"model": {"hook": object()}}, TENSORS)
