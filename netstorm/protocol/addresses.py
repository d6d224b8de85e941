"""Addresses of processes, by their text. Pure: no name is looked up."""

from __future__ import annotations

import ipaddress

__all__ = ["is_address", "is_loopback"]


def is_address(host: str) -> bool:
    """Return whether a host is written as an address, not as a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name: its address is not known here
        return False
