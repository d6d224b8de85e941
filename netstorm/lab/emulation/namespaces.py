"""Network namespaces: entering and removing them, and making devices in them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.errors import UsageError

__all__ = [
    "HOSTS_FOLDER",
    "batch",
    "existing",
    "inside",
    "open_tun",
    "remove",
    "write_sysctl",
]

HOSTS_FOLDER: Final = Path("/etc/netns")
"""`ip netns exec NAME` mounts the files of HOSTS_FOLDER/NAME over those of /etc."""
_RUN: Final = Path("/run/netns")

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_IFF_TUN_NO_PI_VNET_HDR: Final = 0x0001 | 0x1000 | 0x4000
_TUN_F_CSUM_TSO: Final = 0x01 | 0x02 | 0x04
"""TSO4 and TSO6, and not USO: a super-packet is always TCP."""
_END_S: Final = 2.0
"""Time from SIGTERM to SIGKILL for processes in a namespace that is removed."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move this thread into a namespace: sockets, devices and /proc/sys/net are the namespace's."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(_RUN / namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _set(here)
    finally:
        os.close(here)


def _set(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a network namespace: {os.strerror(number)}")


def open_tun(namespace: str, device: str) -> int:
    """Make a TUN device in a namespace, and return its descriptor; closing it removes the device."""
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            request = struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI_VNET_HDR)
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM_TSO)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def batch(program: str, namespace: str | None, commands: Sequence[str]) -> None:
    """Run `ip` or `tc` commands in a namespace (None: here), all in one process.

    Raises:
        UsageError: a command failed; the message has the program's own error.
    """
    if not commands:
        return
    place = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(
        [program, *place, "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        where = "" if namespace is None else f" in namespace {namespace}"
        raise UsageError(f"`{program} -batch`{where} failed: {done.stderr.strip()}; commands: {commands}")


def write_sysctl(namespace: str, name: str, value: str) -> bool:
    """Set a sysctl of `net.` in a namespace; return whether the kernel accepted it."""
    path = Path("/proc/sys") / name.replace(".", "/")
    try:
        with inside(namespace):
            path.write_text(value, encoding="ascii")
            return path.read_text(encoding="ascii").split() == value.split()
    except OSError:
        return False


def existing(prefix: str) -> list[str]:
    """Return the namespaces, and folders of hosts files, whose names begin with `prefix`."""
    names: set[str] = set()
    for folder in (_RUN, HOSTS_FOLDER):
        with contextlib.suppress(OSError):
            names.update(path.name for path in folder.iterdir() if path.name.startswith(prefix))
    return sorted(names)


def remove(namespaces: Iterable[str]) -> None:
    """Remove namespaces, their processes, devices and hosts files. Twice does no harm."""
    names = list(namespaces)
    _end_processes(names)
    present = [name for name in names if (_RUN / name).exists()]
    for name in present:  # else connections with unsent data keep it alive for minutes
        write_sysctl(name, "net.ipv4.tcp_orphan_retries", "1")
    if present:
        done = subprocess.run(
            ["ip", "-force", "-batch", "-"],
            input="".join(f"netns del {name}\n" for name in present),
            capture_output=True,
            text=True,
            check=False,
        )
        left = [name for name in present if (_RUN / name).exists()]
        if left:
            raise UsageError(f"cannot remove the namespaces {', '.join(left)}: {done.stderr.strip()}")
    for name in names:
        shutil.rmtree(HOSTS_FOLDER / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        HOSTS_FOLDER.rmdir()  # if it is empty


def _end_processes(names: Sequence[str]) -> None:
    deadline = clock.monotonic() + _END_S
    number = signal.SIGTERM
    while running := _processes_in(names):
        for process in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        if clock.monotonic() > deadline + _END_S:
            return
        clock.sleep(0.02)
        number = signal.SIGTERM if clock.monotonic() < deadline else signal.SIGKILL


def _processes_in(names: Sequence[str]) -> list[int]:
    """Return the processes in these network namespaces, except this process."""
    inodes = set()
    for name in names:
        with contextlib.suppress(OSError):
            inodes.add((_RUN / name).stat().st_ino)
    found = []
    for path in Path("/proc").iterdir() if inodes else ():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (path / "ns/net").stat().st_ino in inodes and not _is_zombie(path):
                    found.append(int(path.name))
    return found


def _is_zombie(path: Path) -> bool:
    return (path / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "Z"
