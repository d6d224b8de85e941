"""Parses HOST:PORT of an option."""

from __future__ import annotations

from netstorm.addresses import split_host_port
from netstorm.errors import UsageError

__all__ = ["split_address"]


def split_address(address: str, option: str) -> tuple[str, int]:
    """Return host and port; http:// or https:// may stand in front.

    Raises:
        UsageError: it is not HOST:PORT; names the option.
    """
    try:
        return split_host_port(address.removeprefix("https://").removeprefix("http://").rstrip("/"))
    except ValueError as error:
        raise UsageError(f"{option} {address!r}: {error}") from None
