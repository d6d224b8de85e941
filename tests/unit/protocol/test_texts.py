"""Texts of other processes have no control characters, wherever in a message they are."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from netstorm.observe.log import Counters, Drops
from netstorm.protocol import messages as m
from netstorm.protocol.frames import clean, encode_body, open_frames, printable, seal
from netstorm.topology.policy import Policy
from tests.unit.scheduler.driving import star

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


EVERY = sorted(
    (
        kind
        for kind in vars(m).values()
        if isinstance(kind, type) and issubclass(kind, m.Message) and kind.__struct_config__.tag is not None
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", EVERY)
def test_all_texts_of_every_message_are_cleaned(kind):
    """A message that is new is tested without a word."""
    message = msgspec.convert(filled(inspect.type_info(kind)), kind)
    assert all(map(str.isprintable, texts_in(clean(message))))


def test_what_is_said_of_a_dropped_message_is_printable(caplog):
    with caplog.at_level(logging.WARNING):
        Drops(Counters()).note("refused", "rank 1", f"the type {FORGED}", 0.0)
    assert SHOWN in caplog.text
    assert FORGED not in caplog.text
