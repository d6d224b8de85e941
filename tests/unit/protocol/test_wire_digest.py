"""Whoever changes a message raises the protocol's number: processes of other numbers are refused."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from netstorm.lab.testing.decoders import message_classes
from netstorm.protocol import frames

MESSAGES = set(message_classes())  # before other tests declare messages of their own

DIGESTS = {
    2: "194292ad8694bac1",
    3: "918c8883da5a9c03",
    4: "bd0104826dde6293",
    5: "bd0104826dde6293",
    6: "1c03ceb74a94bc43",
}
"""Of what the messages of a version look like on the wire, by version. A new version is a new line."""


def test_the_messages_are_those_of_the_protocol_version_that_is_announced():
    assert digest() == DIGESTS.get(frames.PROTOCOL_VERSION), (
        "the messages differ from those that were recorded for this version of the protocol: raise "
        f"PROTOCOL_VERSION in netstorm/protocol/frames.py, and record {digest()!r} for it here"
    )


def test_the_digest_sees_types_order_and_defaults_but_no_names():
    class Message(msgspec.Struct, array_like=True, tag=1):
        number: int
        text: str = ""

    class Renamed(msgspec.Struct, array_like=True, tag=1):
        count: int
        name: str = ""

    class Wider(msgspec.Struct, array_like=True, tag=1):
        number: float
        text: str = ""

    class Longer(msgspec.Struct, array_like=True, tag=1):
        number: int
        text: str = ""
        other: tuple[int, ...] = ()

    assert described(Message) == described(Renamed)
    assert len({described(kind) for kind in (Message, Wider, Longer)}) == 3


def digest() -> str:
    """Return a digest of all messages, and of the prefix before them."""
    lines = sorted(map(described, MESSAGES))
    return hashlib.sha256("\n".join([frames._PREFIX.format, *lines]).encode()).hexdigest()[:16]


def described(kind: Any) -> str:
    """Return what a type looks like on the wire."""
    return _text(msgspec.inspect.type_info(kind))


def _text(kind: Any) -> str:
    if isinstance(kind, msgspec.inspect.StructType):
        fields = (f"{_text(field.type)}{'' if field.required else '?'}" for field in kind.fields)
        return f"{kind.tag}[{', '.join(fields)}]"
    if isinstance(kind, msgspec.inspect.EnumType):
        return f"enum{sorted(member.value for member in kind.cls)}"
    inner = [
        _text(value) if isinstance(value, msgspec.inspect.Type) else f"({', '.join(map(_text, value))})"
        for value in (getattr(kind, name) for name in kind.__struct_fields__)
        if isinstance(value, msgspec.inspect.Type)
        or (isinstance(value, tuple) and value and isinstance(value[0], msgspec.inspect.Type))
    ]
    return f"{type(kind).__name__}{inner or ''}"
