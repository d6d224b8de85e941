"""Every message comes back from the wire as it went; everything else is a FrameError."""

from __future__ import annotations

import functools
import logging
import struct
import types
import typing
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from netstorm.errors import FrameError, OtherProtocol, ProtocolViolation
from netstorm.lab.testing.decoders import example, message_classes
from netstorm.observe.log import Counters, Drops
from netstorm.protocol import messages as m
from netstorm.protocol.frames import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    BodyEncoder,
    Checksum,
    bits_from_wire,
    bits_of,
    bits_to_wire,
    checksum,
    clean,
    decode_body,
    encode_body,
    open_frames,
    printable,
    ranks_in,
    seal,
    tag_in,
)
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.scheduler.driving import star

PREFIX_BYTES = 28


CONCRETE = sorted(set(message_classes()), key=lambda kind: kind.__name__)


POLICIES = st.builds(
    lambda version, parents, weight, reason: Policy(
        version=version,
        trees=tuple(Tree.undirected(Rank(root), parent) for root, parent in parents),
        weights=(weight,) * len(parents),
        reason=reason,
    ),
    st.integers(0, 2**40),
    st.lists(st.sampled_from([(0, (-1, 0, 0)), (1, (1, -1, 1)), (2, (1, 2, -1))]), min_size=1, max_size=3),
    st.integers(1, 9),
    st.text(max_size=20),
)


@functools.cache
def values(hint):
    """Return a strategy for the values of a field's type: the oracle knows types, not the encoder."""
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is str:
        return st.text(max_size=20)
    if hint is bytes:
        return st.binary(max_size=20)
    if isinstance(hint, type) and issubclass(hint, m.Phase):
        return st.sampled_from(m.Phase)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[st.none() if one is type(None) else values(one) for one in arguments])
    if hint is Policy:
        return POLICIES
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    raise NotImplementedError(hint)


@functools.cache
def structs(kind):
    hints = typing.get_type_hints(kind)
    fields = {field.name: values(hints[field.name]) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda given: kind(**given))


messages = st.one_of([structs(kind) for kind in CONCRETE])
frames = st.builds(
    lambda message, sequence, sent_at, crc, resent: seal(
        encode_body(message), sequence=sequence, sent_at=sent_at, payload_crc=crc, resent=resent
    ),
    messages,
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.none() | st.integers(0, 2**32 - 1),
    st.booleans(),
)


def announced(frame):
    """Return how many frames frame 0 announces."""
    return 1 + (frame[3] & 1)


def opens_or_frame_error(frame, number):
    try:
        open_frames(frame, number)
    except FrameError:
        return False
    return True


@given(messages, st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.data())
def test_every_message_comes_back_as_it_went(message, sequence, sent_at, resent, data):
    crc = data.draw(st.none() | st.integers(0, 2**32 - 1))
    frame = seal(encode_body(message), sequence=sequence, sent_at=sent_at, payload_crc=crc, resent=resent)
    header = open_frames(frame, 1 if crc is None else 2)
    assert header.message == clean(message), "see `texts`"
    assert type(header.message) is type(message)
    assert (header.sequence, header.sent_at, header.resent) == (sequence, sent_at, resent)
    assert (header.has_payload, header.payload_crc) == (crc is not None, crc or 0)


def test_a_payload_may_have_no_checksum():
    frame = seal(encode_body(m.Query()), sequence=1, sent_at=0, payload_crc=None, unchecked=True)
    header = open_frames(frame, 2)
    assert (header.has_payload, header.payload_crc) == (True, None)


def test_a_checksum_that_several_messages_share_is_computed_once_and_when_it_is_asked_for():
    payload = bytearray(b"12345678 ")
    shared = Checksum(payload)
    payload[8:] = b"9"
    assert shared.value() == 0xE3069283
    payload[8:] = b"0"
    assert shared.value() == 0xE3069283


def test_every_message_class_has_a_tag_of_its_own_and_can_be_decoded():
    tags = [kind.__struct_config__.tag for kind in CONCRETE]
    assert len(CONCRETE) > 20
    assert len(set(tags)) == len(tags)


@given(st.binary(max_size=200), st.integers(1, 3))
def test_random_bytes_are_a_frame_error(data, number):
    assert not opens_or_frame_error(data, number)


@given(frames, st.data())
def test_a_truncated_or_changed_frame_is_a_frame_error_and_so_is_another_number_of_frames(frame, data):
    for number in range(1, 5):
        assert opens_or_frame_error(frame, number) == (number == announced(frame))
    length = data.draw(st.integers(0, len(frame) - 1))
    assert not opens_or_frame_error(frame[:length], announced(frame))
    changed = bytearray(frame)
    # A burst of up to 32 bits is always found by CRC-32C; magic and version are compared; of the flags only
    # the two that mean something are looked at.
    place = data.draw(st.integers(0, len(frame) - 1).filter(lambda place: place != 3))
    changed[place] ^= data.draw(st.integers(1, 255))
    assert not opens_or_frame_error(bytes(changed), announced(frame))


@given(st.binary(max_size=300))
def test_a_body_with_a_right_checksum_but_no_message_in_it_is_a_frame_error_or_a_message(body):
    frame = seal(body, sequence=1, sent_at=0, payload_crc=None)
    if opens_or_frame_error(frame, 1):
        assert isinstance(open_frames(frame, 1).message, m.Message)


@given(messages, st.data())
def test_a_valid_body_that_was_changed_and_signed_again_is_a_frame_error_or_a_message(message, data):
    body = bytearray(encode_body(message))
    for _ in range(data.draw(st.integers(1, 5))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    frame = seal(bytes(body), sequence=1, sent_at=0, payload_crc=None)
    if opens_or_frame_error(frame, 1):
        assert isinstance(open_frames(frame, 1).message, m.Message)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,  # arrays in arrays
        b"\x82" * 10_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes, announced
        b"\xd9\x02\xff\xff",  # text that is not UTF-8
    ],
)
def test_hostile_messagepack_is_a_frame_error(body):
    assert not opens_or_frame_error(seal(body, sequence=1, sent_at=0, payload_crc=None), 1)


def test_another_protocol_version_is_named_with_ours():
    frame = bytearray(seal(encode_body(m.Query()), sequence=0, sent_at=0, payload_crc=None))
    frame[2] = PROTOCOL_VERSION + 1
    with pytest.raises(
        OtherProtocol, match=f"version {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION} "
    ) as raised:
        open_frames(bytes(frame), 1)
    assert raised.value.version == PROTOCOL_VERSION + 1


def test_a_header_larger_than_any_legal_one_is_not_even_looked_at():
    with pytest.raises(FrameError, match="bytes"):
        open_frames(bytes(MAX_HEADER_BYTES + 1), 1)


def test_a_field_added_later_does_not_trouble_an_older_reader_nor_its_absence_a_newer_one():
    class Newer(m.SessionMessage, frozen=True, tag=4):
        received: int
        beyond: tuple[int, ...] = ()
        query: int = 0
        added: str = ""

    body = msgspec.msgpack.encode(Newer(received=7, added="something"))
    assert open_frames(seal(body, sequence=0, sent_at=0, payload_crc=None), 1).message == m.Ack(received=7)
    older = msgspec.msgpack.encode([4, 7])
    assert open_frames(seal(older, sequence=0, sent_at=0, payload_crc=None), 1).message == m.Ack(received=7)


def test_frame_zero_is_laid_out_as_documented():
    frame = seal(encode_body(m.Nack(sequence=5)), sequence=3, sent_at=-2, payload_crc=0xDEADBEEF, resent=True)
    magic, version, flags, header_crc, payload_crc, sequence, sent_at = struct.unpack(
        "<2sBBIIQq", frame[:PREFIX_BYTES]
    )
    assert (magic, version, flags) == (b"NS", PROTOCOL_VERSION, 0b11)
    assert header_crc == google_crc32c.value(frame[8:])
    assert (payload_crc, sequence, sent_at) == (0xDEADBEEF, 3, -2)
    assert msgspec.msgpack.decode(frame[PREFIX_BYTES:]) == [5, 5, False]


@given(st.binary(max_size=1000))
def test_the_checksum_is_the_same_for_every_kind_of_buffer(data):
    array = np.frombuffer(data, np.uint8)
    for buffer in (bytearray(data), memoryview(data), memoryview(bytearray(data)), array, array.copy()):
        assert checksum(buffer) == checksum(data)


def test_the_checksum_is_crc_32c():
    assert checksum(b"123456789") == 0xE3069283  # the check value in every catalogue of CRCs


@pytest.mark.parametrize("kind", CONCRETE, ids=lambda kind: kind.__name__)
def test_the_tag_of_a_message_is_read_without_decoding_it(kind):
    message = decode_body(msgspec.msgpack.encode(example(kind, 1)))
    frame = seal(encode_body(message), sequence=0, sent_at=0, payload_crc=None)
    assert tag_in(frame) == kind.__struct_config__.tag


@pytest.mark.parametrize(
    ("body", "tag"),
    [
        (b"", None),
        (b"\x90", None),
        (b"\xdc\x00", None),
        (b"\xdc\x00\x10\xcc\x84", 0x84),
        (b"\x91\x7f", 0x7F),
        (b"\x91\xcc\x7f", 0x7F),
        (b"\x91\xcd\x00\x01", None),
        (b"\x81\x01\x01", None),
        (b"\xdd\x00\x00\x00\x01\x01", None),
    ],
)
def test_what_is_no_array_with_a_small_number_has_no_tag(body, tag):
    assert tag_in(b"\0" * PREFIX_BYTES + body) == tag


# ------------------------------------------------------ texts of other processes have no control characters


FORGED = (
    "x\n11:00:00 netstorm INFO job 'default' has ended well\r\x1b]0;mine\x07\x1b[2J\x85\u2028\u202e\x7f\0"
)
SHOWN = (
    "x\\n11:00:00 netstorm INFO job 'default' has ended well\\r\\x1b]0;mine\\x07\\x1b[2J"
    "\\x85\\u2028\\u202e\\x7f\\x00"
)


@given(st.text())
def test_what_is_printable_stays_and_all_else_is_escaped(text):
    assert printable(text).isprintable()
    assert (printable(text) is text) == text.isprintable()


@pytest.mark.parametrize("text", ["", "Zürich", "東京", "rank 1 (10.0.0.1:9, são-paulo) failed: 'x'"])
def test_texts_of_all_languages_stay_as_they_are(text):
    assert printable(text) is text


def received(message: m.Message) -> Any:
    sequence = 0 if isinstance(message, (m.SessionMessage, m.Datagram)) else 1
    has_payload = isinstance(message, m.DataMessage)
    frame = seal(encode_body(message), sequence=sequence, sent_at=1, payload_crc=0 if has_payload else None)
    return open_frames(frame, 1 + has_payload).message


JOIN = m.Join(asked_rank=0, num_workers=2, host="h", port=1, site="", release="1", pid=1)
MEMBER = m.Member(0, "h", 1, FORGED, 5, "user")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (msgspec.structs.replace(JOIN, site=FORGED), lambda got: got.site),
        (msgspec.structs.replace(JOIN, host=FORGED), lambda got: got.host),
        (msgspec.structs.replace(JOIN, release=FORGED), lambda got: got.release),
        (msgspec.structs.replace(JOIN, framework=FORGED), lambda got: got.framework),
        (msgspec.structs.replace(JOIN, must_agree={FORGED: "x"}), lambda got: next(iter(got.must_agree))),
        (msgspec.structs.replace(JOIN, must_agree={"x": FORGED}), lambda got: got.must_agree["x"]),
        (m.Failed(reason=FORGED), lambda got: got.reason),
        (m.Refused(reason=FORGED), lambda got: got.reason),
        (m.Waiting(text=FORGED), lambda got: got.text),
        (m.Heartbeat(busy=FORGED), lambda got: got.busy),
        (m.Suspect(rank=1, reason=FORGED), lambda got: got.reason),
        (m.PeerGone(rank=1, kind="lost", reason=FORGED), lambda got: got.reason),
        (
            m.RecoverAnswer(accepted=False, scheduler="s", rank=0, members=(MEMBER,)),
            lambda got: got.members[0].site,
        ),
        (m.RegisterKeys(keys=(m.KeySpec(0, FORGED, (), "float32"),)), lambda got: got.keys[0].name),
        (m.CallsWaiting(calls=(m.WaitingCall(FORGED, 0, ""),)), lambda got: got.calls[0].group),
    ],
)
def test_no_text_of_a_message_can_look_like_a_line_of_the_log_or_change_a_terminal(message, text):
    assert text(received(message)) == SHOWN


def test_a_message_without_such_texts_is_not_touched():
    for message in (JOIN, m.Failed(reason="out of memory"), m.Barrier(number=1), m.Resumed(proof=b"\n")):
        assert clean(message) is message
        assert received(message) == message


def filled(kind: inspect.Type) -> Any:
    """Return a value of a type, in plain form, with a forged text wherever there can be one."""
    match kind:
        case inspect.StrType():
            return FORGED
        case inspect.StructType(cls=cls) if cls is Policy:
            return msgspec.to_builtins(msgspec.structs.replace(star(2), reason=FORGED))
        case inspect.StructType() if kind.array_like:
            values = [filled(field.type) for field in kind.fields]
            return values if kind.tag is None else [kind.tag, *values]
        case inspect.StructType():
            return {field.encode_name: filled(field.type) for field in kind.fields}
        case inspect.DictType():
            return {filled(kind.key_type): filled(kind.value_type)}
        case inspect.VarTupleType() | inspect.ListType():
            return [filled(kind.item_type)]
        case inspect.TupleType():
            return [filled(one) for one in kind.item_types]
        case inspect.UnionType():
            return filled(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.BytesType():
            return b""
        case inspect.BoolType():
            return False
        case inspect.EnumType():
            return next(iter(kind.cls)).value
    return 0


def texts_in(value: Any) -> list[str]:
    """Return the texts of a message, at any depth, but those that are only compared."""
    if isinstance(value, msgspec.Struct):
        names = set(value.__struct_fields__) - {"channel", "dtype"}
        return [text for name in names for text in texts_in(getattr(value, name))]
    if isinstance(value, dict):
        return [text for item in value.items() for text in texts_in(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in texts_in(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("kind", CONCRETE)
def test_all_texts_of_every_message_are_cleaned(kind):
    """A message that is new is tested without a word."""
    message = msgspec.convert(filled(inspect.type_info(kind)), kind)
    assert all(map(str.isprintable, texts_in(clean(message))))


def test_what_is_said_of_a_dropped_message_is_printable(caplog):
    with caplog.at_level(logging.WARNING):
        Drops(Counters()).note("refused", "rank 1", f"the type {FORGED}", 0.0)
    assert SHOWN in caplog.text
    assert FORGED not in caplog.text


# ----------------------------------------------------------------------------------------------------


rank_sets = st.sets(st.integers(0, 500))


@given(rank_sets, rank_sets)
def test_a_bit_set_holds_the_ranks_that_were_put_in_and_survives_the_wire_whatever_its_size(one, other):
    assert ranks_in(bits_of(one)) == tuple(sorted(one))
    assert bits_from_wire(bits_to_wire(bits_of(one))) == bits_of(one)
    assert bool(bits_of(one) & bits_of(other)) == bool(one & other)
    assert bits_to_wire(0) == b""


def test_a_message_to_many_is_encoded_once_as_each_one_would_be():
    bodies = BodyEncoder()
    members = tuple(m.Member(rank=rank, host="h", port=1, site="", incarnation=rank) for rank in range(3))
    for version in (1, 2):
        policy = msgspec.structs.replace(star(3), version=version)
        new = m.NewPolicy(policy=policy)
        assert bodies.encode(new) is bodies.encode(new)
        assert bodies.encode(new) == encode_body(new)
        for rank in range(3):
            joined = m.Joined(
                rank=rank,
                members=members[:version],
                policy=policy,
                heartbeat_interval_s=1.0,
                heartbeat_timeout_s=10.0,
                proof_key=m.HiddenKey(bytes([rank] * 32)),
            )
            assert bodies.encode_joined(joined) == encode_body(joined)
    assert bodies.encode(m.AllFinished()) == encode_body(m.AllFinished())


def test_a_set_of_ranks_that_no_job_can_have_is_refused_at_once():
    with pytest.raises(ProtocolViolation, match="has 1000000 bytes: expected at most 1024"):
        bits_from_wire(b"\xff" * 1_000_000)
