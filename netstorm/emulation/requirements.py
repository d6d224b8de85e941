"""What emulating a network needs of this process and machine: capabilities, programs, the TUN device."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from netstorm.errors import UsageError

__all__ = ["UnmetRequirements", "check_requirements", "unmet_requirements"]

_TUN: Final = Path("/dev/net/tun")
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""The first for devices, routes and sysctls, the second for namespaces: capabilities(7)."""


class UnmetRequirements(UsageError):
    """This process cannot emulate a network; the message says what is missing and how to get it."""


def unmet_requirements() -> list[str]:
    """Return one sentence for each thing that is missing, and how to get it."""
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


def check_requirements() -> None:
    """Raise `UnmetRequirements` if anything is missing."""
    missing = unmet_requirements()
    if missing:
        raise UnmetRequirements("cannot emulate a network on this machine; missing: " + "; ".join(missing))


def _effective_capabilities() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
