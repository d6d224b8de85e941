"""Requests to the daemon of an emulated network."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.lab.emulation.messages import Down, Request, SetLink, Start, Status, parse_request


@pytest.mark.parametrize(
    ("data", "request_"),
    [
        (b'{"do": "set", "source": 0, "target": 1, "rate": 1e6}', SetLink(source=0, target=1, rate=1e6)),
        (b'{"do": "start"}', Start()),
        (b'{"do": "status"}', Status()),
        (b'{"do": "down"}', Down()),
    ],
)
def test_a_request_is_read_as_it_was_written(data: bytes, request_: Request) -> None:
    assert parse_request(data) == request_


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b'{"do": "up"}', b'{"do": "set", "source": "a"}', b"[" * 9000, b" " * 70000],
    ids=lambda data: str(data[:20]),
)
def test_what_is_none_is_an_error_that_says_what_was_expected(data: bytes) -> None:
    with pytest.raises(UsageError, match="expected set, start, status or down"):
        parse_request(data)
