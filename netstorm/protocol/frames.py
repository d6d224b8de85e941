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
from collections.abc import Callable, Iterable
from typing import Any, Final, NewType, TypeAlias, TypeVar

import google_crc32c
import msgspec
import numpy as np
from msgspec import inspect

from netstorm import __version__
from netstorm.errors import FrameError, OtherProtocol, ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.topology.policy import Policy

__all__ = [
    "MAX_HEADER_BYTES",
    "PROTOCOL_VERSION",
    "SCHEDULER",
    "SMALL",
    "SPEAKS_VERSION",
    "UNKNOWN",
    "BodyEncoder",
    "Buffer",
    "Checksum",
    "Header",
    "LentPayload",
    "Peer",
    "StagedValues",
    "bits_from_wire",
    "bits_of",
    "bits_to_wire",
    "check_size",
    "checksum",
    "clean",
    "clean_body",
    "constant_payload",
    "decode_body",
    "encode_body",
    "is_constant",
    "open_frames",
    "printable",
    "ranks_in",
    "room_beside",
    "seal",
    "tag_in",
]


Buffer = Any
"""Anything with the buffer protocol, contiguous: bytes, a NumPy array, a ZeroMQ frame."""

PROTOCOL_VERSION: Final = 6
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
    | m.Reserve | m.LaneOffer | m.LaneAnswer
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

encode_body: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
"""Returns the MessagePack body of a message, or a part of one."""


class BodyEncoder:
    """Encodes messages to many peers once: the last message, and what all `Joined` of a job share.

    A policy of 512 nodes takes 5 ms and has 2.4 MB, so a copy for each node took seconds of the scheduler's
    thread, and 1.2 GB.
    """

    def __init__(self) -> None:
        """Begin without a message."""
        self._last: m.Message | None = None
        self._body = b""
        self._policy: tuple[Policy | None, msgspec.Raw] = None, msgspec.Raw()
        self._members: tuple[tuple[m.Member, ...], msgspec.Raw] = (), msgspec.Raw(encode_body(()))

    def encode(self, message: m.Message) -> bytes:
        """Return the body of a message, which `encode_body` would return, too."""
        if message is not self._last:
            self._last, self._body = message, encode_body(message)
        return self._body

    def encode_joined(self, message: m.Joined) -> bytes:
        """Return the same of one `Joined` of many."""
        if message.policy is not self._policy[0]:
            self._policy = message.policy, msgspec.Raw(encode_body(message.policy))
        if message.members is not self._members[0]:
            self._members = message.members, msgspec.Raw(encode_body(message.members))
        return encode_body(msgspec.structs.replace(message, policy=self._policy[1], members=self._members[1]))


decode_body: Final[Callable[[Buffer], m.Message]] = msgspec.msgpack.Decoder[m.Message](_ANY_MESSAGE).decode
"""Returns the message of bytes that `encode_body` made here; for a peer's bytes use `open_frames`."""


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


def constant_payload(payload: Buffer) -> Buffer:
    """Return a payload that nobody changes from now on: several receivers may get the same memory."""
    return payload if is_constant(payload) else memoryview(payload).toreadonly()


def is_constant(payload: Buffer) -> bool:
    """Return whether a payload was made by `constant_payload`."""
    return type(payload) is memoryview and payload.readonly


class LentPayload(np.ndarray[Any, Any]):
    """The bytes of a payload that lies in another process's memory."""

    room: Callable[[int], Buffer | None] | None = None
    """Returns so many bytes of this process's own memory that the same peers read; None: there are none."""


class StagedValues(np.ndarray[Any, Any]):
    """A rank's own values, in memory that processes of this machine may read (`SharedPayloads.staging`).

    Who sends them says by this type that nobody changes them before the result is here, in which they are.
    """


def room_beside(payload: Buffer) -> Buffer | None:
    """Return where to put a sum that begins with a payload; None: where the payload is.

    A sum in another process's memory would have to be copied to be sent on.
    """
    owner = memoryview(payload).obj
    if not isinstance(owner, LentPayload) or owner.room is None:
        return None
    return owner.room(owner.nbytes)


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
        """Return the checksum; the payload is let go."""
        if self._value is None:
            self._value = checksum(self._payload)
            self._payload = None
        return self._value


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
    return Header(
        message=clean_body(memoryview(data)[_PREFIX.size :]),
        sequence=sequence,
        sent_at=sent_at,
        payload_crc=None if flags & _UNCHECKED else payload_crc,
        has_payload=has_payload,
        resent=bool(flags & _RESENT),
        contended=bool(flags & _CONTENDED),
    )


def clean_body(body: Buffer) -> m.Message:
    """Return the message of a peer's bytes, with printable texts.

    Raises:
        FrameError: they are no message.
    """
    try:
        message = decode_body(body)
        cleaner = _cleaners.get(type(message), clean)
        if cleaner is not None:
            message = cleaner(message)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"the body does not decode: {error}") from None
    return message


# How large a message may be before it is decoded, by its class and by who has sent it.
#
# Decoding takes 0.4 s and 40 MB for a megabyte of the worst values, so nobody gets more than he needs.
# Payloads have their own bound (`MAXMSGSIZE`), and are not decoded.

SMALL: Final = 2**18
"""Bytes that every message may have: measurements of the links of a thousand nodes."""

_MEDIUM: Final = 2**20
"""Of those that name all keys, or all that has been received, or describe a call of thousands of ranks."""

_LARGE: Final = 4 * 2**20
"""Of those to the scheduler that describe all keys, or what a node has of them."""

_BOUNDS: Final = {
    kind.__struct_config__.tag: bound
    for bound, kinds in (
        (
            _MEDIUM,
            (
                m.Ack,
                m.CallTimedOut,
                m.Failed,
                m.Heartbeat,
                m.Hello,
                m.StateOffered,
                m.StateReceived,
                m.Welcome,
            ),
        ),
        (
            _LARGE,
            (m.CallsWaiting, m.Finished, m.RegisterKeys, m.Resume, m.TopologyRequest, m.ViewReport),
        ),
    )
    for kind in kinds
}
"""By tag; of all others it is `SMALL`."""


def check_size(frame: Buffer, sender: Peer | None, own_rank: int) -> None:
    """Check the size of a message, without its payload, that is larger than `SMALL`.

    Args:
        frame: frame 0.
        sender: whose session it has come over; None: there is no session.
        own_rank: of this process; -1: the scheduler, or a node that has no rank yet.

    Raises:
        FrameError: no correct process of that kind sends as much.
    """
    if sender == SCHEDULER:
        return  # `open_frames` has a bound for all
    size, tag = len(frame), tag_in(frame)
    bound = _BOUNDS.get(tag, SMALL)
    if sender is None:
        bound = _MEDIUM if tag == m.Hello.__struct_config__.tag else SMALL
    elif own_rank >= 0:
        bound = min(bound, _MEDIUM)
    if size > bound:
        place = "a connection without a session" if sender is None else "a session with a node"
        raise FrameError(
            f"{size} bytes before the payload, on {place}: more than the {bound} that a message with tag "
            f"{tag} has there"
        )


# Identifiers of peers, and sets of ranks as bits.

Peer = NewType("Peer", int)
"""The other end of a session: a node's rank (0 and up) or `SCHEDULER`. At the scheduler, before ranks are
assigned: a number in the order of arrival."""

SCHEDULER = Peer(-1)

UNKNOWN = Peer(-2)
"""This number and those below it: the process at an address, whatever its rank. A scheduler that takes a job
over knows nodes by no more than that."""

_MOST_BIT_BYTES: Final = 1024
"""Of a bit set that comes from a peer, for twice as many ranks as a network file may have. Work on a larger
one, even to say that it is wrong, would take long."""


def bits_of(ranks: Iterable[int]) -> int:
    """Return the bit set of `ranks`."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_in(bits: int) -> tuple[int, ...]:
    """Return the ranks of a bit set in increasing order."""
    return tuple(
        8 * place + bit
        for place, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
        for bit in range(8)
        if byte >> bit & 1
    )


def bits_to_wire(bits: int) -> bytes:
    """Return a bit set as little-endian bytes: MessagePack's integers have at most 64 bits, a job may have
    more ranks.
    """
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bits_from_wire(data: bytes) -> int:
    """Return the bit set in `data` (the reverse of `bits_to_wire`).

    Raises:
        ProtocolViolation: a set that no job can have.
    """
    if len(data) > _MOST_BIT_BYTES:
        raise ProtocolViolation(f"a set of ranks has {len(data)} bytes: expected at most {_MOST_BIT_BYTES}")
    return int.from_bytes(data, "little")


# Texts of other processes, made fit for logs, errors and terminals.
#
# A text that crosses the wire ends in somebody's log, error message or terminal. One with a line break could
# look like several lines of the log, and one with an escape sequence could change what a terminal shows. So
# whatever is not printable is written as in a Python string, once, where messages come in.

S = TypeVar("S", bound=msgspec.Struct)

_Cleaner: TypeAlias = Callable[[Any], Any]
"""Returns the same object if there is nothing to do."""

_AS_THEY_ARE: Final = frozenset({"channel", "dtype"})
"""Fields that are compared with texts of this process before they are shown, if they are. Without `dtype`
chunks have no text, and cost one look into a table."""


def printable(text: str) -> str:
    """Return a text without control characters, line breaks and marks of direction: each is escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def clean(struct: S) -> S:
    """Return a struct whose texts, at any depth, are printable: the same object if they were."""
    kind = type(struct)
    if kind not in _cleaners:
        _cleaners[kind] = _cleaner_of(inspect.type_info(kind))
    cleaner = _cleaners[kind]
    if cleaner is None:
        return struct
    cleaned: S = cleaner(struct)
    return cleaned


_cleaners: Final[dict[type, _Cleaner | None]] = {}
"""By class, once one has come; None: it has no texts."""


def _cleaner_of(kind: inspect.Type) -> _Cleaner | None:
    """Return what cleans values of a type, and visits only what may have a text; None: nothing has."""
    match kind:
        case inspect.StrType():
            return printable
        case inspect.StructType():
            return _of_struct(kind)
        case inspect.DictType():
            return _of_dict(_cleaner_of(kind.key_type), _cleaner_of(kind.value_type))
        case inspect.VarTupleType() | inspect.ListType():
            return _of_items(_cleaner_of(kind.item_type))
        case inspect.UnionType():
            found = [one for one in map(_cleaner_of, kind.types) if one is not None]
            if len(found) > 1:
                raise TypeError(f"{kind} has several parts with texts: say here how they are told apart")
            return None if not found else lambda value: None if value is None else found[0](value)
        case inspect.TupleType() if any(map(_cleaner_of, kind.item_types)):
            raise TypeError(f"{kind} has texts in a tuple of fixed length: say here how they are cleaned")
    return None


def _of_struct(kind: inspect.StructType) -> _Cleaner | None:
    cleaners = [
        (field.name, cleaner)
        for field in kind.fields
        if field.name not in _AS_THEY_ARE and (cleaner := _cleaner_of(field.type)) is not None
    ]

    def cleaned(struct: msgspec.Struct) -> msgspec.Struct:
        changed = {}
        for name, cleaner in cleaners:
            before = getattr(struct, name)
            after = cleaner(before)
            if after is not before:
                changed[name] = after
        return msgspec.structs.replace(struct, **changed) if changed else struct

    return cleaned if cleaners else None


def _of_items(cleaner: _Cleaner | None) -> _Cleaner | None:
    def cleaned(items: Any) -> Any:
        after = [one(item) for item in items]
        changed = any(new is not old for new, old in zip(after, items, strict=True))
        return type(items)(after) if changed else items

    if cleaner is None:
        return None
    one = cleaner
    return cleaned


def _of_dict(of_key: _Cleaner | None, of_value: _Cleaner | None) -> _Cleaner | None:
    def cleaned(items: dict[Any, Any]) -> dict[Any, Any]:
        return {
            of_key(key) if of_key else key: of_value(value) if of_value else value
            for key, value in items.items()
        }

    if of_key is None and of_value is None:
        return None
    # Rarely there, and small, so it is made anew if it has anything.
    return lambda items: cleaned(items) if items else items
