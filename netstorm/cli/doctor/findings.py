"""Findings: what was looked at, what is wrong with it, and what to do. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from netstorm.addresses import bracketed

__all__ = ["Finding", "Row", "Severity", "findings_at", "firewall_hint"]


class Severity(enum.Enum):
    """How bad a finding is."""

    ERROR = "error"
    """A job does not begin, or fails."""
    WARNING = "warning"
    """A job is slower than it could be, or fails under circumstances."""
    OK = "ok"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    severity: Severity
    check: str
    """One word or two, the same for all findings of its kind."""
    where: str
    """The host, or a pair of them."""
    what: str
    """What is wrong, with the value; or the value that is right."""
    do: str = ""
    """What to do about it, with a command if there is one."""


Row: TypeAlias = tuple[Severity, str, str, str]
"""Severity, check, what is wrong, what to do."""


def findings_at(where: str, rows: Iterable[Row]) -> list[Finding]:
    """Return the findings of rows about one host or pair."""
    return [
        Finding(severity=severity, check=check, where=where, what=what, do=do)
        for severity, check, what, do in rows
    ]


def firewall_hint(firewalls: Sequence[str], protocol: str, port: int, source: str) -> str:
    """Return the command that lets packets in at a host which has these firewall programs.

    Args:
        firewalls: the likeliest first.
        protocol: tcp or udp.
        port: where the host listens.
        source: address that the packets come from; empty: unknown.
    """
    ip = "ip6" if ":" in source else "ip"
    origin, saddr, s = (
        (f"from {source} to any ", f"{ip} saddr {source} ", f"-s {source} ") if source else ("", "", "")
    )
    commands = {
        "ufw": f"ufw allow {origin}port {port} proto {protocol}",
        "firewall-cmd": f"firewall-cmd --add-port={port}/{protocol}",
        "nft": f"nft insert rule inet filter input {saddr}{protocol} dport {port} accept",
        "iptables": f"{ip}tables -I INPUT -p {protocol} {s}--dport {port} -j ACCEPT",
    }
    command = next((f"sudo {commands[name]}" for name in firewalls if name in commands), "")
    group = f"open {protocol.upper()} {port} from {bracketed(source) if source else 'the other hosts'}"
    if not command:
        return f"{group}, in the cloud's security group or the router between them"
    return f"{command} (or {group} in the cloud's security group)"
