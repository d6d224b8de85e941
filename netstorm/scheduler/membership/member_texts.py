"""How nodes are named in texts for people: addresses, ranks, lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from netstorm.addresses import host_port
from netstorm.protocol.messages import Member

__all__ = ["describe_member", "format_address", "list_some"]

_LISTED: Final = 32
"""Most nodes that one text names."""


def format_address(host: str, port: int, site: str) -> str:
    """Return "host:port, site"."""
    address = host_port(host, port)
    return f"{address}, {site}" if site else address


def describe_member(member: Member) -> str:
    """Return "rank 2 (10.0.0.7:4242, denver)"."""
    return f"rank {member.rank} ({format_address(member.host, member.port, member.site)})"


def list_some(names: Iterable[str]) -> str:
    """Join names with commas; of very many, only the first."""
    every = list(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more
