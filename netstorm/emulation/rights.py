"""What this process lacks for making network namespaces, in words that say how to get it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from netstorm.errors import UsageError

__all__ = ["MissingRights", "missing_rights", "require_rights"]

_TUN: Final = Path("/dev/net/tun")
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Devices, routes and sysctls need the first; namespaces the second: capabilities(7)."""


class MissingRights(UsageError):
    """This process may not emulate a network; the message says what is missing and how to get it."""


def missing_rights() -> list[str]:
    """Return everything that is missing, in sentences; empty: nothing is."""
    if not sys.platform.startswith("linux"):
        return [f"this is {sys.platform}, and network namespaces are Linux's"]
    missing = []
    held = _effective_capabilities()
    lacking = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if lacking:
        missing.append(
            f"{' and '.join(lacking)} (user id {os.geteuid()}): run it as root, as in: "
            "sudo -E env PATH=$PATH netstorm wan …; or in a container with: docker run --cap-add NET_ADMIN "
            "--cap-add SYS_ADMIN --device /dev/net/tun …"
        )
    missing += [
        f"the program {program!r} of iproute2 (Debian, Ubuntu: apt-get install iproute2)"
        for program in ("ip", "tc")
        if shutil.which(program) is None
    ]
    if not _TUN.exists():
        missing.append(f"{_TUN}: load the module (modprobe tun), or give the container --device {_TUN}")
    elif not os.access(_TUN, os.R_OK | os.W_OK):
        missing.append(f"the right to open {_TUN}: run as root, or chmod it")
    return missing


def require_rights() -> None:
    """Raise `MissingRights` if anything is missing."""
    missing = missing_rights()
    if missing:
        raise MissingRights("cannot emulate a network on this machine; missing: " + "; ".join(missing))


def _effective_capabilities() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
