"""Indices of checkpoints and what is wrong with them, names, and who writes which tensor."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.checkpoint.format import (
    File,
    Index,
    Size,
    ValueTree,
    checksum,
    decode_index,
    encode_index,
    folder_of_step,
    shares,
    step_of_folder,
    superfluous,
)
from netstorm.errors import CheckpointError

INDEX = Index(
    metadata=Size(total_size=108),
    weight_map={"w": "a.safetensors", "b": "b.safetensors", "own.0.c": "a.safetensors"},
    framework="PyTorch",
    job="default",
    step=123,
    token="0123456789ab",
    world_size=2,
    written_at=1.5,
    rounds={"weight": 7},
    files=(
        File(file="a.safetensors", bytes=164, crc32c="00000000", rank=0),
        File(file="b.safetensors", bytes=64, crc32c="00000000", rank=1),
    ),
    state=ValueTree(b"\x00\xff", {"w": "torch.float32", "b": "torch.bfloat16"}),
    own=(ValueTree(b"\xc0", {"own.0.c": "numpy.int8"}), ValueTree(b"\xc0", {})),
)


def test_an_index_comes_back():
    assert decode_index(encode_index(INDEX), "index.json") == INDEX


def test_an_index_is_json_as_other_programs_write_it():
    found = msgspec.json.decode(encode_index(INDEX))
    assert found["step"] == 123
    assert list(found)[:2] == ["metadata", "weight_map"]
    assert found["metadata"] == {"total_size": 108}
    assert found["weight_map"]["b"] == "b.safetensors"
    assert re.fullmatch("[0-9a-f]{8}", found["crc32c"])


def test_a_change_of_any_byte_is_found():
    text = encode_index(INDEX)
    for place in range(len(text)):
        for bit in (0x01, 0x20):  # 0x20: the case of a letter
            damaged = bytearray(text)
            damaged[place] ^= bit
            with pytest.raises(CheckpointError, match=r"^m\.json is damaged"):
                decode_index(bytes(damaged), "m.json")


def test_an_index_that_is_cut_off_anywhere_is_found():
    text = encode_index(INDEX)
    for length in range(len(text)):
        with pytest.raises(CheckpointError, match="is damaged"):
            decode_index(text[:length], "m.json")


def with_right_checksum(text: bytes) -> bytes:
    head = text[: text.rindex(b',\n "crc32c"')]
    return head + f',\n "crc32c": "{checksum(head):08x}"\n}}\n'.encode()


def test_another_version_of_the_format_is_named():
    text = with_right_checksum(encode_index(INDEX).replace(b"checkpoint-2", b"checkpoint-9"))
    with pytest.raises(CheckpointError, match=r"netstorm-checkpoint-9.*reads 'netstorm-checkpoint-2'"):
        decode_index(text, "m.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"b.safetensors"', b'"../b.safetensors"'),
        (b'"b": "b.safetensors"', b'"b": "c.safetensors"'),
        (b'"b": "b.safetensors"', b'"c": "b.safetensors"'),
        (b'"own.0.c": "a.safetensors"', b'"own.1.c": "a.safetensors"'),
        (b'"bytes": 64', b'"bytes": -64'),
        (b',\n  {\n   "values": "wA==",\n   "tensors": {}\n  }', b""),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(old, new):
    text = encode_index(INDEX)
    assert old in text
    with pytest.raises(CheckpointError, match="contradicts itself"):
        decode_index(with_right_checksum(text.replace(old, new)), "m.json")


@given(st.integers(0, 10**18 - 1))
def test_a_folder_is_named_after_its_step(step):
    assert step_of_folder(folder_of_step(step)) == step


@pytest.mark.parametrize("name", ["step-12", "step-0001234567", "step-000123.tmp", "other", "step-00012x"])
def test_other_folders_are_no_checkpoints(name):
    assert step_of_folder(name) is None


@pytest.mark.parametrize(
    ("complete", "keep", "removed"),
    [
        ({1: True, 2: True, 3: True}, None, []),
        ({1: True, 2: True, 3: True}, 2, [1]),
        ({1: True, 2: False, 3: True}, 2, [2]),
        ({1: True, 2: False, 3: True}, 1, [1, 2]),
        ({1: True, 2: False}, 1, []),
        ({1: False, 2: False}, 1, []),
    ],
)
def test_the_oldest_go_and_what_was_half_written_before_a_complete_one(complete, keep, removed):
    assert superfluous(complete, keep) == removed


@given(st.dictionaries(st.integers(0, 30), st.booleans()), st.none() | st.integers(1, 5))
def test_the_newest_complete_one_stays(complete, keep):
    newest = max((step for step, is_complete in complete.items() if is_complete), default=None)
    assert newest not in superfluous(complete, keep)


sizes = st.lists(st.integers(0, 1000) | st.integers(0, 100_000), max_size=12)


@given(sizes, st.integers(1, 9), st.data())
def test_every_tensor_has_one_writer_and_what_is_the_first_ones_is_its(sizes, writers, data):
    first = data.draw(st.sets(st.integers(0, len(sizes) - 1))) if sizes else set()
    owners = shares(sizes, writers, first=first)
    assert len(owners) == len(sizes)
    assert all(0 <= owner < writers for owner in owners)
    assert all(owners[tensor] == 0 for tensor in first)


@given(sizes, st.integers(1, 9))
def test_nobody_writes_more_than_another_but_for_one_tensor(sizes, writers):
    loads = [0] * writers
    for size, owner in zip(sizes, shares(sizes, writers), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= max(sizes, default=0)
