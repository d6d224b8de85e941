"""Addresses of processes, by their text: HOST:PORT, and which of them others can reach. Pure.

The one parser and the one printer of HOST:PORT. An IPv6 address stands in brackets there ([::1]:9091), since
its own colons would swallow the port.
"""

from __future__ import annotations

import ipaddress

__all__ = [
    "bracketed",
    "host_port",
    "is_address",
    "is_loopback",
    "plain_address",
    "split_host_port",
    "without_brackets",
]

_EXPECTED = "expected HOST:PORT, such as 127.0.0.1:9091, node1:9091 or [::1]:9091"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def without_brackets(host: str) -> str:
    """Return a host as system calls take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT, which `split_host_port` reads."""
    return f"{bracketed(host)}:{port}"


def split_host_port(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Args:
        text: an IPv6 address needs its brackets, unless no port follows it.
        default_port: of a host without one; None: it must have one.

    Raises:
        ValueError: it is something else; the text says what was expected.
    """
    host, colon, port = text.rpartition(":")
    if default_port is not None and (not colon or text.endswith("]") or is_address(text)):
        host, port = text, str(default_port)
    elif ":" in host and not (host.startswith("[") and host.endswith("]")):
        hint = f"; an IPv6 address stands in brackets: [{host}]:{port}" if is_address(host) else ""
        raise ValueError(f"{_EXPECTED}{hint}")
    host = without_brackets(host)
    if not host or set(host) & set(" [],/@") or (":" in host and not is_address(host)):
        raise ValueError(_EXPECTED)
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{_EXPECTED}; a port is a number from 1 to 65535")
    return host, int(port)


def is_address(text: str) -> bool:
    """Return whether it is an address in figures, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def plain_address(text: str) -> str:
    """Return an address as usually written: sockets of both families write ::ffff:10.0.0.1 for 10.0.0.1."""
    rest = text.removeprefix("::ffff:")
    return rest if "." in rest and ":" not in rest else text


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach an address. No name is looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain_address(host).partition("%")[0]).is_loopback
    except ValueError:  # a name: its address is not known here
        return False
