"""Which address a node advertises to others."""

from __future__ import annotations

import socket

import psutil

from netstorm.errors import SettingsError

__all__ = ["advertised_host", "resolve"]


def resolve(host: str, variable: str) -> str:
    """Return the IPv4 address of a name, or the address itself.

    Raises:
        SettingsError: the name has none; the message names the variable it came from.
    """
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"{variable}={host!r}: no address for that name ({error}); give an address or fix DNS"
        ) from None
    return str(found[0][4][0])


def advertised_host(*, node_host: str, interface: str, scheduler_host: str) -> str:
    """Return the address to advertise: given, of an interface, or of the route to the scheduler.

    Raises:
        SettingsError: the interface does not exist or has no IPv4 address; the message lists those that do.
    """
    if node_host:
        return resolve(node_host, "DMLC_NODE_HOST")
    if interface:
        return _of_interface(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        try:
            probe.connect((resolve(scheduler_host, "DMLC_PS_ROOT_URI"), 9))
        except OSError as error:
            raise SettingsError(
                f"DMLC_PS_ROOT_URI={scheduler_host!r}: no route to it ({error}); "
                "set DMLC_NODE_HOST to this node's address"
            ) from None
        return str(probe.getsockname()[0])


def _of_interface(name: str) -> str:
    addresses = {
        interface: entry.address
        for interface, entries in psutil.net_if_addrs().items()
        for entry in reversed(entries)
        if entry.family == socket.AF_INET
    }
    if name not in addresses:
        known = ", ".join(f"{interface} ({address})" for interface, address in sorted(addresses.items()))
        raise SettingsError(
            f"DMLC_INTERFACE={name!r}: no such interface with an IPv4 address; this host has {known}"
        )
    return addresses[name]
