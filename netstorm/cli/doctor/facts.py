"""What one machine is like: gathered here, judged in `machine`, and sent to a doctor on another host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import psutil

from netstorm import clock
from netstorm.addresses import host_port
from netstorm.cli.check import versions
from netstorm.errors import NetStormError, SettingsError
from netstorm.protocol.frames import PROTOCOL_VERSION
from netstorm.pslite import sntp
from netstorm.pslite.admission import job_key_of, parse_allow_list, serves_others
from netstorm.pslite.host_addresses import (
    advertised_host,
    is_own_address,
    listening_host,
    own_addresses,
    resolve,
    source_towards,
    tcp_listener,
    udp_address,
    udp_socket,
)
from netstorm.pslite.keys import NodeKey, SchedulerKey
from netstorm.pslite.sntp_socket import packet_key
from netstorm.pslite.tcp_info import use_bbr
from netstorm.settings import JOB_WIDE, Settings, declarations
from netstorm.settings.values import notes
from netstorm.topology.files import load_network

__all__ = ["Door", "Facts", "Port", "doors_of", "gather"]

IMPORT_S: Final = 60.0
"""Longest import of a framework: PyTorch takes 2 s, on a cold disk of a cluster up to half a minute."""

NAME_S: Final = 5.0
"""Longest look-up of a name: the resolver asks a second server after 5 s (resolv.conf(5))."""

_ANSWER_S: Final = 1.0
"""Longest wait for the time: any round trip on Earth is shorter."""

_FRAMEWORKS: Final = {
    "torch": "import torch, netstorm.frontends.torch",
    "mxnet": "import netstorm.frontends.mxnet, mxnet",
}
_SHM: Final = Path("/dev/shm")  # noqa: S108 -- looked at, not written
_TCP: Final = Path("/proc/sys/net/ipv4")
_TCP_INFO_BYTES: Final = 256

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """One port at which a process of the job listens on this machine."""

    host: str
    """Where it listens; *: at all addresses."""
    port: Port
    advertised: str
    """At which address others find it."""
    advertised_port: Port
    scheduler: bool = False
    problem: str = ""
    """Why nothing can listen there; empty: it can."""

    def place(self) -> str:
        """Return where others find it."""
        return host_port(self.advertised, self.advertised_port)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is looked at on one machine. Texts named `..._problem` are empty if there is none."""

    host: str
    identity: str
    """Random, of this run: whoever answers with another one is another machine, or another run."""
    release: str
    protocol: int
    python: str
    kernel: str
    versions: dict[str, str] = {}
    too_old: dict[str, str] = {}
    """Package to what is required of it, with what is there."""
    frameworks: dict[str, str] = {}
    """Framework that is installed to what its import says; empty: it works."""
    files_limit: Size = 1 << 20
    congestion: str = "bbr"
    congestions: list[str] = []
    chooses_bbr: bool = False
    """Connections of NetStorm's own use BBR, whatever the system's do (NETSTORM_CONGESTION)."""
    tcp_info_bytes: int = 256
    memfd: bool = True
    shm_bytes: Size = 1 << 40
    """Of /dev/shm; -1: it is not there, or cannot be written."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 1 << 40
    ipv6: bool = True
    own_name: list[str] = []
    name_problem: str = ""
    scheduler: str = ""
    """Its name, if it is given."""
    scheduler_addresses: list[str] = []
    scheduler_problem: str = ""
    """What its name means here, or why nothing leads there."""
    advertised_problem: str = ""
    addresses: list[str] = []
    doors: list[Door] = []
    settings_problem: str = ""
    settings_notes: list[str] = []
    job_wide: dict[str, str] = {}
    """Settings that all must agree on, and that are not the defaults."""
    udp_needed: bool = False
    """Whether nodes send each other datagrams."""
    secured: bool = True
    """Whether there is a key, or security is off: others may come."""
    key_problem: str = ""
    files_problem: list[str] = []
    clock_offset: float | None = None
    """Of the job's clock less this one, s; None: no scheduler answers (it may not run)."""
    firewalls: list[str] = []
    """Programs that are likely to filter here, the likeliest first."""


def gather(
    environment: Mapping[str, str], *, nodes: int = 1, schedules: bool | None = None, frameworks: bool = True
) -> tuple[Facts, Settings]:
    """Return what this machine is like, and the settings (the defaults, if they are wrong).

    Args:
        environment: variables of the job.
        nodes: how many nodes of the job run here.
        schedules: whether its scheduler does; None: if its address is one of this machine.
        frameworks: whether to import those that are installed.
    """
    from netstorm import __version__

    settings_problem = ""
    try:
        settings = Settings.from_environment(environment)
    except SettingsError as error:
        settings_problem, settings = str(error), Settings()
    imported_by = clock.monotonic() + IMPORT_S
    importing = _start_imports(environment) if frameworks else {}
    given = settings.source("scheduler_host") == "environment"
    name = socket.gethostname()
    own_name, name_problem = _within(lambda: _addresses(name), name)
    meant, scheduler_problem = _within(lambda: _addresses(settings.scheduler_host), settings.scheduler_host)
    if meant and not any(source_towards(address) for address in meant):
        scheduler_problem = f"no route to {', '.join(meant)}"
    doors, advertised_problem = (
        ([], "") if scheduler_problem else doors_of(settings, nodes=nodes, schedules=schedules)
    )
    facts = Facts(
        host=name,
        identity=secrets.token_hex(8),
        release=__version__,
        protocol=PROTOCOL_VERSION,
        python=platform.python_version(),
        kernel=platform.release(),
        versions=dict(versions()) | _installed(),
        too_old=_too_old(),
        files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        congestion=_read(_TCP / "tcp_congestion_control"),
        congestions=_read(_TCP / "tcp_available_congestion_control").split(),
        chooses_bbr=settings.congestion == "auto" and _may_choose_bbr(),
        tcp_info_bytes=_tcp_info(),
        memfd=_has_memfd(),
        shm_bytes=shutil.disk_usage(_SHM).total if os.access(_SHM, os.W_OK) else -1,
        memory_bytes=psutil.virtual_memory().available,
        ipv6=any(":" in address for address in own_addresses()),
        own_name=own_name,
        name_problem=name_problem,
        scheduler=settings.scheduler_host if given else "",
        scheduler_addresses=meant,
        scheduler_problem=scheduler_problem,
        advertised_problem=advertised_problem,
        addresses=own_addresses(),
        doors=doors,
        settings_problem=settings_problem,
        settings_notes=notes(settings, environment),
        job_wide=_job_wide(settings),
        udp_needed=settings.datagrams or settings.clock_source == "trees",
        secured=serves_others(settings),
        key_problem=_problem(lambda: _load_keys(settings)),
        files_problem=_file_problems(settings),
        clock_offset=_clock_offset(settings, meant) if given and not scheduler_problem else None,
        firewalls=_firewalls(),
        frameworks={name: _end_import(child, imported_by) for name, child in importing.items()},
    )
    return facts, settings


def doors_of(settings: Settings, *, nodes: int = 1, schedules: bool | None = None) -> tuple[list[Door], str]:
    """Return where processes of the job will listen on this machine, and why no address can be advertised."""
    for_others = serves_others(settings)
    doors = []
    try:
        scheduler = resolve(settings.scheduler_host, "DMLC_PS_ROOT_URI", for_others=for_others)
        if is_own_address(scheduler) if schedules is None else schedules:
            at = listening_host(settings.bind_host, settings.scheduler_host, for_others=for_others)
            port = settings.scheduler_port
            doors.append(_door(at, port, scheduler, port, scheduler=True))
        host = advertised_host(
            node_host=settings.node_host,
            interface=settings.interface,
            scheduler_host=settings.scheduler_host,
            bind_host=settings.bind_host,
            for_others=for_others,
        )
    except SettingsError as error:
        return doors, str(error)
    at = settings.bind_host or host
    for number in range(nodes):
        port = settings.port and settings.port + number
        outside = (settings.advertised_port and settings.advertised_port + number) or port
        doors.append(_door(at, port, host, outside))
    return doors, ""


def _door(host: str, port: int, advertised: str, outside: int, *, scheduler: bool = False) -> Door:
    return Door(
        host=host,
        port=port,
        advertised=advertised,
        advertised_port=outside,
        scheduler=scheduler,
        problem=_listen_problem(host, port, udp=scheduler),  # whose clock is asked for by datagrams
    )


def _listen_problem(host: str, port: int, *, udp: bool) -> str:
    try:
        tcp_listener(host, port).close()
        if udp:
            with udp_socket(host) as probe:
                probe.bind(udp_address(host, port, probe.family))
    except OSError as error:
        owner = _listener_of(port)
        return f"{os.strerror(error.errno or 0)}{f': {owner}' if owner else ''}"
    return ""


def _listener_of(port: int) -> str:
    """Return which process listens on a port, as far as this user may know; empty: unknown."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            connections = process.net_connections()
        except psutil.Error:  # another user's, or gone
            continue
        if any(one.laddr[1:] == (port,) and not one.raddr for one in connections):
            words = process.info["cmdline"] or [process.name()]
            kind = (
                "a NetStorm scheduler, " if {"netstorm", "scheduler"} <= {Path(w).name for w in words} else ""
            )
            return f"{kind}process {process.pid} ({' '.join(words)[:80]})"
    return ""


def _within(look_up: Callable[[], list[str]], name: str) -> tuple[list[str], str]:
    """Return what a look-up finds, or why it does not; a resolver may take minutes to give up."""
    result: list[list[str] | str] = []

    def run() -> None:
        try:
            result.append(look_up())
        except (OSError, UnicodeError) as error:
            result.append(f"no address for {name!r}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(NAME_S)
    if not result:
        return [], f"no answer about {name!r} within {NAME_S:g} s: {_nameservers()}"
    return ([], result[0]) if isinstance(result[0], str) else (result[0], "")


def _addresses(name: str) -> list[str]:
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _nameservers() -> str:
    servers = re.findall(r"^nameserver\s+(\S+)", _read(Path("/etc/resolv.conf")), re.MULTILINE)
    return f"/etc/resolv.conf asks {', '.join(servers) or 'nobody'}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _too_old() -> dict[str, str]:
    """Return packages that are missing or older than NetStorm needs."""
    found = {}
    for line in importlib.metadata.requires("netstorm") or ():
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)[^;]*", line)
        if match is None:  # of an extra, or of any version
            continue
        name, least = match.groups()
        try:
            present = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            present = "missing"
        if _numbers(present) < _numbers(least):
            found[name] = f"{present}: expected {least} or later"
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _installed() -> dict[str, str]:
    return {
        name: importlib.metadata.version(name)
        for name in _FRAMEWORKS
        if any(importlib.metadata.distributions(name=name))
    }


def _start_imports(environment: Mapping[str, str]) -> dict[str, subprocess.Popen[str]]:
    return {
        name: subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        for name, program in _FRAMEWORKS.items()
        if importlib.util.find_spec(name) is not None
    }


def _end_import(child: subprocess.Popen[str], deadline: float) -> str:
    with child:
        try:
            _, said = child.communicate(timeout=max(0.0, deadline - clock.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            return f"its import does not end within {IMPORT_S:g} s"
    if child.returncode < 0:
        return f"its import was killed by signal {-child.returncode}"
    return (said.strip() or "its import fails").splitlines()[-1] if child.returncode else ""


def _tcp_info() -> int:
    """Return how much of `struct tcp_info` the kernel fills; 0: it has none."""
    try:
        with socket.socket() as one:
            return len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES))
    except (AttributeError, OSError):  # not Linux
        return 0


def _may_choose_bbr() -> bool:
    with socket.socket() as one:
        return use_bbr(one.fileno())


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("netstorm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        return False
    return True


def _job_wide(settings: Settings) -> dict[str, str]:
    known = declarations()
    return {
        known[name].variable: known[name].kind.display(getattr(settings, name))
        for name in JOB_WIDE
        if getattr(settings, name) != known[name].default
    }


def _clock_offset(settings: Settings, addresses: list[str]) -> float | None:
    """Return what the scheduler's clock is ahead of this one, by SNTP; None: it does not answer."""
    port = settings.sntp_port or settings.scheduler_port
    nonce = sntp.new_nonce(secrets.randbits(52))
    try:
        key = packet_key(settings)
        question = sntp.request(nonce)
        with udp_socket(addresses[0]) as client:
            client.settimeout(_ANSWER_S)
            client.connect((addresses[0], port))
            asked = clock.wall()
            client.send(question if key is None else key.seal(question))
            data = client.recv(2048)
            answered = clock.wall()
        answer = sntp.read_answer(data if key is None else key.open(data))
    except (OSError, NetStormError):  # it may not run
        return None
    if answer.nonce != nonce:
        return None
    return (answer.received - asked + answer.transmitted - answered) / 2


def _problem(read: Callable[[], object]) -> str:
    """Return why something cannot be read; empty: it can."""
    try:
        read()
    except (OSError, UnicodeError, NetStormError) as error:
        return str(error)
    return ""


def _load_keys(settings: Settings) -> None:
    job_key_of(settings)
    if settings.node_key_file:
        NodeKey.load(Path(settings.node_key_file))
    if settings.scheduler_key_file:
        SchedulerKey.load(Path(settings.scheduler_key_file))


def _file_problems(settings: Settings) -> list[str]:
    """Return what is wrong with other files that the settings name."""
    found = []
    if settings.allow_file:
        path, name = Path(settings.allow_file), f"NETSTORM_ALLOW={settings.allow_file}"
        if problem := _problem(lambda: parse_allow_list(path.read_text(encoding="utf-8"), name)):
            found.append(f"{name}: {problem}")
        elif path.stat().st_mode & 0o002:
            found.append(f"{name}: everybody may add keys: `chmod 644 {path}`")
    if settings.network_file and (problem := _problem(lambda: load_network(settings.network_file))):
        found.append(f"NETSTORM_NETWORK: {problem}")
    if settings.state_dir:
        folder = Path(settings.state_dir)
        nearest = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            found.append(f"NETSTORM_STATE_DIR={folder}: {nearest} is no folder that this user can write")
    return found


def _firewalls() -> list[str]:
    found = []
    if "ENABLED=yes" in _read(Path("/etc/ufw/ufw.conf")):
        found.append("ufw")
    if Path("/run/firewalld").exists():
        found.append("firewall-cmd")
    sbin = os.pathsep.join(["/usr/sbin", "/sbin", os.defpath])
    return found + [
        name for name in ("nft", "iptables") if shutil.which(name) or shutil.which(name, path=sbin)
    ]
