"""Requests to the daemon of an emulated network, as they come through its control socket. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from netstorm.errors import UsageError

__all__ = ["MOST_BYTES", "Down", "Request", "SetLink", "Start", "Status", "parse_request"]

MOST_BYTES: Final = 2**16
"""Of a request: they are short."""


class SetLink(msgspec.Struct, frozen=True, tag_field="do", tag="set"):
    """Change a link."""

    source: int
    target: int
    rate: float | None = None
    """Bit/s; None: as before."""
    latency: float | None = None
    """In s."""
    loss: float | None = None
    """Part of the packets."""


class Start(msgspec.Struct, frozen=True, tag_field="do", tag="start"):
    """Begin to apply the changes of the network file."""


class Status(msgspec.Struct, frozen=True, tag_field="do", tag="status"):
    """Report what the links are, and what they carried."""


class Down(msgspec.Struct, frozen=True, tag_field="do", tag="down"):
    """End the network."""


Request: TypeAlias = SetLink | Start | Status | Down

_decoder: Final = msgspec.json.Decoder(SetLink | Start | Status | Down)


def parse_request(data: bytes) -> Request:
    """Return the request in what was received.

    Raises:
        UsageError: it is none.
    """
    if len(data) > MOST_BYTES:
        raise UsageError(f"a request of more than {MOST_BYTES} bytes: expected set, start, status or down")
    try:
        request: Request = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = f"a request that makes no sense ({error}): expected set, start, status or down"
        raise UsageError(text) from None
    return request
