"""Frames of a message: the only encoder and decoder. Pure.

Frame 0 is a fixed prefix and a MessagePack body; frame 1, if there is one, is the payload as raw bytes.

    offset  size  prefix field, little-endian
    0       2     magic "NS"
    2       1     protocol version
    3       1     flags: bit 0, a payload follows; bit 1, retransmitted (measures nothing); bit 2, sent while
                  other links out of the sender were busy; bit 3, the payload has no checksum
    4       4     CRC-32C of the rest of frame 0 (from offset 8)
    8       4     CRC-32C of the payload
    12      8     sequence number; 0: not sequenced
    20      8     sent_at, ns on the cluster clock

The body is apart from the prefix so that it is encoded once, however often a message is transmitted.

All versions of the protocol share this prefix and the message `Refused`: so a process can tell one of another
version that it cannot take part, and that one can read why.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import google_crc32c
import msgspec
import numpy as np

from netstorm import __version__
from netstorm.errors import FrameError, OtherProtocol
from netstorm.protocol import messages as m
from netstorm.protocol.texts import clean

__all__ = [
    "MAX_HEADER_BYTES",
    "PROTOCOL_VERSION",
    "SPEAKS_VERSION",
    "Buffer",
    "Checksum",
    "Header",
    "checksum",
    "decode_body",
    "encode_body",
    "open_frames",
    "seal",
    "tag_in",
]

Buffer = Any
"""Anything with the buffer protocol, contiguous: bytes, a NumPy array, a ZeroMQ frame."""

PROTOCOL_VERSION: Final = 2
"""Raised by whoever changes a message: its fields, or what they mean. Processes of different versions refuse
each other. `tests/unit/protocol/test_wire_digest.py` knows how the messages of this version look."""
SPEAKS_VERSION: Final = "speaks NetStorm's protocol in version"
"""How the refusal of a process of another version begins, or goes on."""

MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""A `Joined` with hundreds of nodes or a batch of 10,000 keys is large; nothing legal is larger than this."""

_MAGIC: Final = b"NS"
_HAS_PAYLOAD: Final = 1
_RESENT: Final = 2
_CONTENDED: Final = 4
_UNCHECKED: Final = 8
_PREFIX: Final = struct.Struct("<2sBBIIQq")
_BEGIN: Final = struct.Struct("<2sBBI")
_REST: Final = struct.Struct("<IQq")

_ANY_MESSAGE = (
    m.Hello | m.Welcome | m.Refused | m.Ack | m.Nack | m.Query | m.Goodbye
    | m.Heartbeat | m.Waiting | m.Measured | m.NodeStatus
    | m.Part | m.Delivered
    | m.Join | m.Joined | m.RegisterKeys | m.KeysRegistered
    | m.TopologyRequest | m.TopologyAnswer | m.NewPolicy | m.Barrier | m.BarrierReached
    | m.Finished | m.PeerFinished | m.AllFinished | m.Failed | m.Suspect | m.PeerGone | m.Leave
    | m.ReplicaDigest | m.Moved | m.CallsWaiting | m.CallTimedOut
    | m.LinkTrial | m.LinkRestored | m.FailedLinks | m.Resume | m.Resumed
    | m.Recover | m.RecoverAnswer
    | m.StepTimes | m.StepsGranted
    | m.NewView | m.ViewReport | m.ViewAgreed | m.KeysAnnounced | m.CaughtUp | m.Probe | m.Alive
    | m.Routed
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[m.Message] = msgspec.msgpack.Decoder(_ANY_MESSAGE)


class Header(msgspec.Struct, frozen=True, gc=False):
    """The decoded frame 0."""

    message: m.Message
    sequence: int
    sent_at: int
    payload_crc: int | None
    """None: the payload has no checksum."""
    has_payload: bool
    resent: bool = False
    """Transmitted before, over this connection or an earlier one."""
    contended: bool = False
    """Sent while other links out of the sender were busy, which may have slowed this one."""


def checksum(payload: Buffer) -> int:
    """Return the CRC-32C of a contiguous buffer. 23 GB/s."""
    try:
        return int(google_crc32c.value(payload))
    except TypeError:  # the library accepts no memoryview or bytearray, but NumPy's view of one
        return int(google_crc32c.value(np.frombuffer(payload, np.uint8)))


class Checksum:
    """The checksum of a payload that goes to several processes: computed when the first of them needs it."""

    __slots__ = ("_payload", "_value")

    def __init__(self, payload: Buffer) -> None:
        self._payload = payload
        self._value: int | None = None

    def value(self) -> int:
        """Return it."""
        if self._value is None:
            self._value = checksum(self._payload)
            self._payload = None
        return self._value


def encode_body(message: m.Message) -> bytes:
    """Return the MessagePack body of `message`."""
    return _encoder.encode(message)


def decode_body(body: Buffer) -> m.Message:
    """Return the message of bytes that `encode_body` made here; for a peer's bytes use `open_frames`."""
    return _decoder.decode(body)


def seal(
    body: bytes,
    *,
    sequence: int,
    sent_at: int,
    payload_crc: int | None,
    unchecked: bool = False,
    resent: bool = False,
    contended: bool = False,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """Return frame 0 for an encoded body.

    Args:
        body: of `encode_body`.
        sequence: number of the message; 0: none.
        sent_at: ns on the cluster clock.
        payload_crc: the payload's checksum; None: there is no payload, or it is `unchecked`.
        unchecked: there is a payload, without a checksum.
        resent: see `Header`.
        contended: see `Header`.
        version: of the protocol; another one only for the `Refused` that its process is to read.
    """
    flags = (
        (_HAS_PAYLOAD | _UNCHECKED if unchecked else 0 if payload_crc is None else _HAS_PAYLOAD)
        | (_RESENT if resent else 0)
        | (_CONTENDED if contended else 0)
    )
    rest = _REST.pack(payload_crc or 0, sequence, sent_at) + body
    return _BEGIN.pack(_MAGIC, version, flags, google_crc32c.value(rest)) + rest


def tag_in(frame: Buffer) -> int | None:
    """Return the tag of the message in frame 0, without decoding it; None: it has none.

    The body is a MessagePack array of up to 65 535 fields, and the tag a number of up to 255.
    """
    begin = bytes(memoryview(frame)[_PREFIX.size : _PREFIX.size + 5])
    after = begin[1:] if begin[:1] and begin[0] >> 4 == 0x9 else begin[3:] if begin[:1] == b"\xdc" else b""
    if after[:1] == b"\xcc":
        after = after[1:]
    elif after and after[0] > 0x7F:
        return None
    return after[0] if after else None


def open_frames(frame: Buffer, frames: int) -> Header:
    """Decode frame 0 of a message that came as `frames` frames.

    The payload is not checked: compare `checksum(payload)` with `payload_crc` where it is stored.

    Raises:
        OtherProtocol: the sender speaks another version.
        FrameError: anything else is wrong with the frame; no other exception is raised, whatever the bytes.
    """
    data = bytes(frame)
    if len(data) < _PREFIX.size or len(data) > MAX_HEADER_BYTES:
        raise FrameError(f"frame 0 has {len(data)} bytes; {_PREFIX.size} to {MAX_HEADER_BYTES} are legal")
    magic, version, flags, header_crc, payload_crc, sequence, sent_at = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise FrameError(f"frame 0 begins with {magic!r}, not with NetStorm's {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise OtherProtocol(
            f"its sender {SPEAKS_VERSION} {version}, this process {PROTOCOL_VERSION} (NetStorm {__version__})"
            ": install the same release everywhere",
            version,
        )
    if google_crc32c.value(data[8:]) != header_crc:
        raise FrameError("frame 0 fails its checksum")
    has_payload = bool(flags & _HAS_PAYLOAD)
    if frames != 1 + has_payload:
        raise FrameError(f"a message of {frames} frames, where its header announces {1 + has_payload}")
    try:
        message = clean(_decoder.decode(memoryview(data)[_PREFIX.size :]))
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"the body does not decode: {error}") from None
    return Header(
        message=message,
        sequence=sequence,
        sent_at=sent_at,
        payload_crc=None if flags & _UNCHECKED else payload_crc,
        has_payload=has_payload,
        resent=bool(flags & _RESENT),
        contended=bool(flags & _CONTENDED),
    )
