"""The records of a replay log, and their form in the file: records <-> bytes. Pure.

    the file    magic with the format's version, then records
    a record    length of its body, CRC-32C of its body (each u32, little-endian), body in MessagePack

A record is written before any node is told what it says. So no node knows of a record whose writing was cut
off at the end of the file: it is left out. Any other damage is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from netstorm.errors import UsageError
from netstorm.protocol.frames import checksum
from netstorm.protocol.messages import Departure, HiddenKey, KeySpec, Member
from netstorm.topology.policy import Policy

__all__ = [
    "MAGIC",
    "BarrierArrival",
    "Began",
    "Ended",
    "Finished",
    "Installed",
    "KeyAdded",
    "Leased",
    "Record",
    "Viewed",
    "encode",
    "read",
]

MAGIC: Final = b"NSSTATE\x01"

_HEAD: Final = struct.Struct("<II")

_MOST_RECORD_BYTES: Final = 64 * 2**20
"""A policy of 512 nodes has 5 MB. A larger length is damage."""


class _Base(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Base of all records. Fields are append-only."""


class Began(_Base, frozen=True, tag=1):
    """All nodes have joined."""

    job: str
    release: str
    boot: str
    """Identity of the host's run since it was last started: a log from before may lack its end."""
    chunks: tuple[int, int, int]
    """Sizes of chunks: smallest, largest, and how many are enough (`ChunkSizes`)."""
    members: tuple[Member, ...]
    policy: Policy
    owners: tuple[int, ...] = ()
    """Weights by rank, for asynchronous training."""
    first_node_settings: dict[str, str] = msgspec.field(default_factory=dict)
    """By variable: the settings of the job's first node, on a scheduler of several jobs."""
    secret: HiddenKey = HiddenKey()
    """By which nodes recognise the job's schedulers."""
    reproducible: bool = False
    """Results are the same in each run (NETSTORM_REPRODUCIBLE)."""


class KeyAdded(_Base, frozen=True, tag=2):
    """A key was registered; its round 0 runs under `version`."""

    rank: int
    spec: KeySpec
    version: int


class Leased(_Base, frozen=True, tag=3):
    """Rounds up to these may have been granted: (key, round). Their policies are in the records before."""

    rounds: tuple[tuple[int, int], ...]


class Installed(_Base, frozen=True, tag=4):
    """A new policy applies from these rounds on: (key, round)."""

    policy: Policy
    starts: tuple[tuple[int, int], ...]


class BarrierArrival(_Base, frozen=True, tag=5):
    """A rank has arrived at a barrier."""

    rank: int
    number: int


class Finished(_Base, frozen=True, tag=6):
    """A rank will push no more."""

    rank: int
    last_rounds: dict[int, int]


class Ended(_Base, frozen=True, tag=7):
    """The job is over: there is nothing to take over."""

    text: str


class Viewed(_Base, frozen=True, tag=8):
    """A new view was announced, or, without members, agreed on. Its policy is in the record before."""

    view: int
    version: int = -1
    """Of its policy."""
    members: tuple[Member, ...] = ()
    """The nodes that are in the job, by rank."""
    departures: tuple[Departure, ...] = ()
    agreed: bool = False


Record: TypeAlias = Viewed | Began | KeyAdded | Leased | Installed | BarrierArrival | Finished | Ended

_DECODER: Final = msgspec.msgpack.Decoder(Record)


def encode(records: Iterable[Record]) -> bytes:
    """Return what is appended to the file for `records`."""
    parts = []
    for record in records:
        body = msgspec.msgpack.encode(record)
        parts += [_HEAD.pack(len(body), checksum(body)), body]
    return b"".join(parts)


def read(data: bytes, name: str) -> tuple[list[Record], int]:
    """Return the records of a file, and how many of its bytes they take. What follows was cut off.

    Args:
        data: the whole file.
        name: what errors call it.

    Raises:
        UsageError: the file is no such log, of another version, or damaged; says where.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return [], 0
        known = "written by another version of NetStorm" if data[:7] == MAGIC[:7] else "not a scheduler's log"
        raise UsageError(
            f"{name} is {known}: give another NETSTORM_STATE_DIR, or remove the file if its job is over"
        )
    records: list[Record] = []
    at = len(MAGIC)
    while at < len(data):
        rest = memoryview(data)[at:]
        if len(rest) < _HEAD.size:
            break
        size, crc = _HEAD.unpack_from(rest)
        end = _HEAD.size + size
        body = rest[_HEAD.size : end]
        if size == 0 or size > _MOST_RECORD_BYTES or len(body) < size or checksum(bytes(body)) != crc:
            if (end >= len(rest) and size <= _MOST_RECORD_BYTES) or not any(rest):
                break  # cut off, or never written
            raise UsageError(_damaged(name, at))
        try:
            records.append(_DECODER.decode(body))
        except (msgspec.DecodeError, ValueError) as error:
            raise UsageError(f"{_damaged(name, at)}: {error}") from None
        at += end
    return records, at


def _damaged(name: str, at: int) -> str:
    return f"{name} is damaged at byte {at}: its job cannot be taken over; remove the file to begin anew"
