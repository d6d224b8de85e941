"""Network namespaces: entering and removing them, making devices in them, the registry of the networks
that are up, and what all this needs of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.errors import UsageError
from netstorm.lab.emulation.layout import PREFIX
from netstorm.lab.emulation.messages import NetworkEntry

__all__ = [
    "FOLDER",
    "HOSTS_FOLDER",
    "KEEP",
    "NameClaim",
    "UnmetRequirements",
    "batch",
    "check_requirements",
    "detach_standard_streams",
    "inside",
    "open_tun",
    "raise_priority",
    "read_entry",
    "registry_lock",
    "remove",
    "remove_stale",
    "running",
    "socket_path",
    "unmet_requirements",
    "without_root",
    "write_sysctl",
]


# Network namespaces: entering and removing them, and making devices in them.

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


# The registry of emulated networks on this machine: a locked file for each that is up.
#
# A network's daemon holds the lock of its file while it lives; the kernel releases it, however the daemon
# ends. So a file that is not locked is stale: a crashed network has left it, and its namespaces are removed.

KEEP: Final = b"keep\n"
"""Written to a daemon's standard input: from now on the network outlives the process that started it."""
FOLDER: Final = Path("/run/netstorm-wan")
_LOCK: Final = Path("/run/netstorm-wan.lock")
_NAMESPACE: Final = re.compile(re.escape(PREFIX) + r"(.+)-r\d+")


class NameClaim:
    """The name of an emulated network, reserved by this process until it ends."""

    def __init__(self, name: str) -> None:
        """Reserve a name, and remove what crashed networks have left.

        Raises:
            UsageError: a network of that name is up.
        """
        self.name: Final = name
        with registry_lock():
            _remove_stale()
            FOLDER.mkdir(mode=0o700, exist_ok=True)
            if _is_locked(_file(name)):
                raise UsageError(
                    f"an emulated network {name!r} is up already: `netstorm wan down --name {name}` ends it"
                )
            self._descriptor = os.open(_file(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def write(self, entry: NetworkEntry) -> None:
        """Publish the network's entry, for `read_entry` in other processes."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(entry).encode(), 0)

    def release(self) -> None:
        """Release the name, after everything else is removed."""
        with registry_lock():
            for path in (_file(self.name), socket_path(self.name)):
                path.unlink(missing_ok=True)
            os.close(self._descriptor)
            with contextlib.suppress(OSError):
                FOLDER.rmdir()  # if it is empty


def socket_path(name: str) -> Path:
    """Return the path of the socket of a network's daemon."""
    return FOLDER / f"{name}.sock"


def running() -> list[str]:
    """Return the names of the networks that are up."""
    if not FOLDER.is_dir():
        return []
    return sorted(path.stem for path in FOLDER.glob("*.json") if _is_locked(path))


def read_entry(name: str) -> NetworkEntry:
    """Return the entry of a network that is up.

    Raises:
        UsageError: none of that name is up.
    """
    if not _is_locked(_file(name)):
        names = running()
        hint = (
            f"; up are: {', '.join(names)} (--name)"
            if names
            else "; start it with `netstorm wan up NETWORK.yaml`"
        )
        raise UsageError(f"no emulated network {name!r} is up{hint}")
    try:
        entry: NetworkEntry = json.loads(_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"the emulated network {name!r} is being made, or taken down; try again") from None
    return entry


def remove_stale() -> list[str]:
    """Remove what crashed networks have left, and return their names."""
    if not FOLDER.is_dir() and not existing(PREFIX):
        return []
    with registry_lock():
        return _remove_stale()


def _remove_stale() -> list[str]:
    namespaces: dict[str, list[str]] = {}
    for namespace in existing(PREFIX):
        match = _NAMESPACE.fullmatch(namespace)
        if match is not None:
            namespaces.setdefault(match.group(1), []).append(namespace)
    for path in FOLDER.glob("*.json"):
        namespaces.setdefault(path.stem, [])
    stale = [name for name in sorted(namespaces) if not _is_locked(_file(name))]
    for name in stale:
        remove(namespaces[name])
        for path in (_file(name), socket_path(name)):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        FOLDER.rmdir()
    return stale


def _file(name: str) -> Path:
    return FOLDER / f"{name}.json"


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def registry_lock() -> Iterator[None]:
    """Keep all others from looking for a name that is free, on this machine."""
    # Only who may open a file can lock it. It is never removed, so that all lock the same one.
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# What emulating a network needs of this process and machine: capabilities, programs, the TUN device.

_TUN: Final = Path("/dev/net/tun")
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""The first for devices, routes and sysctls, the second for namespaces: capabilities(7)."""


class UnmetRequirements(UsageError):
    """This process cannot emulate a network; the message says what is missing and how to get it."""


_SYSTEM_PROGRAMS: Final = "/usr/sbin:/sbin"
"""Not in PATH of Debian's users, who would be told to install what is there."""
_OWN_NAMESPACES: Final = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec"),
    f"""
    mount -t tmpfs tmpfs /run
    mkdir -p /run/etc/upper /run/etc/work
    mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work overlay /etc
    mkdir -p {HOSTS_FOLDER}
    mount -t tmpfs tmpfs {HOSTS_FOLDER}
    export PATH="$PATH:{_SYSTEM_PROGRAMS}"
    ip link set lo up
    exec "$@"
    """,
    "sh",
)
_TRY_S: Final = 10.0


def without_root() -> tuple[str, ...]:
    """Return the words before a command by which it may emulate networks though this process may not.

    It runs in a user namespace (user_namespaces(7)): there this user is root, with network namespaces of its
    own, an empty /run, and an /etc whose changes nobody else sees.

    Returns:
        Nothing if this process may emulate networks itself, or this machine has no such namespaces.
    """
    if not _lacking():
        return ()
    try:
        tried = subprocess.run([*_OWN_NAMESPACES, "true"], capture_output=True, timeout=_TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return () if tried.returncode else _OWN_NAMESPACES


def unmet_requirements(*, own_namespaces: bool = False) -> list[str]:
    """Return one sentence for each thing that is missing, and how to get it.

    Args:
        own_namespaces: whether the command is run as `without_root` says.
    """
    if not sys.platform.startswith("linux"):
        return [f"this is {sys.platform}, and network namespaces are Linux's"]
    missing = []
    lacking = _lacking()
    if lacking and not (own_namespaces and without_root()):
        missing.append(
            f"{' and '.join(lacking)} (user id {os.geteuid()}): run it as root, as in: "
            "sudo -E env PATH=$PATH netstorm wan …; or in a container with: docker run --cap-add NET_ADMIN "
            "--cap-add SYS_ADMIN --device /dev/net/tun …"
        )
    missing += [
        f"the program {program!r} of iproute2 (Debian, Ubuntu: apt-get install iproute2)"
        for program in ("ip", "tc")
        if shutil.which(program) is None
        and not (own_namespaces and shutil.which(program, path=_SYSTEM_PROGRAMS))
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


def _lacking() -> list[str]:
    held = _effective_capabilities()
    return [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]


def _effective_capabilities() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


# Settings of an emulator's own processes: real-time priority, and no hold on their parent's pipes.


def raise_priority() -> None:
    """Give this process real-time priority; if the kernel refuses, the highest nice value that it allows.

    A nice value alone counts only within a session (sched(7), autogroups). The kernel keeps a share of each
    core for other processes (sched_rt_runtime_us). Child processes do not inherit the priority.
    """
    policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def detach_standard_streams() -> None:
    """Replace standard input, output and error by /dev/null: the parent may wait for the end of its pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
