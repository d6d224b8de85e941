"""Manifests, and what is wrong with them."""

from __future__ import annotations

import re

import msgspec
import pytest

from netstorm.checkpoint.checksums import checksum
from netstorm.checkpoint.manifest import (
    FORMAT,
    File,
    Manifest,
    Shard,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from netstorm.errors import CheckpointError

MANIFEST = Manifest(
    format=FORMAT,
    framework="PyTorch",
    job="default",
    step=123,
    token="0123456789ab",
    world_size=2,
    written_at=1.5,
    total=128,
    rounds={"weight": 7},
    values=File(file="values-0123456789ab.msgpack", bytes=3, crc32c="00000000"),
    shards=(
        Shard(file="shard-0.bin", bytes=64, crc32c="00000000", rank=0, begin=0),
        Shard(file="shard-1.bin", bytes=64, crc32c="00000000", rank=1, begin=64),
    ),
    own=(),
    tensors=(TensorEntry(name="w", dtype="float32", shape=(5, 5), kind="torch", offset=0, bytes=100),),
)


def test_a_manifest_comes_back():
    assert decode_manifest(encode_manifest(MANIFEST), "manifest.json") == MANIFEST


def test_a_manifest_is_json():
    found = msgspec.json.decode(encode_manifest(MANIFEST))
    assert found["step"] == 123
    assert re.fullmatch("[0-9a-f]{8}", found["crc32c"])


def test_a_change_of_any_byte_is_found():
    text = encode_manifest(MANIFEST)
    for place in range(len(text)):
        for bit in (0x01, 0x20):  # 0x20: the case of a letter
            damaged = bytearray(text)
            damaged[place] ^= bit
            with pytest.raises(CheckpointError, match=r"^m\.json is damaged"):
                decode_manifest(bytes(damaged), "m.json")


def test_a_manifest_that_is_cut_off_anywhere_is_found():
    text = encode_manifest(MANIFEST)
    for length in range(len(text)):
        with pytest.raises(CheckpointError, match="is damaged"):
            decode_manifest(text[:length], "m.json")


def with_right_checksum(text: bytes) -> bytes:
    head = text[: text.rindex(b',\n "crc32c"')]
    return head + f',\n "crc32c": "{checksum(head)}"\n}}\n'.encode()


def test_another_version_of_the_format_is_named():
    text = with_right_checksum(encode_manifest(MANIFEST).replace(b"checkpoint-1", b"checkpoint-9"))
    with pytest.raises(CheckpointError, match=r"netstorm-checkpoint-9.*reads 'netstorm-checkpoint-1'"):
        decode_manifest(text, "m.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shard-1.bin"', b'"../shard-1.bin"'),
        (b'"begin": 64', b'"begin": 63'),
        (b'"total": 128', b'"total": 129'),
        (b'"offset": 0', b'"offset": 99'),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(old, new):
    text = encode_manifest(MANIFEST)
    assert old in text
    with pytest.raises(CheckpointError, match="contradicts itself"):
        decode_manifest(with_right_checksum(text.replace(old, new)), "m.json")
