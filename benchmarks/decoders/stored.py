"""What NetStorm reads that it has written itself, or helped to write: keys, allow lists, checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import msgspec

from decoders.files import as_file
from decoders.wire import PACK_ERRORS
from netstorm.checkpoint.format import FORMAT, Index, checksum, decode_index
from netstorm.errors import SettingsError, UsageError
from netstorm.lab.testing.decoders import FuzzTarget, example, mutate_bytes, mutate_value, of_words
from netstorm.pslite.admission import parse_allow_list
from netstorm.pslite.keys import JobKey, secret_text

__all__ = ["TARGETS"]

_KEY: Final = JobKey(bytes(range(32)))
_ALLOWED: Final = (
    b"# nodes of this job\n"
    b"tokyo-1 Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID\n"
    b"paris-1 rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\n"
)


def _decode_allow_list(data: bytes) -> Hashable:
    return len(parse_allow_list(data.decode("utf-8", errors="replace"), "the list"))


def _read_key(path: Path) -> Hashable:
    return len(JobKey.load(path).secret)


def _sealed(head: bytes) -> bytes:
    """Return the text of an index with a right checksum; `head` lacks the last brace."""
    return head + f',\n "crc32c": "{checksum(head):08x}"\n}}\n'.encode()


def _indices() -> list[bytes]:
    value = example(Index, 1)
    value["format"] = FORMAT
    empty = {**value, "files": [], "weight_map": {}, "state": {"values": "", "tensors": {}}, "own": []}
    return [_sealed(msgspec.json.encode(one)[:-1]) for one in (value, empty)]


def _mutate_index(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly keep the checksum right."""
    if chance.random() < 0.1:
        return mutate_bytes(chance, data, other)
    try:
        value: Any = json.loads(data)
        value.pop("crc32c", None)
        if chance.random() < 0.2:
            return _sealed(mutate_bytes(chance, msgspec.json.encode(value)[:-1], other))
        return _sealed(msgspec.json.encode(mutate_value(chance, value, json.loads(other)))[:-1])
    except (*PACK_ERRORS, AttributeError):
        return _sealed(mutate_bytes(chance, data, other))


def _decode_index(data: bytes) -> Hashable:
    index = decode_index(data, "the index")
    return len(index.weight_map), len(index.files)


TARGETS: Final = (
    FuzzTarget(
        name="allow-lists",
        decode=_decode_allow_list,
        allowed=(SettingsError,),
        seeds=lambda: [_ALLOWED],
        mutate=of_words((b"tokyo-1 ", b"#", b"\n", b" ")),
    ),
    FuzzTarget(
        name="job-keys",
        decode=as_file(_read_key),
        allowed=(SettingsError,),
        seeds=lambda: [_KEY.file_text().encode(), secret_text("node key", {"secret": "x"}).encode()],
        mutate=mutate_bytes,
    ),
    FuzzTarget(
        name="indices",
        decode=_decode_index,
        allowed=(UsageError,),
        seeds=_indices,
        mutate=_mutate_index,
    ),
)
