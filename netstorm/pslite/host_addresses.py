"""Which addresses this machine has, which of them others can use, and where a process listens.

A name may have several addresses, of IPv4 and of IPv6. On Debian and Ubuntu a machine's own name means
127.0.1.1, on that machine alone: a process that took it would hide from all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import uuid
from pathlib import Path
from typing import Final

from netstorm.addresses import is_address, is_loopback, without_brackets
from netstorm.errors import SettingsError

__all__ = [
    "advertised_host",
    "boot_number",
    "given_host",
    "is_own_address",
    "listening_host",
    "loopback_host",
    "machine_number",
    "own_addresses",
    "resolve",
    "source_towards",
    "tcp_listener",
    "udp_address",
    "udp_socket",
]


_VIRTUAL: Final = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "cni",
    "flannel",
    "cali",
    "lxc",
    "lxdbr",
    "podman",
    "vmnet",
)
"""Names of interfaces that lead to containers and virtual machines of this machine alone."""

_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849): the way to them is the default route."""

_ANY_PORT: Final = 9
"""Connecting a UDP socket sends nothing."""

_NETWORK: Final = Path("/proc/self/ns/net")


def resolve(host: str, variable: str, *, for_others: bool = False) -> str:
    """Return an address of a name, or the address itself. Of several it is the first with a route to it, of
    IPv4 if there is one.

    Args:
        host: name or address.
        variable: where it is from, for messages.
        for_others: other machines take part: if the name means loopback here, it is this machine's own name,
            and the address is one at which others reach it, if it has any.

    Raises:
        SettingsError: the name has no address.
    """
    found = _addresses_of(host, variable)
    if for_others and _is_own_name(host, found):
        return next(iter(own_addresses()), found[0])
    return next((address for address in found if source_towards(address)), found[0])


def advertised_host(
    *,
    node_host: str,
    interface: str,
    scheduler_host: str,
    bind_host: str = "",
    for_others: bool = False,
) -> str:
    """Return the address to advertise: the given one, that of an interface, the one that is listened on, or
    that from which the scheduler is reached.

    Args:
        node_host, interface, bind_host: as the settings; empty: not given.
        scheduler_host: the scheduler's name or address.
        for_others: as for `resolve`.

    Raises:
        SettingsError: a name without address, an interface that does not exist, no route to the scheduler.
    """
    given = given_host(node_host=node_host, interface=interface, bind_host=bind_host)
    if given is not None:
        return given[0]
    scheduler = resolve(scheduler_host, "DMLC_PS_ROOT_URI", for_others=for_others)
    source = source_towards(scheduler)
    if source is None:
        raise SettingsError(
            f"DMLC_PS_ROOT_URI={scheduler_host!r}: no route to {scheduler}; set DMLC_NODE_HOST to this "
            "node's address"
        )
    return source


def given_host(*, node_host: str, interface: str, bind_host: str) -> tuple[str, str] | None:
    """Return the address that the settings give this process, and the variable with its value; None: none.

    Raises:
        SettingsError: a name without address, or an interface that does not exist.
    """
    if node_host:
        return resolve(node_host, "DMLC_NODE_HOST"), f"DMLC_NODE_HOST={node_host}"
    if interface:
        return _of_interface(interface), f"DMLC_INTERFACE={interface}"
    if bind_host not in {"", "*", "0.0.0.0", "::"}:  # noqa: S104 -- compared, not bound
        return resolve(bind_host, "NETSTORM_BIND"), f"NETSTORM_BIND={bind_host}"
    return None


def listening_host(bind_host: str, scheduler_host: str, *, for_others: bool) -> str:
    """Return the address on which a scheduler listens; *: on all.

    It is that of its name. If the name means several, or loopback as a machine's own name may, other machines
    reach it at addresses that are not known here.

    Args:
        bind_host: the given one; empty: none.
        scheduler_host: its name or address.
        for_others: other machines may take part, since there is a key, or security is off.

    Raises:
        SettingsError: the name has no address.
    """
    if bind_host:
        return bind_host
    found = _addresses_of(scheduler_host, "DMLC_PS_ROOT_URI")
    several = len(found) > 1 and not all(map(is_loopback, found))
    if for_others and (several or _is_own_name(scheduler_host, found)):
        return "*"
    return found[0]


def loopback_host() -> str:
    """Return the loopback address of this machine: IPv4's, if it has one."""
    return "127.0.0.1" if source_towards("127.0.0.1") else "::1"


def own_addresses() -> list[str]:
    """Return the addresses of this machine at which others may reach it, the likeliest first: those of its
    default routes, then those of its other interfaces, and bridges to its own containers last.
    """
    import psutil  # noqa: PLC0415 - 10 ms of a processor, which a job of one machine does not need

    usual = [address for target in _ELSEWHERE if (address := source_towards(target)) is not None]
    states = psutil.net_if_stats()
    by_interface = sorted(
        psutil.net_if_addrs().items(), key=lambda item: (item[0].startswith(_VIRTUAL), item[0])
    )
    others = [
        entry.address
        for name, entries in by_interface
        if name not in states or states[name].isup
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in entries
        if entry.family == family
    ]
    return [address for address in dict.fromkeys([*usual, *others]) if not _is_local(address)]


def source_towards(address: str) -> str | None:
    """Return the address of this machine from which packets to another one leave; None: there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_own_address(host: str) -> bool:
    """Return whether an address is one of this machine's own, in this network namespace. No name is looked
    up.
    """
    return is_loopback(host) or (is_address(host) and source_towards(host) == host)


def machine_number() -> int:
    """Return a number that those processes share which reach each other over loopback: of one boot of one
    machine, in one network namespace. It is a hash, so peers learn nothing of the machine.
    """
    try:
        network = str(_NETWORK.readlink())
    except OSError:  # not Linux
        network = f"{socket.gethostname()} {uuid.getnode()}"
    text = f"{boot_number()} {network}".encode()
    return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def tcp_listener(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens; *: on all addresses, of IPv4 and IPv6.

    Raises:
        OSError: it cannot.
    """
    if host == "*":
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def udp_socket(host: str = "*") -> socket.socket:
    """Return a UDP socket that is not bound yet: for an address of its family, or, for *, of both families.

    `udp_address` makes the addresses for it.
    """
    if ":" not in host and host not in {"", "*"}:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    except OSError:  # a machine without IPv6
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made


def udp_address(host: str, port: int, family: int) -> tuple[str, int]:
    """Return an address as a socket of `udp_socket` takes it; of a name IPv4's, if it has one.

    Raises:
        OSError: the name has no address of this family.
    """
    if host in {"", "*"}:
        return ("::" if family == socket.AF_INET6 else ""), port
    with contextlib.suppress(socket.gaierror):
        entries = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)
        address = str(entries[0][4][0])
        return (f"::ffff:{address}" if family == socket.AF_INET6 else address), port
    entries = socket.getaddrinfo(host, port, socket.AddressFamily(family), socket.SOCK_DGRAM)
    return str(entries[0][4][0]), port


def _addresses_of(host: str, variable: str) -> list[str]:
    """Return the addresses of a name, or the address itself; those of IPv4 first."""
    try:
        entries = socket.getaddrinfo(without_brackets(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"{variable}={host!r}: no address for that name ({error}); give an address or fix DNS"
        ) from None
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _is_own_name(host: str, addresses: list[str]) -> bool:
    """Return whether a name means loopback here, and is another one than localhost."""
    is_name = not is_address(host) and not is_loopback(host)
    return is_name and all(map(is_loopback, addresses))


def _is_local(address: str) -> bool:
    """Return whether an address has no meaning on other machines: loopback, or that of one link."""
    return is_loopback(address) or "%" in address or address.startswith(("169.254.", "fe80:"))


def _of_interface(name: str) -> str:
    import psutil  # noqa: PLC0415 - as in `own_addresses`

    addresses: dict[str, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface, entries in psutil.net_if_addrs().items():
            for entry in entries:
                if entry.family == family and (family == socket.AF_INET or not _is_local(entry.address)):
                    addresses.setdefault(interface, entry.address)
    if name not in addresses:
        known = ", ".join(f"{interface} ({address})" for interface, address in sorted(addresses.items()))
        raise SettingsError(
            f"DMLC_INTERFACE={name!r}: no such interface with an address; this host has {known}"
        )
    return addresses[name]


# A number of the boot of this machine: processes that have the same one share a kernel.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A random UUID of each boot of the kernel, the same in all containers (random(4))."""


def boot_number() -> int:
    """Return the number; 0: the system has none. It is a hash, so peers do not learn the UUID itself."""
    try:
        identity = _BOOT_ID.read_bytes().strip()
    except OSError:
        return 0
    return 1 + int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "big")
