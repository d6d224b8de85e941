"""What comes over a connection: frames with any message, policies in messages, sessions, SNTP packets."""

from __future__ import annotations

import random
import struct
from collections.abc import Hashable
from typing import Any, Final

import google_crc32c
import msgspec

from netstorm.errors import FrameError
from netstorm.lab.testing.decoders import (
    POLICIES,
    FuzzTarget,
    example,
    message_classes,
    mutate_bytes,
    mutate_value,
    structured,
)
from netstorm.lab.testing.recorder import RecordingProcess
from netstorm.protocol.frames import PROTOCOL_VERSION, checksum, open_frames
from netstorm.protocol.messages import DataMessage
from netstorm.pslite import sntp
from netstorm.pslite.session import Limits
from netstorm.pslite.sntp import PacketKey
from netstorm.pslite.van import Connection, Received
from netstorm.topology.policy import Plan, Policy

__all__ = ["PACK_ERRORS", "TARGETS", "pack", "unpack"]

_HEAD: Final = struct.Struct("<2sBB")
_REST: Final = struct.Struct("<IQq")
_BODY_AT: Final = 28
_DECODER: Final = msgspec.msgpack.Decoder(strict=False)
_ENCODER: Final = msgspec.msgpack.Encoder()
_POLICIES: Final = msgspec.msgpack.Decoder(Policy)
_PACKET_KEY: Final = PacketKey(b"key")
_EVENTS: Final = msgspec.msgpack.Decoder(list[tuple[int, int, int, Any, bytes]])

PACK_ERRORS: Final = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
)
"""What decoding and encoding values of any shape raise."""


def unpack(data: bytes) -> Any:
    """Return the value that MessagePack encodes."""
    return _DECODER.decode(data)


def pack(value: Any) -> bytes:
    """Return a value in MessagePack."""
    return _ENCODER.encode(value)


# ----------------------------------------------------------------------------------------------------- frames


def _frame(body: bytes, *, flags: int = 0, sequence: int = 1, payload_crc: int = 0) -> bytes:
    """Return the number of frames, which is the first byte of an input, and frame 0 with a right checksum."""
    rest = _REST.pack(payload_crc, sequence & 2**64 - 1, 1) + body
    head = _HEAD.pack(b"NS", PROTOCOL_VERSION, flags & 255) + struct.pack("<I", google_crc32c.value(rest))
    return bytes([1 + (flags & 1)]) + head + rest


def _mutate_frame(chance: random.Random, data: bytes, other: bytes) -> bytes:
    kind = chance.random()
    if kind < 0.15 or len(data) <= _BODY_AT:
        return mutate_bytes(chance, data, other)
    flags, body = data[4], data[1 + _BODY_AT :]
    if kind < 0.3:
        body = mutate_bytes(chance, body, other[1 + _BODY_AT :])
    else:
        try:
            body = pack(mutate_value(chance, unpack(body), unpack(other[1 + _BODY_AT :])))
        except PACK_ERRORS:
            body = mutate_bytes(chance, body, other[1 + _BODY_AT :])
    if chance.random() < 0.1:
        flags = chance.getrandbits(3)
    return _frame(body, flags=flags, sequence=chance.getrandbits(8))


def _decode_frame(data: bytes) -> Hashable:
    return type(open_frames(data[1:], data[0] if data else 1).message)


def _frames() -> list[bytes]:
    return [_frame(pack(example(kind, variant))) for kind in message_classes() for variant in (0, 1, 2)]


# --------------------------------------------------------------------------------------------------- policies


def _decode_policy(data: bytes) -> Hashable:
    policy = _POLICIES.decode(data)
    trees = {policy.tree_of(slot) for slot in (0, 1, len(policy.schedule), 2**40)}
    for rank in {0, policy.size // 2, policy.size - 1}:
        for members in ((), tuple(range(min(policy.size, 64))[rank % 2 :: 2]) or (0,)):
            if not members or rank in members:
                plan = Plan(policy, rank, members)
                plan.mask_of(plan.tree_of(3), rank)
    policy.trees[0].path(0, policy.size - 1)
    return len(trees), len(policy.trees), bool(policy.detours), bool(policy.leads)


def _policies() -> list[bytes]:
    return [pack(msgspec.to_builtins(policy)) for policy in POLICIES]


# --------------------------------------------------------------------------------------------------- sessions


class _NoVan:
    """Where nothing arrives; what is sent is counted by nobody."""

    def transmit(self, connection: Connection, header: bytes, payload: object, stream: int = 0) -> None:
        """See `Transmitter`."""

    def open(self, connection: Connection, host: str, port: int) -> None:
        """See `Transmitter`."""

    def close(self, connection: Connection) -> None:
        """See `Transmitter`."""

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""

    def refuse(self, connection: Connection, reason: str) -> None:
        """See `Transmitter`."""

    def progress(self, connection: Connection) -> None:
        """See `Van`."""

    def poll(self, timeout_s: float) -> list[Any]:
        """See `Van`."""
        return []


def _decode_session(data: bytes) -> Hashable:
    """Let an endpoint receive messages: [[connection, flags, sequence, body, payload], ...]."""
    try:
        events = [(*event[:3], pack(event[3]), event[4]) for event in _EVENTS.decode(data)]
    except PACK_ERRORS:
        return "no input of this target"
    van: Any = _NoVan()
    now = 0.0
    process = RecordingProcess(
        van, 0, now=lambda: now, host="a", port=1, limits=Limits(sessions=4, pending_hellos=4)
    )
    for connection, flags, sequence, body, payload in events[:64]:
        now += 0.01
        right = checksum(payload) if flags & 64 == 0 else 0
        frame = _frame(body, flags=flags, sequence=sequence, payload_crc=right)[1:]
        frames = (frame, bytearray(payload)) if flags & 1 else (frame,)
        process.stack.handle(Received(Connection(-1 - (connection & 7)), frames), now)
        process.stack.tick(now)
        process.stack.flush(van, now)
    return len(process.machine.got), len(process.machine.lost)


def _sessions() -> list[bytes]:
    def hello(session: int, sender: int = 1) -> list[Any]:
        return [1, "job", sender, 10 + sender, 0, session, 0, [], False]

    def message(kind: type[msgspec.Struct], variant: int) -> Any:
        return example(kind, variant)

    several = [[0, 0, 0, hello(5), b""], [1, 0, 0, hello(6, 2), b""]]
    several += [
        [number % 2, int(issubclass(kind, DataMessage)), 1 + number // 2, message(kind, 1), b"payload"]
        for number, kind in enumerate(message_classes())
        if kind.__struct_config__.tag not in range(8)
    ]
    control = [[0, 0, 0, hello(5), b""]]
    control += [[0, 0, 0, message(kind, v), b""] for kind in message_classes()[:7] for v in (0, 1)]
    return [pack(several[:20]), pack(several[:2] + several[20:]), pack(control)]


# ------------------------------------------------------------------------------------------------------- SNTP


def _decode_sntp(data: bytes) -> Hashable:
    ended = []
    for read in (
        lambda: sntp.answer(data, received=1.75e9, transmitted=1.75e9, hops=1, error=0.1),
        lambda: sntp.read_answer(data),
        lambda: _PACKET_KEY.open(data),
    ):
        try:
            read()
            ended.append("")
        except FrameError as error:
            ended.append(str(error)[:20])
    return tuple(ended)


def _packets() -> list[bytes]:
    asked = sntp.request(sntp.new_nonce(12345 << 30 | 77))
    answer = sntp.answer(asked, received=1.75e9, transmitted=1.75e9 + 1e-4, hops=2, error=0.01)
    return [asked, answer, _PACKET_KEY.seal(answer)]


TARGETS: Final = (
    FuzzTarget(
        name="frames",
        decode=_decode_frame,
        allowed=(FrameError,),
        seeds=_frames,
        mutate=_mutate_frame,
    ),
    FuzzTarget(
        name="policies",
        decode=_decode_policy,
        allowed=(msgspec.MsgspecError, UnicodeDecodeError),
        seeds=_policies,
        mutate=structured(unpack, pack, PACK_ERRORS),
    ),
    FuzzTarget(
        name="sessions",
        decode=_decode_session,
        allowed=(),
        seeds=_sessions,
        mutate=structured(unpack, pack, PACK_ERRORS),
    ),
    FuzzTarget(
        name="sntp",
        decode=_decode_sntp,
        allowed=(),
        seeds=_packets,
        mutate=mutate_bytes,
    ),
)
