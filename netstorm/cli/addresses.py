"""Parses HOST:PORT."""

from __future__ import annotations

from netstorm.errors import UsageError

__all__ = ["split_address"]


def split_address(address: str, option: str) -> tuple[str, int]:
    """Return host and port; an IPv6 address may stand in brackets, and http:// or https:// in front.

    Raises:
        UsageError: it is not HOST:PORT; names the option.
    """
    host, colon, port = address.removeprefix("https://").removeprefix("http://").rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{option} {address!r}: expected HOST:PORT, such as 127.0.0.1:9091")
    return host, int(port)
